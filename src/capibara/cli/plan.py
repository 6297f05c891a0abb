"""`capibara plan`: does it fit, how fast, what does it cost, before anything is rented."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from capibara.cli import failures, output
from capibara.cli.failures import Code
from capibara.cli.plan_serving import ServingOptions, plan_serving, show_serving
from capibara.errors import rule_error

if TYPE_CHECKING:
    from capibara.cost.calibration import Fit
    from capibara.plan.measured import Calibrated
    from capibara.plan.result import Plan
    from capibara.plan.target import Recipe
    from capibara.prices.spot import SpotAssumptions

# Seconds between two lines of progress where nobody watches a terminal.
_SILENCE = 10.0
# So many times as long where the last line still holds: a compiler may take minutes.
_NOTHING_NEW = 6


SERVED = "With --serve"
_OF_SERVING = (
    "target_latency_ms", "target_first_ms", "prompt", "output_tokens", "trace", "think_s", "tensor_parallel",
    "sampling", "weights", "cache_dtype", "page_size", "max_sequences", "max_batch_tokens", "max_length",
)  # fmt: skip
_OF_BOTH = ("target", "on", "serve", "memory_limit", "region", "pricing", "json")


def plan(
    context: typer.Context,
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="TARGET",
            help="A preset (llama-7b, FILE.toml), a Hugging Face config.json or folder, or FILE.py:FUNCTION.",
            show_default=False,
        ),
    ] = None,
    on: Annotated[
        str,
        typer.Option(
            "--on", metavar="SLICE", help="v4-32 (16 chips), v4-64, v5p-128, h200x8; with --serve also A,B,C."
        ),
    ] = "v4-32",
    train: Annotated[
        bool, typer.Option("--train", help="FUNCTION is loss(params, batch); plan a step around it.")
    ] = False,
    shapes: Annotated[str, typer.Option(help="The function of FILE.py that returns the arguments.")] = "shapes",
    batch: Annotated[int | None, typer.Option(min=1, help="Rows of a step, over all chips.")] = None,
    sequence: Annotated[int | None, typer.Option(min=1, help="Tokens of a row.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="adamw or sgd.")] = None,
    remat: Annotated[str | None, typer.Option(help="none, dots or full; all are tried when it is not given.")] = None,
    accumulate: Annotated[int | None, typer.Option(min=1, help="Microbatches of a step; tried when not given.")] = None,
    mesh: Annotated[str | None, typer.Option(metavar="AXES", help="Fix the mesh: data=4,model=8.")] = None,
    goal: Annotated[str, typer.Option("--target", help="throughput, latency or memory.")] = "throughput",
    memory_limit: Annotated[float | None, typer.Option(metavar="GIB", help="GiB of a chip to plan with.")] = None,
    top: Annotated[int, typer.Option(min=1, help="How many layouts are shown.")] = 3,
    level: Annotated[
        str, typer.Option(help="Evidence: analytic, xla (CPU compile), tpu or gpu (the chip's compiler).")
    ] = "analytic",
    confirm: Annotated[int | None, typer.Option(min=1, metavar="K", help="Compile the best K at that level.")] = None,
    time_limit: Annotated[
        float, typer.Option("--time-limit", metavar="SECONDS", help="Stop the search then, with the best so far.")
    ] = 60.0,
    region: Annotated[str | None, typer.Option(help="Whose prices; the chip's first in the table by default.")] = None,
    pricing: Annotated[Path | None, typer.Option(metavar="TOML", help="Prices laid over the shipped table.")] = None,
    preemptions: Annotated[
        float | None, typer.Option(min=0, metavar="RATE", help="Assumed preemptions of a host in an hour.")
    ] = None,
    storage: Annotated[
        float | None, typer.Option(min=1, metavar="MB/S", help="Assumed speed at which a host writes a checkpoint.")
    ] = None,
    restart: Annotated[
        float | None, typer.Option(min=0, metavar="SECONDS", help="Assumed time to start again after a preemption.")
    ] = None,
    uncalibrated: Annotated[bool, typer.Option("--uncalibrated", help="Ignore what earlier runs taught.")] = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with charts.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    measured: Annotated[
        Path | None, typer.Option(metavar="JSON", help="Keep a run's step_seconds and peak_bytes beside this plan.")
    ] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Predicted against measured, and the correction that follows.")
    ] = False,
    serve: Annotated[
        bool, typer.Option("--serve", help="Plan serving the model: users, tokens a second, dollars a million.")
    ] = False,
    target_latency_ms: Annotated[
        float | None,
        typer.Option(min=0.0, metavar="X", help="95th percentile between two tokens.", rich_help_panel=SERVED),
    ] = None,
    target_first_ms: Annotated[
        float | None,
        typer.Option(min=0.0, metavar="X", help="95th percentile to the first token.", rich_help_panel=SERVED),
    ] = None,
    prompt: Annotated[
        int, typer.Option(min=1, metavar="N", help="Tokens of each prompt.", rich_help_panel=SERVED)
    ] = 512,
    output_tokens: Annotated[
        int, typer.Option("--output", min=1, metavar="N", help="Tokens of each answer.", rich_help_panel=SERVED)
    ] = 128,
    trace: Annotated[
        bool,
        typer.Option("--trace", help="Lengths of `capibara bench serve`'s trace instead.", rich_help_panel=SERVED),
    ] = False,
    think_s: Annotated[
        float,
        typer.Option(min=0.0, metavar="S", help="Between an answer and the next request.", rich_help_panel=SERVED),
    ] = 0.0,
    tensor_parallel: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Chips of one engine; the fewest that do.", rich_help_panel=SERVED),
    ] = None,
    sampling: Annotated[
        str,
        typer.Option(metavar="FORM", help="greedy, drawn, or filtered (top-k, top-p).", rich_help_panel=SERVED),
    ] = "drawn",
    weights: Annotated[
        str | None, typer.Option(metavar="TYPE", help="int8; as they are.", rich_help_panel=SERVED)
    ] = None,
    cache_dtype: Annotated[
        str | None,
        typer.Option(metavar="TYPE", help="Of the pages: float32, bfloat16, int8.", rich_help_panel=SERVED),
    ] = None,
    page_size: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens of a page.", rich_help_panel=SERVED)] = 64,
    max_sequences: Annotated[
        int, typer.Option(min=1, metavar="N", help="That one engine runs at a time.", rich_help_panel=SERVED)
    ] = 256,
    max_batch_tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="Of one step.", rich_help_panel=SERVED)
    ] = 2048,
    max_length: Annotated[
        int | None,
        typer.Option(min=2, metavar="N", help="Of a prompt and its answer; the model's.", rich_help_panel=SERVED),
    ] = None,
) -> None:
    """Does it fit on a slice, how fast, what does it cost, which layout; exit code 3 when it does not or may not fit.

    For example: capibara plan llama-7b --on v4-64; capibara plan train.py:loss --train --on v4-32 --html plan.html;
    capibara plan llama-1b --serve --on h200 --target-latency-ms 5
    """
    _check_serving(context, serve)
    if calibrate:
        _calibrate(context, on, json)
        return
    if target is None:
        from capibara.models.preset import preset_names

        raise rule_error(
            "A plan is for a TARGET", "none", f"name {', '.join(preset_names())}, config.json or FILE.py:FUNCTION"
        )
    if serve:
        from capibara.plan.place import place
        from capibara.serve.config import EngineConfig

        slices = [place(one) for one in on.split(",")]  # a wrong name is said before minutes are spent
        asked = ServingOptions(
            target_latency_ms, target_first_ms, None if trace else (prompt, output_tokens), think_s, tensor_parallel,
            sampling, memory_limit, region, pricing,
        )  # fmt: skip
        config = EngineConfig(
            max_sequences=max_sequences, max_batch_tokens=max_batch_tokens, max_length=max_length,
            page_size=page_size, cache_dtype=cache_dtype, weights=weights,
        )  # fmt: skip
        with _progress() as tell:
            plans = [plan_serving(target, one, config, asked, tell) for one in slices]
        show_serving(plans, json)
        return
    from capibara.plan.api import plan as make
    from capibara.plan.measured import read_measured
    from capibara.plan.target import Recipe

    recipe = Recipe(target, train, shapes, optimizer, batch, sequence, remat, accumulate)
    _check_preset(recipe)
    kept = None if measured is None else read_measured(measured)
    if html is not None and not html.resolve().parent.is_dir():
        raise rule_error("--html writes into a folder that is there", str(html), f"make {html.parent} first")
    # What a user's file prints while it is loaded and traced is not the report, and would break --json.
    with _progress() as tell, contextlib.redirect_stdout(sys.stderr):
        tell("reading the program")
        made = make(
            recipe,
            on=on,
            mesh=mesh,
            target=goal,
            memory_limit_gb=memory_limit,
            top=top,
            level=level,
            confirm=confirm,
            region=region,
            pricing=pricing,
            spot=_spot(preemptions, storage, restart),
            calibrated=not uncalibrated,
            time_limit=time_limit,
            tell=tell,
        )
    if kept is not None:
        made.record(**kept)
    if html is not None:
        made.save_html(html)
    _show(made, json, kept, html)
    if not made.fits:
        raise typer.Exit(Code.DOES_NOT_FIT)


def _check_serving(context: typer.Context, serve: bool) -> None:
    """Options of the one kind of plan are refused by the other, not ignored."""
    typed = [name for name in context.params if _typed(context, name)]
    if serve:
        others = [name for name in typed if name not in (*_OF_SERVING, *_OF_BOTH)]
        if others:
            raise rule_error(
                "--serve plans an engine, and takes the options that are said to be of serving",
                f"{', '.join(map(_option, others))} with it",
                f"leave {'it' if len(others) == 1 else 'them'} out",
            )
        lengths = [name for name in ("prompt", "output_tokens") if name in typed]
        if "trace" in typed and lengths:
            raise rule_error(
                "Lengths are those of --trace, or --prompt and --output",
                f"--trace and {', '.join(map(_option, lengths))}",
                "leave one out",
            )
    elif others := [name for name in typed if name in _OF_SERVING]:
        raise rule_error("That is of a served model", ", ".join(map(_option, others)), "add --serve, or leave it out")


def _option(name: str) -> str:
    spelled = {"goal": "target", "output_tokens": "output"}.get(name, name)
    return f"--{spelled.replace('_', '-')}"


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Where the plan is, on standard error: a line that moves on a terminal, elsewhere one every few seconds."""
    with output.progress() as bar:
        if not bar.disable:
            task = bar.add_task("", total=None)
            yield lambda text: bar.update(task, description=text)
            return
        said, done, started = [""], threading.Event(), time.monotonic()
        stream = sys.stderr

        def speak() -> None:
            before, waited = "", 0
            while not done.wait(_SILENCE):
                text, waited = said[0], waited + 1
                if text != before or waited >= _NOTHING_NEW:
                    stream.write(f"capibara: {time.monotonic() - started:.0f} s, {text}\n")
                    stream.flush()
                    before, waited = text, 0

        # A thread, since tracing a large program alone takes many seconds.
        speaker = threading.Thread(target=speak, daemon=True)
        speaker.start()
        try:
            yield lambda text: said.__setitem__(0, text)
        finally:
            done.set()
            speaker.join()


