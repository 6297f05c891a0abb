"""The documented training names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara._exports import exports

if TYPE_CHECKING:
    from capibara.mesh.training_mesh import create_training_mesh as create_training_mesh
    from capibara.mesh.training_mesh import training_mesh_config as training_mesh_config
    from capibara.train.trainer import TpuDistributedTrainer as TpuDistributedTrainer

__all__, __getattr__, __dir__ = exports(
    __name__,
    {
        "capibara.mesh.training_mesh": "create_training_mesh training_mesh_config",
        "capibara.train.trainer": "TpuDistributedTrainer",
    },
)
