"""A plan's figures, its text, its JSON and its page, from estimates made by hand."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from capibara.plan.compiled import Compiled
from capibara.plan.layout_text import layout_as_dict, layout_from_dict
from capibara.plan.money import bills
from capibara.plan.place import place
from capibara.plan.report import as_text, show
from capibara.plan.result import Change, Plan
from capibara.prices.table import price_table

Make = Callable[..., Plan]
GiB = 2**30


@pytest.mark.quick
def test_money_by_hand(make_plan: Make) -> None:
    plan = make_plan()
    on_demand, spot = plan.bills
    assert on_demand.usd_per_hour == pytest.approx(32 * 3.22)
    # 2 s a step of 65,536 tokens.
    assert on_demand.usd_per_billion_tokens == pytest.approx(32 * 3.22 / 3600 * 2.0 / 65536 * 1e9)
    assert on_demand.low == pytest.approx(0.9 * on_demand.usd_per_billion_tokens)
    assert on_demand.high == pytest.approx(1.3 * on_demand.usd_per_billion_tokens)
    assert spot.spot is not None
    expected = 32 * 0.9215 / 3600 * 2.0 / 65536 * 1e9 / spot.spot.efficiency
    assert spot.usd_per_billion_tokens == pytest.approx(expected)
    assert spot.spot.mean_seconds_between == pytest.approx(3600 / 0.005 / 8), "v4-64 has eight hosts"
    assert plan.tokens_per_second == pytest.approx(32768)


def test_the_text_answers_the_questions(make_plan: Make) -> None:
    text = str(make_plan())
    for words in (
        "tiny & small on v4-64 (32 chips, 2x4x4)",
        "analytic",
        "FITS: 20.00 GiB a chip of 30.75 GiB",
        "Step: 2 s (1.8 s to 2.6 s), bound by matrix, 32,768 tokens/s",
        "MFU 50.0 %",
        "103 USD an hour",
        "preemptions a host-hour",
        "data 4 x model 8, fully sharded",
        "buffer 0 [8, 2048]",
        "all_reduce",
        "note: roles were guessed",
    ):
        assert words in text, f"{words!r} is not in\n{text}"
    assert "buffer 5" not in text, "five largest"
    assert text.index("all_reduce") < text.index("all_gather"), "by bytes"


def test_a_job_that_does_not_fit_says_what_would(make_plan: Make) -> None:
    text = as_text(make_plan(fits=False))
    assert "DOES NOT FIT: 44.00 GiB a chip of 30.75 GiB" in text
    assert "Step, had it the memory:" in text
    assert (
        "would fit: half the batch on v4-64: predicted 25.00 GiB a chip, 1.1 s a step, 500 USD a billion tokens" in text
    )


def test_a_narrow_screen_leaves_room_for_the_layout(make_plan: Make) -> None:
    plan = make_plan()
    assert plan.best is not None
    stream = io.StringIO()
    show(plan, Console(file=stream, width=80, force_terminal=True, color_system=None))
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert any("data 4 x model 8, fully" in line and "20.00 GiB" in line for line in lines)
    assert "range" in str(plan)


@pytest.mark.parametrize(("width", "absent"), [(150, ()), (90, ("link", "times")), (60, ("link", "times", "why"))])
def test_a_narrow_screen_has_whole_words_in_its_exchanges(make_plan: Make, width: int, absent: tuple[str, ...]) -> None:
    stream = io.StringIO()
    show(make_plan(), Console(file=stream, width=width, force_terminal=True, color_system=None))
    table = stream.getvalue().partition("Exchanges of a step")[2]
    heads = table.splitlines()[2].split()
    assert heads == [name for name in ("kind", "axes", "link", "times", "sent", "time", "why") if name not in absent]
    assert "all_gather " in table
    assert "all_reduce " in table


def test_without_any_layout(make_plan: Make) -> None:
    plan = make_plan(fits=False, candidates=(), bills=(), changes=())
    assert "no layout could be made. 3 does not divide" in str(plan)
    near = make_plan(fits=False, candidates=(), bills=(), changes=(), closest="data 4 needs 64.2 of 30.8 GiB a chip")
    assert "DOES NOT FIT: at best data 4 needs 64.2 of 30.8 GiB" in str(near)
    assert "No change that was tried" in str(near)
    assert near.as_dict()["closest"].startswith("data 4")
    assert plan.as_dict()["closest"] is None
    assert plan.as_dict()["step_seconds"] is None


def test_without_tokens_there_are_dollars_an_hour_alone(make_plan: Make) -> None:
    plan = make_plan(tokens=None)
    assert plan.bills[0].usd_per_billion_tokens is None
    assert "billion" not in str(plan)


def test_json_has_it_all(make_plan: Make) -> None:
    document = json.loads(json.dumps(make_plan().as_dict(), allow_nan=False))
    assert document["fits"] is True
    assert (document["on"], document["chips"], document["hosts"]) == ("v4-64", 32, 8)
    assert document["bytes_per_chip"] == 20 * GiB
    assert len(document["largest_buffers"]) == 5
    assert document["step_seconds_range"] == pytest.approx([1.8, 2.6])
    assert [one["layout"]["mesh"] for one in document["layouts"]] == [{"data": 4, "model": 8}] * 2
    assert document["bills"][1]["spot"]["assumptions"]["preemptions_per_host_hour"] == 0.005


def test_a_layout_survives_json(make_plan: Make) -> None:
    best = make_plan().best
    assert best is not None
    again = layout_from_dict(json.loads(json.dumps(layout_as_dict(best.layout))))
    assert (again.mesh, again.specs, again.choices, again.host) == (
        best.layout.mesh,
        best.layout.specs,
        best.layout.choices,
        best.layout.host,
    )
    assert dict(again.rules) == dict(best.layout.rules)


def test_a_compilers_word_counts(make_plan: Make) -> None:
    plan = make_plan()
    assert plan.best is not None
    said = Compiled("tpu", "by the TPU compiler", 10.0 * GiB, 2.0 * GiB, 12.0 * GiB, 2.0 * GiB, seconds=30.0)
    best = replace(plan.best, compiled=said)
    assert best.bytes == 22 * GiB
    assert best.fits
    plan = replace(plan, candidates=(best,))
    assert plan.level == "tpu"
    assert "predicted 20.00 GiB (-9.1 %)" in str(plan)
    by_cpu = replace(plan.best, compiled=replace(said, level="xla"))
    assert by_cpu.bytes == 20 * GiB, "the CPU's temporaries are not a TPU's"
    text = str(replace(plan, candidates=(by_cpu,)))
    assert "arguments 10.00 GiB a chip, predicted 12.00 GiB (+20.0 %), with temporaries 22.00 GiB" in text
    refused = replace(
        plan.best, compiled=Compiled("tpu", "", temporaries=40.0 * GiB, error="too big", error_kind="hbm_oom")
    )
    assert not refused.fits
    assert refused.level == "tpu"
    assert refused.bytes == 40 * GiB, "what the compiler said that it needs"


def test_what_is_printed_as_the_compilers_is_the_compilers(make_plan: Make) -> None:
    plan = make_plan(asked_level="tpu")
    assert plan.best is not None
    said = Compiled("tpu", "by libtpu", 10.0 * GiB, 3.0 * GiB, 13.0 * GiB, 2.0 * GiB, peak=21.5 * GiB, seconds=30.0)
    taken = replace(plan, candidates=(replace(plan.best, compiled=said),))
    assert (
        "FITS: 21.50 GiB a chip of 30.75 GiB usable, the peak by the TPU compiler (its arguments 10.00 GiB, "
        "temporaries 13.00 GiB, outputs beside them 1.00 GiB), predicted 20.00 GiB (-7.0 %)" in str(taken)
    )
    assert "Largest buffers at the peak, predicted" in str(taken)
    document = taken.as_dict()
    assert (document["bytes_per_chip"], document["bytes_by"]) == (21.5 * GiB, "tpu compiler")
    assert document["predicted_bytes_per_chip"] == 20 * GiB
    assert document["layouts"][0]["compiled"]["temporaries"] == 13 * GiB
    assert plan.as_dict()["bytes_by"] == "predicted"
    assert "FITS: 20.00 GiB a chip of 30.75 GiB usable, predicted (arguments 12.00 GiB, beside them 8.00 GiB" in str(
        plan
    )


def test_a_layout_that_the_compiler_refused_is_said_to_be(make_plan: Make, tmp_path: Path) -> None:
    plan = make_plan(asked_level="tpu")
    assert plan.best is not None
    near = replace(plan.best.estimate, memory=replace(plan.best.estimate.memory, margin=0.6))
    oom = Compiled("tpu", "by libtpu", temporaries=49.8 * GiB, error="HbmOom", error_kind="hbm_oom")
    out = replace(plan.best, estimate=near, compiled=oom)
    none = replace(plan, fits=False, candidates=(out,), refused_by_compiler=(out,), unasked=2, changes=())
    lines = str(none).splitlines()
    assert "refused by the TPU compiler" in lines[0]
    assert lines[1] == (
        "DOES NOT FIT: the TPU compiler refused the one layout that it was asked about; the least that it wants is "
        "49.80 GiB a chip of 30.75 GiB usable, for data 4 x model 8, fully sharded (predicted 20.00 GiB); 2 more that "
        "may fit by the model were not tried: --mesh names one"
    )
    assert lines[2].startswith(
        "Refused by the TPU compiler: data 4 x model 8, fully sharded: 49.80 GiB a chip of 30.75"
    )
    assert "--level tpu" not in str(none), "it was asked"
    assert "tpu: refused" in str(none)
    assert "Refused by the TPU compiler" in none.save_html(tmp_path / "plan.html").read_text(encoding="utf-8")
    document = none.as_dict()
    assert document["refused_by_compiler"][0]["bytes"] == 49.8 * GiB
    assert document["refused_by_compiler"][0]["refused_by_compiler"] is True
    assert (document["compiler_not_asked_about"], document["asked_level"]) == (2, "tpu")

    # Another was taken in its place: the refusal is told all the same.
    taken = replace(plan.candidates[1], compiled=Compiled("tpu", "by libtpu", 10.0 * GiB, 0.0, 9.0 * GiB, 0.0))
    text = str(replace(plan, candidates=(taken,), refused_by_compiler=(out,)))
    assert "FITS: 19.00 GiB" in text
    assert "Refused by the TPU compiler: data 4 x model 8, fully sharded: 49.80 GiB a chip" in text


def test_a_plan_that_ran_out_of_time_says_so(make_plan: Make, tmp_path: Path) -> None:
    plan = make_plan(complete=False, evaluations=23, time_limit=60.0)
    lines = str(plan).splitlines()
    assert lines[1] == (
        "STOPPED at the time limit of 60 s after 23 layouts: the best so far follows; "
        "--time-limit SECONDS gives it more"
    )
    assert lines[2].startswith("FITS: 20.00 GiB")
    assert plan.as_dict()["search"] == {"complete": False, "layouts": 23, "time_limit_seconds": 60.0}
    page = plan.save_html(tmp_path / "plan.html").read_text(encoding="utf-8")
    assert "STOPPED at the time limit" in page
    assert 'class="verdict fits">FITS: 20.00' in page
    none = str(make_plan(fits=False, complete=False, evaluations=1, time_limit=5.0, changes=()))
    assert "after 1 layout: none of them fits so far, and not every change was tried" in none
    assert "No change that was tried in the time there was makes it fit" in none


def test_a_refusal_for_another_reason_has_the_compilers_words(make_plan: Make) -> None:
    plan = make_plan(asked_level="xla")
    assert plan.best is not None
    out = replace(plan.best, compiled=Compiled("xla", "by XLA", error="ValueError: 3\nmore", error_kind="lowering"))
    text = str(replace(plan, fits=False, candidates=(out,), refused_by_compiler=(out,), changes=()))
    assert "DOES NOT FIT: XLA for the CPU refused the one layout that it was asked about" in text
    assert "Refused by XLA for the CPU: data 4 x model 8, fully sharded: ValueError: 3\n" in text


def test_a_change_says_what_it_would_need_by_what_the_compiler_showed(make_plan: Make) -> None:
    change = Change("half the batch", "v4-64", 1.1, 10 * GiB, None, 18 * GiB)
    text = str(make_plan(fits=False, changes=(change,)))
    assert "predicted 10.00 GiB a chip (18.00 GiB where the compiler needs 1.80 times as much, as it did above)" in text


def test_the_models_margin_is_part_of_the_verdict(make_plan: Make) -> None:
    plan = make_plan()
    assert plan.best is not None
    memory = replace(plan.best.estimate.memory, temporaries=18 * GiB, margin=0.08)
    near = replace(plan.best, estimate=replace(plan.best.estimate, memory=memory))
    assert not near.fits, "30 GiB may be 32.4, of 30.75"
    text = str(replace(plan, fits=False, candidates=(near,)))
    assert "may be 8.0 % low, 32.40 GiB, so it may or may not fit: --level tpu settles it" in text
    asked = str(replace(plan, fits=False, candidates=(near,), asked_level="tpu"))
    assert "so it may or may not fit: the TPU compiler was asked and gave no answer" in asked
    assert "may not fit: --level gpu settles it" in str(
        replace(plan, fits=False, candidates=(near,), where=place("h200"))
    )
    sure = replace(near, compiled=Compiled("tpu", "", 12.0 * GiB, 0.0, 18.5 * GiB, 0.0))
    assert sure.fits, "what the compiler says needs no margin"


def test_where_only_the_compiler_can_tell_the_verdict_says_so(make_plan: Make) -> None:
    plan = make_plan()
    assert plan.best is not None
    memory = replace(plan.best.estimate.memory, temporaries=14 * GiB, margin=0.08, unsure=4 * GiB)
    near = replace(plan.best, estimate=replace(plan.best.estimate, memory=memory))
    unsure = replace(plan, fits=False, candidates=(near,), bills=())
    assert (near.fits, near.may_fit, unsure.verdict) == (False, True, "may not fit"), "26 GiB may be 32.4, of 30.75"
    text = str(unsure)
    assert "MAY NOT FIT: 26.00 GiB a chip of 30.75 GiB usable" in text
    assert "8.0 % low and the compiler may keep 4.00 GiB more, as the notes say, 32.40 GiB" in text
    assert "may or may not fit: --level tpu settles it" in text
    document = unsure.as_dict()
    assert (document["fits"], document["verdict"]) == (False, "may not fit")
    assert document["bytes_range"] == document["layouts"][0]["bytes_range"] == [26 * GiB, pytest.approx(32.4 * GiB)]
    assert "may not fit" in repr(unsure)
    # A compiler that was asked has settled it, either way.
    said = Compiled("tpu", "", 12.0 * GiB, 0.0, 18.5 * GiB, 0.0)
    assert replace(near, compiled=said).bytes_range == (30.5 * GiB, 30.5 * GiB)
    refused = replace(near, compiled=Compiled("tpu", "", temporaries=40.0 * GiB, error="big", error_kind="hbm_oom"))
    assert replace(unsure, candidates=(refused,)).verdict == "does not fit"
    over = replace(near, estimate=replace(near.estimate, memory=replace(memory, temporaries=19 * GiB)))
    assert replace(unsure, candidates=(over,)).verdict == "does not fit"


class _Tags(HTMLParser):
    """Every tag that opens is closed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.mark.parametrize("fits", [True, False])