def _check_preset(recipe: Recipe) -> None:
    if not recipe.is_preset:
        return
    if recipe.train:
        raise rule_error("--train is for FILE.py:FUNCTION", recipe.target, "leave it out: a preset is always trained")
    if recipe.shapes != "shapes":
        raise rule_error("--shapes is for FILE.py:FUNCTION", recipe.target, "leave it out")


def _spot(preemptions: float | None, storage: float | None, restart: float | None) -> SpotAssumptions:
    from capibara.prices.spot import SpotAssumptions

    assumed: dict[str, Any] = {}
    if preemptions is not None:
        assumed["preemptions_per_host_hour"] = preemptions
    if storage is not None:
        assumed["storage_bytes_per_second"] = storage * 1e6
    if restart is not None:
        assumed["restart_seconds"] = restart
    return SpotAssumptions(**assumed)


def _show(made: Plan, json: bool, kept: dict[str, Any] | None, html: Path | None) -> None:
    if json:
        problem = {} if made.fits else failures.error(Code.DOES_NOT_FIT, "No layout fits the chips' memory.")
        output.show_json({"command": output.command_line(), **made.as_dict(), **problem})
        return
    from capibara.plan.report import show

    screen = output.console()
    show(made, screen)
    if kept is not None and made.best is not None:
        estimate = made.best.estimate
        for name, predicted, key in (
            ("step", estimate.seconds, "step_seconds"),
            ("memory", estimate.memory.total, "peak_bytes"),
        ):
            if key in kept:
                screen.print(f"measured {name}: the prediction is {100 * (predicted / kept[key] - 1):+.1f} % off; kept")
    if html is not None:
        screen.print(f"page: {html}", markup=False, soft_wrap=True)


