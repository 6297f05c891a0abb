"""`capibara plan MODEL --serve`: users, tokens a second and dollars a million, before anything is rented."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from capibara.cli import failures, output
from capibara.cli.failures import Code

if TYPE_CHECKING:
    from capibara.hardware.topology import Slice
    from capibara.serve.config import EngineConfig
    from capibara.serve.prediction.result import ServingPlan


@dataclass(frozen=True)
class ServingOptions:
    """What was asked beside the engine's own settings."""

    target_latency_ms: float | None
    target_first_ms: float | None
    lengths: tuple[int, int] | None
    """(prompt, output) of every request; of the trace when None."""
    think_s: float
    tensor_parallel: int | None
    sampling: str
    memory_limit: float | None
    region: str | None
    pricing: Path | None


def plan_serving(
    model: str, on: Slice, config: EngineConfig, asked: ServingOptions, tell: Callable[[str], None]
) -> ServingPlan:
    """The plan of one slice."""
    from capibara.serve.load.trace import Lengths, fixed_trace, scaled
    from capibara.serve.prediction.api import predict_serving
    from capibara.serve.prediction.served import served_model
    from capibara.serve.prediction.simulation import Traffic

    served = served_model(model)
    if asked.lengths is not None:
        lengths = [Lengths(*asked.lengths)]
    else:
        context = served.config.max_length
        lengths = scaled(fixed_trace(), min(config.max_length or context, context))
    sampling: Any = asked.sampling
    return predict_serving(
        served,
        on,
        config=config,
        traffic=Traffic(lengths, asked.think_s),
        target_latency_ms=asked.target_latency_ms,
        target_first_ms=asked.target_first_ms,
        tensor_parallel=asked.tensor_parallel,
        form=sampling,
        memory_limit_gb=asked.memory_limit,
        region=asked.region,
        pricing=asked.pricing,
        tell=tell,
    )


def show_serving(plans: list[ServingPlan], json: bool) -> None:
    """One slice whole, or a line each of several; exit code 3 where none of them does what was asked."""
    possible = any(plan.possible for plan in plans)
    if json:
        documents = [plan.as_dict() for plan in plans]
        problem = {} if possible else failures.error(Code.DOES_NOT_FIT, plans[0].verdict)
        whole = documents[0] if len(plans) == 1 else {"plans": documents}
        output.show_json({"command": output.command_line(), **whole, **problem})
    else:
        from capibara.serve.prediction.report import show, show_slices

        screen = output.console()
        if len(plans) == 1:
            show(plans[0], screen)
        else:
            show_slices(plans, screen)
    if not possible:
        raise typer.Exit(Code.DOES_NOT_FIT)
