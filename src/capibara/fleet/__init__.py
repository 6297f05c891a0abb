"""Programs on many machines: `capibara.fleet.launch.launch`, and the files that it writes for other engines.

Names load when they are first used: importing this package imports neither jax nor Ray.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara._exports import exports

if TYPE_CHECKING:
    from capibara.fleet.jobset import jobset_manifest as jobset_manifest
    from capibara.fleet.sky import sky_task as sky_task

__all__, __getattr__, __dir__ = exports(
    __name__,
    {
        "jobset": "jobset_manifest",
        "sky": "sky_task",
    },
)