def _calibrate(context: typer.Context, on: str, json: bool) -> None:
    from capibara.plan.measured import calibrate
    from capibara.plan.place import place

    typed = [name for name in context.params if _typed(context, name)]
    others = [name for name in typed if name not in ("calibrate", "json", "on")]
    if others:
        raise rule_error(
            "--calibrate reads the runs that were kept, and takes --on and --json beside it",
            f"{', '.join(others)} with it",
            "leave them out; keep a run with --measured FILE",
        )
    answers = calibrate(place(on).chip.name if "on" in typed else None)
    if json:
        output.show_json([_calibrated_as_dict(one) for one in answers])
        return
    screen = output.console()
    for one in answers:
        made = output.table(
            "run", "layout", "step predicted", "measured", "off", "memory predicted", "measured ", "off ",
            title=f"Runs on {one.chip}",
            right=("step predicted", "measured", "off", "memory predicted", "measured ", "off "),
        )  # fmt: skip
        for run in one.runs:
            output.add_row(
                made,
                f"{run.date} {run.name} on {run.on}",
                run.layout,
                output.figure(run.predicted_seconds, "s"),
                output.figure(run.step_seconds, "s"),
                output.percent(run.time_error),
                output.size(run.predicted_bytes),
                output.size(run.peak_bytes),
                output.percent(run.memory_error),
            )
        screen.print(made)
        if one.fit is not None:
            _fit(screen, one.fit, one.chip)
        if one.memory_before is not None:
            screen.print(
                f"memory is off by {output.percent(one.memory_before)} before, {output.percent(one.memory_after)} after"
            )


