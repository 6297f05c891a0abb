"""Training: data, checkpoints, recovery, and what keeps a run going.

Names load when they are first used: importing this package does not import jax.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara._exports import exports

if TYPE_CHECKING:
    from capibara.checkpoints.policy import Keep as Keep
    from capibara.checkpoints.storage import Alert as Alert
    from capibara.checkpoints.store import Checkpoints as Checkpoints
    from capibara.checkpoints.store import Restored as Restored
    from capibara.processes import barrier as barrier
    from capibara.processes import gather as gather
    from capibara.processes import join_from_environment as join_from_environment
    from capibara.train.data.batches import Batches as Batches
    from capibara.train.data.batches import open_batches as open_batches
    from capibara.train.data.config import DataConfig as DataConfig
    from capibara.train.data.wrapped import wrap_dataset as wrap_dataset
    from capibara.train.device_errors import TpuError as TpuError
    from capibara.train.preemption import Preemption as Preemption
    from capibara.train.recovery import TpuRecoveryManager as TpuRecoveryManager
    from capibara.train.recovery import current_manager as current_manager
    from capibara.train.supervisor import Supervisor as Supervisor
    from capibara.train.supervisor import supervise as supervise
    from capibara.train.watchdog import Watchdog as Watchdog

__all__, __getattr__, __dir__ = exports(
    __name__,
    {
        "data.batches": "Batches open_batches",
        "data.config": "DataConfig",
        "data.wrapped": "wrap_dataset",
        "capibara.checkpoints.policy": "Keep",
        "capibara.checkpoints.storage": "Alert",
        "capibara.checkpoints.store": "Checkpoints Restored",
        "device_errors": "TpuError",
        "preemption": "Preemption",
        "capibara.processes": "barrier gather join_from_environment",
        "recovery": "TpuRecoveryManager current_manager",
        "supervisor": "Supervisor supervise",
        "watchdog": "Watchdog",
    },
)
