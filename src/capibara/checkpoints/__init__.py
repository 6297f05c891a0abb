"""Checkpoints of a run: saved in the background, checked, kept by policy, restored onto any mesh.

Names load when they are first used: importing this package imports neither jax nor orbax.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara._exports import exports

if TYPE_CHECKING:
    from capibara.checkpoints.policy import Keep as Keep
    from capibara.checkpoints.storage import Alert as Alert
    from capibara.checkpoints.store import Checkpoints as Checkpoints
    from capibara.checkpoints.store import Restored as Restored

__all__, __getattr__, __dir__ = exports(
    __name__,
    {"policy": "Keep", "storage": "Alert", "store": "Checkpoints Restored"},
)
