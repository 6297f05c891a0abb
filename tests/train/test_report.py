"""The report at the end of a run, from a folder's files alone."""

from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import jax
import pytest

from capibara import toml_tables
from capibara.cost.result import Estimate, Memory
from capibara.models.tokenizer import load_tokenizer
from capibara.plan.measured import measurements
from capibara.plan.place import place
from capibara.train.config import load_run
from capibara.train.report import summarise, write_report
from capibara.train.report.elsewhere import Elsewhere, planned_elsewhere
from capibara.train.report.facts import Life, end_life, read_lives
from capibara.train.report.sample import sample_entry
from capibara.train.report.sections import sections
from capibara.train.teaching import teach_plan

LIFE = Life(
    date="2026-11-16T10:00:00+00:00",
    step=0,
    devices=8,
    device_kind="cpu",
    platform="cpu",
    processes=1,
    mesh={"data": 8},
    layout="data 8, optimizer sharded, remat none",
    choices={"remat": "none", "accumulate": 1},
    where="8 x h200",
    simulated=True,
    parameters=1000,
    compile_seconds=9.5,
    memory={"arguments": 2**20, "outputs": 2**20, "temporaries": 3 * 2**20, "shared": 2**20},
    predicted={"seconds": 0.001, "low": 0.0009, "high": 0.002, "bytes": 2**30, "bound": "memory"},
    kernels=[
        {"op": "norm", "implementation": "xla", "why": "it ranks first", "calls": 3},
        {"op": "attention", "implementation": "xla", "why": "it ranks first", "calls": 1},
        {"op": "gemm", "implementation": "hopper", "why": "it was tuned", "calls": 1},
    ],
    versions={"capibara": "0.1", "jax": "0.10.2", "machine": "x86_64"},
)


def _rows(first: int, last: int, seconds: float = 0.5) -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            "loss": 1.0 + 4.0 / step,
            "seconds": seconds + 0.01 * (step % 5),
            "tokens_per_second": 2048 / seconds,
            "mfu": 0.25,
            "skipped": 0,
        }
        for step in range(first, last + 1)
    ]


def _write(folder: Path, lives: list[Life], rows: list[dict[str, Any]], torn: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    tables = load_run("dev", ["train.steps=40", "train.batch_size=16"], environment={}).as_tables()
    (folder / "config.toml").write_text(toml_tables.to_toml(tables), encoding="utf-8")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + torn, encoding="utf-8")
    (folder / "run.json").write_text(
        json.dumps({"processes": [dataclasses.asdict(life) for life in lives]}), encoding="utf-8"
    )
    goodput = [
        {"start": 100.0, "pid": 1},
        {"until": 130.0, "seconds": {"compile": 10.0, "step": 20.0}, "steps": [[1, 23, 20.0]]},
        {"start": 132.0, "pid": 2},
        {"until": 160.0, "seconds": {"step": 20.0}, "steps": [[21, 40, 20.0]]},
    ]
    (folder / "goodput.jsonl").write_text("".join(json.dumps(row) + "\n" for row in goodput), encoding="utf-8")
    return folder


@pytest.fixture
def resumed(tmp_path: Path) -> Path:
    """A run that was killed and went on after step 20."""
    rows = [*_rows(1, 20, seconds=9.0), {"step": 20, "eval_loss": 1.9}, *_rows(21, 40), {"step": 40, "eval_loss": 1.5}]
    second = dataclasses.replace(LIFE, step=20, ended={"step": 40, "sample": ["def f(", "x):\x1b[2J <b>\n    return"]})
    return _write(tmp_path / "run", [LIFE, second], rows)


@pytest.mark.quick
def test_the_figures_are_of_the_whole_run_and_the_speed_of_its_last_process(resumed: Path) -> None:
    summary = summarise(resumed)
    assert (summary.step, summary.finished, summary.resumes, summary.tokens) == (40, True, [20], 40 * 16 * 128)
    assert summary.held_out == [(20, 1.9), (40, 1.5)]
    assert summary.speed is not None
    assert summary.speed.steps == 19  # of 21 to 40 the first is left out, and nothing of the slow ones before counts
    low, middle, high = summary.speed.seconds
    assert 0.5 <= low < middle < high <= 0.54
    assert middle == pytest.approx(0.52)
    assert summary.goodput is not None
    assert (summary.goodput.restarts, summary.goodput.lost_steps) == (1, 3)


