"""What serving a model will take, before anything is rented: does it fit, how many users, how fast, for how much.

`predict_serving` gives the whole answer; `StepTimes` the seconds of one step on a chip that is not here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara._exports import exports

if TYPE_CHECKING:
    from capibara.serve.prediction.api import predict_serving as predict_serving
    from capibara.serve.prediction.result import ServingPlan as ServingPlan
    from capibara.serve.prediction.result import TrafficRow as TrafficRow
    from capibara.serve.prediction.simulation import Traffic as Traffic
    from capibara.serve.prediction.step_times import StepTimes as StepTimes

__all__, __getattr__, __dir__ = exports(
    __name__,
    {
        "api": "predict_serving",
        "result": "ServingPlan TrafficRow",
        "simulation": "Traffic",
        "step_times": "StepTimes",
    },
)