def _fit(screen: Any, fit: Fit, chip: str) -> None:
    from capibara.plan import words

    asked = fit.correction
    factors = ", ".join(f"{unit} x{factor:.3g}" for unit, factor in asked.factors.items())
    others = "" if fit.error_held_out is None else f", {output.percent(fit.error_held_out)} each by the others alone"
    screen.print(
        f"step time is off by {output.percent(round(fit.error_before, 6))} before and "
        f"{output.percent(round(fit.error_after, 6))} after{others}",
        markup=False,
    )
    screen.print(
        f"a step like the median run: {factors}, and {words.seconds(asked.step_seconds)} beside its work; later plans "
        f"for {chip} are corrected by the runs that are like them, the less the further away those are",
        markup=False,
    )
    for note in fit.notes:
        screen.print(f"note: {note}", markup=False)


def _typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _calibrated_as_dict(one: Calibrated) -> dict[str, Any]:
    import dataclasses

    return {
        "chip": one.chip,
        "runs": [dataclasses.asdict(run) for run in one.runs],
        "error_before": None if one.fit is None else one.fit.error_before,
        "error_after": None if one.fit is None else one.fit.error_after,
        "error_held_out": None if one.fit is None else one.fit.error_held_out,
        "correction": None if one.fit is None else dataclasses.asdict(one.fit.correction),
        "memory_error_before": one.memory_before,
        "memory_error_after": one.memory_after,
        "saved": None if one.saved is None else str(one.saved),
    }
