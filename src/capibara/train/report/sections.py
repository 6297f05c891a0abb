"""What the report says, in words: the same lines on the terminal and in the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from capibara.plan import words
from capibara.train.report.elsewhere import Elsewhere
from capibara.train.report.facts import Life
from capibara.train.report.summary import Summary

__all__ = ["Section", "headline", "sections"]

_PRECISIONS = {
    "float32": "float32 throughout",
    "mixed": "products in bfloat16 on float32 weights",
    "bfloat16": "weights, moments and products in bfloat16, rounded by chance",
    "fp8": "products in fp8 and bfloat16 on float32 weights",
}
_AXES = {
    "data": "rows of the batch",
    "model": "heads and feed-forward columns",
    "pipeline": "layers, one stage after another",
    "expert": "experts",
    "sequence": "parts of each sequence",
}
_CUTS = {
    "replicated": "every device has all weights and the optimizer's state",
    "optimizer sharded": "weights whole, the optimizer's state in parts along data",
    "fully sharded": "weights and the optimizer's state in parts along data",
}


@dataclass(frozen=True)
class Section:
    """A title and lines of (what, figure in words)."""

    title: str
    lines: Sequence[tuple[str, str]]


def headline(summary: Summary) -> str:
    preset = summary.preset
    steps = f"step {summary.step:,} of {preset.train.steps:,}" + ("" if summary.finished else ", not finished")
    return f"{preset.name or 'model'}: {preset.model.parameters:,} parameters, {steps}"


def sections(summary: Summary, elsewhere: Elsewhere | None) -> list[Section]:
    """All of them but the loss curve and the text."""
    last = summary.lives[-1] if summary.lives else None
    made = [
        Section("What ran where", _where(summary, last)),
        Section("Loss", _loss(summary)),
        Section("Speed", _speed(summary, last)),
        Section("Memory of a device", _memory(last)),
        Section("Time", _time(summary)),
        Section("Predicted and measured", _predicted(summary, last)),
    ]
    if elsewhere is not None:
        made.append(Section(f"On {elsewhere.where}, predicted", _elsewhere(summary, elsewhere)))
    if last is not None and "sample_refusal" in last.ended:
        made.append(Section("Text", [("", f"none could be written: {last.ended['sample_refusal']}")]))
    return [section for section in made if section.lines]


def _where(summary: Summary, last: Life | None) -> list[tuple[str, str]]:
    train = summary.preset.train
    lines = [
        (
            "batch",
            f"{train.batch_size} sequences of {train.sequence_length:,} tokens; {summary.tokens:,} tokens in all",
        ),
        ("precision", _PRECISIONS.get(train.precision, train.precision)),
    ]
    if last is None:
        return [*lines, ("devices", "not known: the folder has no run.json")]
    devices = f"{last.devices} x {last.device_kind}"
    if last.platform == "cpu" and last.devices > last.processes:
        devices = f"{last.devices} devices simulated by a CPU"
    if last.processes > 1:
        devices += f", {last.processes} processes"
    lines = [("devices", devices), *lines]
    mesh = ", ".join(f"{name} {size} ({_AXES.get(name, name)})" for name, size in last.mesh.items() if size > 1)
    lines.append(("mesh", mesh or "one device"))
    lines.append(("layout", _layout_words(last)))
    lines += [("kernels" if not number else "", line) for number, line in enumerate(_kernel_lines(last.kernels))]
    lines.append(("compiled", "in " + words.seconds(last.compile_seconds)))
    shown = {name: version for name, version in last.versions.items() if name != "machine"}
    lines.append(("versions", ", ".join(f"{name} {version}" for name, version in shown.items())))
    return lines


def _layout_words(life: Life) -> str:
    cut = next((text for name, text in _CUTS.items() if name in life.layout), "")
    choices = ", ".join(f"{name} {value}" for name, value in life.choices.items())
    return "; ".join(part for part in (cut or life.layout, choices) if part)


def _kernel_lines(kernels: Sequence[Mapping[str, Any]]) -> list[str]:
    """What took which ops, and why: those that were decided alike on one line."""
    alike: dict[tuple[str, str], list[str]] = {}
    for entry in kernels:
        alike.setdefault((entry["implementation"], entry["why"]), []).append(entry["op"])
    return [
        f"{implementation}: {', '.join(dict.fromkeys(ops))} ({why})" for (implementation, why), ops in alike.items()
    ]


def _loss(summary: Summary) -> list[tuple[str, str]]:
    finite = [(step, loss) for step, loss in summary.losses if loss is not None]
    lines = []
    if finite:
        lines.append(("training", f"{finite[0][1]:.3f} at step {finite[0][0]}, {finite[-1][1]:.3f} at {finite[-1][0]}"))
    if summary.held_out:
        step, loss = summary.held_out[-1]
        bits = f"{loss:.3f} nats a token ({loss / math.log(2):.2f} bits) at step {step}"
        lines.append(("held out", bits))
    if summary.resumes:
        lines.append(("resumed", "after step " + ", ".join(map(str, summary.resumes))))
    if summary.skipped:
        lines.append(("skipped", f"{summary.skipped} steps whose loss or gradient was not finite"))
    return lines


def _speed(summary: Summary, last: Life | None) -> list[tuple[str, str]]:
    speed = summary.speed
    if speed is None:
        return [("step", "no step was timed")]
    low, middle, high = (words.seconds(value) for value in speed.seconds)
    lines = [
        ("tokens", f"{words.count(speed.tokens_per_second)} a second"),
        ("step", f"{middle} (median of {speed.steps}; a tenth below {low}, a tenth above {high})"),
    ]
    if speed.mfu is not None and speed.mfu > 1:
        # A CPU's peak is measured when it is first asked for, beside whatever else runs then.
        lines.append(("MFU", "not known: the peak of this CPU was measured while it was busy"))
    elif speed.mfu is not None:
        of = "the peak measured of this CPU" if last is not None and last.platform == "cpu" else "the chips' peak"
        lines.append(("MFU", f"{words.percent(speed.mfu)} of {of}"))
    return lines


def _memory(last: Life | None) -> list[tuple[str, str]]:
    if last is None:
        return []
    lines = []
    peak = last.ended.get("peak_bytes")
    if peak is not None:
        lines.append(("peak", f"{words.size(peak)} in use, measured"))
    elif last.platform == "cpu":
        host = last.ended.get("host_peak_bytes")
        known = "" if host is None else f"; the whole process had {words.size(host)} at most"
        lines.append(("peak", f"a CPU's devices do not count it{known}"))
    if last.memory is not None:
        kept, beside = last.memory["arguments"], last.memory["temporaries"]
        lines.append(
            ("the step", f"{words.size(kept)} of arguments and {words.size(beside)} beside them, by the compiler")
        )
    return lines


def _time(summary: Summary) -> list[tuple[str, str]]:
    goodput = summary.goodput
    if goodput is None:
        return []
    shares = sorted(goodput.fractions().items(), key=lambda item: -item[1])
    spent = ", ".join(f"{name.replace('_', ' ')} {share:.0%}" for name, share in shares if share >= 0.005)
    again = f", {goodput.lost_steps} done again" if goodput.lost_steps else ""
    return [
        ("goodput", f"{words.percent(goodput.goodput)} of {words.seconds(goodput.total)} went into steps that count"),
        ("restarts", f"{goodput.restarts}{again}"),
        ("spent on", spent),
    ]


def _predicted(summary: Summary, last: Life | None) -> list[tuple[str, str]]:
    if last is None:
        return []
    predicted = last.predicted
    if predicted is None:
        return [("", "nothing was predicted: one device of a CPU leaves nothing to plan")]
    seconds = f"{words.seconds(predicted['seconds'])} a step, {words.gib(predicted['bytes'])} a chip"
    if last.simulated:
        return [
            (
                "",
                f"the layout was planned for {last.where} ({seconds}); a CPU stands for them here, so the two are not "
                "compared",
            )
        ]
    lines = []
    if summary.speed is not None:
        measured = summary.speed.seconds[1]
        lines.append(("step", _beside(predicted["seconds"], measured, words.seconds)))
    peak = last.ended.get("peak_bytes")
    if peak is not None:
        lines.append(("memory", _beside(predicted["bytes"], peak, words.gib)))
    return lines or [("predicted", seconds)]


def _beside(predicted: float, measured: float, show: Callable[[float], str]) -> str:
    return f"{show(predicted)} predicted, {show(measured)} measured: {predicted / measured - 1:+.0%}"


def _elsewhere(summary: Summary, elsewhere: Elsewhere) -> list[tuple[str, str]]:
    if elsewhere.refusal:
        return [("", " ".join(elsewhere.refusal.split()))]
    assert elsewhere.step_seconds is not None
    assert elsewhere.tokens_per_second is not None
    lines = [
        (
            "step",
            f"{words.seconds(elsewhere.step_seconds)} ({words.seconds(elsewhere.low)} to "
            f"{words.seconds(elsewhere.high)}) on {elsewhere.chips} chips: {elsewhere.layout}",
        ),
        (
            "tokens",
            f"{words.count(elsewhere.tokens_per_second)} a second; this run's {summary.tokens:,} in "
            f"{words.seconds(summary.tokens / elsewhere.tokens_per_second)}",
        ),
    ]
    if elsewhere.dollars:
        lines.append(("cost", ", ".join(f"{_dollars(usd)} {kind}" for kind, usd in elsewhere.dollars)))
    return lines


def _dollars(usd: float) -> str:
    return words.dollars(usd) if usd >= 0.01 else "less than 0.01 USD"
