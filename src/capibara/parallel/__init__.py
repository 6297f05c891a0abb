"""Jobs that a layout can be found for, a layout made into a compiled step, and pipelines.

Names load when they are first used: importing this package does not import jax.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara._exports import exports

if TYPE_CHECKING:
    from capibara.parallel.job import Job as Job
    from capibara.parallel.job import program_job as program_job
    from capibara.parallel.pipelines.program import pipelined as pipelined
    from capibara.parallel.pipelines.schedule import Schedule as Schedule
    from capibara.parallel.pipelines.stages import pipeline as pipeline
    from capibara.parallel.remat import checkpoint_scans as checkpoint_scans
    from capibara.parallel.run import Program as Program
    from capibara.parallel.training_step import training_job as training_job

__all__, __getattr__, __dir__ = exports(
    __name__,
    {
        "job": "Job program_job",
        "pipelines.program": "pipelined",
        "pipelines.schedule": "Schedule",
        "pipelines.stages": "pipeline",
        "remat": "checkpoint_scans",
        "run": "Program",
        "training_step": "training_job",
    },
)
