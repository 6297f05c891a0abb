"""What a layout costs: passes, roofline, links, memory lifetime, and the calibration of a chip by its own runs.

`estimate` is in the module of its name: `from capibara.cost.estimate import estimate`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara._exports import exports

if TYPE_CHECKING:
    from capibara.cost.calibration import Calibration as Calibration
    from capibara.cost.calibration import Fit as Fit
    from capibara.cost.calibration import Run as Run
    from capibara.cost.calibration import fit as fit
    from capibara.cost.ops import op_seconds as op_seconds
    from capibara.cost.result import Estimate as Estimate
    from capibara.cost.result import LinkUse as LinkUse
    from capibara.cost.result import Memory as Memory
    from capibara.cost.result import Part as Part

__all__, __getattr__, __dir__ = exports(
    __name__,
    {
        "calibration": "Calibration Fit Run fit",
        "result": "Estimate LinkUse Memory Part",
        "ops": "op_seconds",
    },
)