def test_the_page_stands_alone(make_plan: Make, tmp_path: Path, fits: bool) -> None:
    file = make_plan(fits=fits).save_html(tmp_path / "plan.html")
    page = file.read_text(encoding="utf-8")
    parser = _Tags()
    parser.feed(page)
    assert parser.open == []
    assert not re.search(r"(src|href)\s*=|url\(|@import|https?://", page), "nothing is fetched"
    assert page.count("<svg") == 2
    assert "prefers-color-scheme:dark" in page
    assert "train.py:40&gt;" in page, "names are escaped"
    text = " ".join(parser.text)
    assert ("FITS: 20.00 GiB" if fits else "DOES NOT FIT: 44.00 GiB") in text
    assert "usable 30.75 GiB" in text
    assert "275 Tflop/s in bfloat16" in text
    # The peak of the timeline is 20 GiB, at every ninth of 4,000 steps: thinning must not lose it.
    assert "20.00 GiB" in text
    assert len(page) < 200_000


def test_a_page_of_a_program_without_arithmetic(make_plan: Make, tmp_path: Path) -> None:
    plan = make_plan()
    assert plan.best is not None
    bare = replace(plan.best.estimate, parts=(), memory=replace(plan.best.estimate.memory, timeline=()), links=())
    plan = replace(plan, candidates=(replace(plan.best, estimate=bare),))
    page = plan.save_html(tmp_path / "plan.html").read_text(encoding="utf-8")
    assert "no timeline was made" in page
    assert "<p>none</p>" in page


def test_a_commitment_that_the_table_has_is_billed(make_plan: Make, tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text('[[price]]\nchip = "v4"\nregion = "us-central2"\ncommitted_3y = 1.5\n', encoding="utf-8")
    plan = make_plan()
    assert plan.best is not None
    made = bills(plan.best.estimate, plan.where, plan.tokens, 0.0, price_table(mine))
    assert [(one.price.kind, one.usd_per_hour) for one in made][-1] == ("committed_3y", 48.0)