@pytest.mark.quick
def test_the_terminal_page_is_eighty_columns_of_plain_text(resumed: Path) -> None:
    report = write_report(resumed, elsewhere=None)
    text = report.text
    assert max(map(len, text.splitlines())) <= 80 + len(str(report.html))
    assert max(len(line) for line in text.splitlines() if str(report.html) not in line) <= 80
    assert "\x1b" not in text  # neither rich's colours nor what the model wrote
    for said in (
        "8 devices simulated by a CPU",
        "data 8 (rows of the batch)",
        "the optimizer's state in parts along data",
        "xla: norm, attention (it ranks first)",
        "hopper: gemm (it was tuned)",
        "1.500 nats a token (2.16 bits) at step 40",
        "resumed     after step 20",
        "1, 3 done again",
        "not compared",
        "1 MiB of arguments and 3 MiB beside them",
        "┊",
        "report.html",
    ):
        assert said in text, said
    assert "\x1b[" in report.page(color=True)
    curve = report.page(unicode=False).split("\nLoss\n")[1].split("training")[0]
    assert curve.isascii()
    assert "|" in curve
    assert "o" in curve


@pytest.mark.quick
def test_the_page_needs_nothing_from_outside(resumed: Path) -> None:
    page = write_report(resumed, elsewhere=None).html.read_text(encoding="utf-8")
    assert "http" not in page
    assert "<script" not in page
    assert "prefers-color-scheme:dark" in page
    assert 'name="viewport"' in page
    assert "resumed after 20" in page
    assert page.count("<polyline") == 2
    assert "&lt;b&gt;" in page
    assert "<b>\n" not in page
    assert not re.search(r"nan|None", page)
    balance = _Balance()
    balance.feed(page)
    assert not balance.open


class _Balance(HTMLParser):
    """Every tag is closed, in order."""

    void = frozenset({"meta", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.quick
def test_a_model_that_cannot_write_says_so_and_the_run_stands(tmp_path: Path) -> None:
    class Silent:
        params: ClassVar[dict[str, Any]] = {}
        config = load_run("dev", environment={}).preset.model
        tokenizer = load_tokenizer("bytes")

        def generate(self, *args: Any, **options: Any) -> Any:
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    run = load_run("dev", environment={})
    with pytest.raises(IndexError):  # a model without a weight is no model: that is not hidden
        sample_entry(run, Silent(), None, False)  # type: ignore[arg-type]
    Silent.params = {"w": jax.numpy.zeros(2)}
    ended = sample_entry(run, Silent(), None, False)  # type: ignore[arg-type]
    assert ended == {"sample_refusal": "RuntimeError: RESOURCE_EXHAUSTED: out of memory"}
    folder = _write(tmp_path / "run", [dataclasses.replace(LIFE, ended=ended)], _rows(1, 40))
    assert "RESOURCE_EXHAUSTED" in write_report(folder, elsewhere=None).text


@pytest.mark.quick
def test_a_run_that_crashed_has_a_report(tmp_path: Path) -> None:
    folder = _write(tmp_path / "run", [LIFE], _rows(1, 17), torn='{"step": 18, "lo')
    text = write_report(folder, elsewhere=None).text
    assert "step 17 of 40, not finished" in text
    (folder / "run.json").unlink()
    (folder / "goodput.jsonl").unlink()
    assert "the folder has no run.json" in write_report(folder, elsewhere=None).text
    (folder / "metrics.jsonl").unlink()
    assert "no step was timed" in write_report(folder, elsewhere=None).text
    (folder / "config.toml").unlink()
    with pytest.raises(ValueError, match=r"has its config\.toml"):
        write_report(folder)


@pytest.mark.quick
def test_what_was_predicted_stands_beside_what_was_measured_on_real_chips_alone(tmp_path: Path) -> None:
    real = dataclasses.replace(
        LIFE,
        device_kind="NVIDIA H200",
        platform="gpu",
        simulated=False,
        predicted={**(LIFE.predicted or {}), "seconds": 0.47, "bytes": 2**30},
        ended={"peak_bytes": 2**31},
    )
    parts = {part.title: dict(part.lines) for part in sections(summarise(_write(tmp_path, [real], _rows(1, 40))), None)}
    assert parts["Predicted and measured"] == {
        "step": "470 ms predicted, 520 ms measured: -10%",
        "memory": "1.00 GiB predicted, 2.00 GiB measured: -50%",
    }
    assert parts["Memory of a device"]["peak"] == "2 GiB in use, measured"
    alone = dataclasses.replace(LIFE, predicted=None)
    parts = {part.title: dict(part.lines) for part in sections(summarise(_write(tmp_path, [alone], _rows(1, 3))), None)}
    assert "nothing was predicted" in parts["Predicted and measured"][""]


@pytest.mark.quick
def test_a_share_of_a_peak_is_no_more_than_all_of_it(tmp_path: Path) -> None:
    def speed(mfu: float) -> str:
        rows = [{**row, "mfu": mfu} for row in _rows(1, 20)]
        folder = _write(tmp_path, [LIFE], rows)
        assert ("<span>MFU" in write_report(folder, elsewhere=None).html.read_text(encoding="utf-8")) == (mfu <= 1)
        return {part.title: dict(part.lines) for part in sections(summarise(folder), None)}["Speed"]["MFU"]

    assert speed(0.5) == "50.0 % of the peak measured of this CPU"
    assert speed(1.4).startswith("not known")


@pytest.mark.quick
def test_the_end_of_a_process_is_added_to_its_entry(tmp_path: Path) -> None:
    _write(tmp_path, [LIFE, LIFE], [])
    end_life(tmp_path, step=40, peak_bytes=None)
    first, last = read_lives(tmp_path)
    assert first == LIFE
    assert last.ended == {"step": 40}


def test_another_slice_is_planned_and_priced() -> None:
    small = ["model.hidden=64", "model.layers=2", "model.blocks.mlp.ffn=128", "train.batch_size=16"]
    preset = load_run("dev", small, environment={}).preset
    planned = planned_elsewhere(preset, tokens=10**9)
    assert (planned.where, planned.chips, planned.refusal) == ("v4-32", 16, "")
    assert planned.tokens_per_second is not None
    assert planned.step_seconds is not None
    kinds = dict(planned.dollars)
    assert set(kinds) == {"on demand", "spot"}
    hours = 1e9 / planned.tokens_per_second / 3600
    assert kinds["on demand"] == pytest.approx(hours * 16 * 3.22, rel=1e-6)


@pytest.mark.quick
def test_figures_of_another_slice_are_said_and_so_is_why_there_are_none(resumed: Path) -> None:
    priced = Elsewhere("v4-32", 16, "", "data 16", 4e-4, 3e-4, 6e-4, 5e6, (("on demand", 12.5), ("spot", 1e-5)))
    lines = dict(sections(summarise(resumed), priced)[-1].lines)
    assert sections(summarise(resumed), priced)[-1].title == "On v4-32, predicted"
    assert lines == {
        "step": "400 µs (300 µs to 600 µs) on 16 chips: data 16",
        "tokens": "5,000,000 a second; this run's 81,920 in 16.4 ms",
        "cost": "12.5 USD on demand, less than 0.01 USD spot",
    }
    none = Elsewhere("v4-32", 16, "it does not fit")
    assert sections(summarise(resumed), none)[-1].lines == [("", "it does not fit")]


@pytest.mark.slow
def test_a_model_that_does_not_fit_there_says_what_would() -> None:
    large = ["model.hidden=16384", "model.layers=64", "model.blocks.mlp.ffn=65536"]
    assert "it would with v4-" in planned_elsewhere(load_run("dev", large, environment={}).preset, 10**6).refusal


def _estimate() -> Estimate:
    memory = Memory(2e9, 1e9, 1e11, "step", (), ())
    return Estimate(memory, 0.4, 0.3, 0.5, "matrix", 0.4, 0.0, 0.0, 1e12, 1e12, 0.4, (), (), ())


def _loop(**chosen: Any) -> Any:
    values = {
        "simulated": False,
        "estimate": _estimate(),
        "where": place("h200"),
        "layout": SimpleNamespace(name="one device"),
        **chosen,
    }
    told: list[str] = []
    options = SimpleNamespace(offload_activations=False)
    compiled = SimpleNamespace(chosen=SimpleNamespace(**values))
    return SimpleNamespace(compiled=compiled, options=options, tell=told.append, told=told)


@pytest.mark.quick
def test_a_run_on_a_known_chip_teaches_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAPIBARA_CACHE_DIR", str(tmp_path))
    loop = _loop()
    kept = teach_plan(loop, "dev", _rows(1, 40), peak_bytes=4 * 10**9)
    assert kept is not None
    assert measurements("h200") == (kept,)
    assert (kept.predicted_seconds, kept.predicted_bytes) == (0.4, 3e9)
    assert kept.step_seconds == pytest.approx(0.52)
    assert kept.peak_bytes == 4e9
    assert "-23% off" in loop.told[0]
    # What was not planned, not run, or too short to say anything teaches nothing.
    assert teach_plan(_loop(simulated=True), "dev", _rows(1, 40), None) is None
    assert teach_plan(_loop(estimate=None), "dev", _rows(1, 40), None) is None
    assert teach_plan(_loop(), "dev", _rows(1, 5), None) is None
    sent = _loop()
    sent.options.offload_activations = True
    assert teach_plan(sent, "dev", _rows(1, 40), None) is None
    # A prediction that earlier runs corrected would be corrected twice.
    corrected = dataclasses.replace(_estimate(), correction=object())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="uncorrected"):
        teach_plan(_loop(estimate=corrected), "dev", _rows(1, 40), None)
    assert len(measurements()) == 1
