"""On what evidence dispatch acts: what was measured, and where predictions are trusted, what a compiler said."""

from __future__ import annotations

import functools
import importlib
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from capibara.errors import UnknownNameError
from capibara.kernels import (
    Case,
    Implementation,
    Op,
    explain,
    gemm,
    lookup,
    nearest_code,
    registry,
    rms_norm,
    target,
    trust,
)
from capibara.kernels.core import evidence, trusting
from capibara.mesh import tpu_v4_optimization_context
from capibara.mesh.context import disable_everywhere, enable_everywhere

ROOT = Path(__file__).parents[3]
ROWS = jax.ShapeDtypeStruct((8192, 4096), "bfloat16")
CODES = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((65536, 768), (1024, 768))]


@pytest.fixture(autouse=True)
def on_v4() -> Iterator[None]:
    with target("tpu", "TPU v4"):
        yield
    assert trusting.trusted() == "measured", "a test left its trust behind"


def _runs() -> str:
    return explain(rms_norm, ROWS).implementation


@pytest.mark.quick
def test_a_prediction_is_acted_on_where_it_is_trusted() -> None:
    assert _runs() == "xla"
    told = str(explain(rms_norm, ROWS))
    assert "predicted 3.5 times as fast as XLA's form" in told
    assert "inside an optimisation context or trust" in told
    with trust("predicted"):
        assert _runs() == "pallas_tpu"
        assert "because it is predicted 3.5 times" in str(explain(rms_norm, ROWS))
    assert _runs() == "xla"


@pytest.mark.quick
def test_an_optimisation_context_trusts_predictions_and_an_explicit_trust_comes_first() -> None:
    with tpu_v4_optimization_context():
        assert _runs() == "pallas_tpu"
        with trust("measured"):
            assert _runs() == "xla"
        with tpu_v4_optimization_context(dispatch=False):
            assert _runs() == "xla"
    with trust("measured"), tpu_v4_optimization_context():
        assert _runs() == "xla"


def test_it_holds_for_the_process_where_it_is_a_setting() -> None:
    seen = []

    def elsewhere() -> None:
        with target("tpu", "TPU v4"):
            seen.append(_runs())

    def in_a_thread() -> str:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return seen[-1]

    trust("predicted")
    try:
        assert _runs() == in_a_thread() == "pallas_tpu"
        with trust("measured"):
            assert (_runs(), in_a_thread()) == ("xla", "pallas_tpu")
    finally:
        trust(None)
    assert _runs() == in_a_thread() == "xla"
    enable_everywhere()
    try:
        assert in_a_thread() == "pallas_tpu"
    finally:
        disable_everywhere()
    assert in_a_thread() == "xla"


def test_a_jitted_function_is_traced_again_under_another_trust() -> None:
    traced: list[str] = []

    @jax.jit
    def norm(x: Any) -> Any:
        traced.append(trusting.trusted())
        return x

    for _ in range(2):
        norm(1.0)
        with trust("predicted"):
            norm(1.0)
    assert traced == ["measured", "predicted"]


@pytest.mark.quick
def test_a_kernel_that_is_predicted_slower_is_left() -> None:
    square, bias = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((4096, 4096), (4096,)))
    with trust("predicted"):
        told = explain(gemm, square, square, bias=bias, activation="gelu")
    assert told.implementation == "xla"
    assert "not pallas_tpu: it accepts, and xla was chosen; predicted 0.8 times" in str(told)


def test_sizes_that_are_far_from_every_case_go_by_the_ops_worst() -> None:
    call = lookup("norm").call(jax.ShapeDtypeStruct((3, 4096), "float16"))
    found = evidence.of(call, lookup("norm").implementation("pallas_tpu"))
    assert found.kind == "predicted"
    assert found.gain is not None
    assert found.most is not None
    assert found.gain < found.most
    assert str(found).startswith(f"predicted {found.gain:.2g} to {found.most:.2g} times as fast as XLA's form (")
    assert "cases, none near; the least: as compiled for" in found.source


def test_other_chips_have_no_table_and_keep_to_xla() -> None:
    with target("tpu", "TPU v5e"), trust("predicted"):
        assert _runs() == "xla"
        assert "untimed (neither run beside another nor" in str(explain(rms_norm, ROWS))


@pytest.mark.quick
def test_an_op_from_outside_goes_by_its_order_and_by_its_authors_word() -> None:
    op = Op("mine", family="mine", reference=lambda x: x, operands=("x",), cases=[Case("one", ((8, 128),))])
    op.implement(Implementation("first", lambda x: x))
    op.implement(Implementation("kernel", lambda x: x, platforms=("tpu",), kernel=True))
    assert explain(op, ROWS).implementation == "first"
    op.implement(Implementation("faster", lambda x: x, platforms=("tpu",), kernel=True, ahead_of=("first",)))
    assert explain(op, ROWS).implementation == "faster"
    assert "it goes before first where no table has the call" in str(explain(op, ROWS))
    wide = Implementation("wide", lambda x: x, ahead_of=lambda call: ("faster",) if call.need("x").shape[0] > 8 else ())
    op.implement(wide)
    assert explain(op, ROWS).implementation == "wide"
    assert explain(op, jax.ShapeDtypeStruct((8, 4), "float32")).implementation == "faster"


def test_an_implementation_from_outside_of_our_op_goes_by_its_authors_word() -> None:
    norm = lookup("norm")
    theirs = functools.partial(lambda *arrays, scale, **params: arrays[0], scale=1.0)
    norm.implement(Implementation("theirs", theirs, platforms=("tpu",), kernel=True, ahead_of=("xla",)))
    try:
        assert _runs() == "theirs"
    finally:
        del norm.implementations["theirs"]
        norm.runners.clear()
    assert _runs() == "xla"


@pytest.mark.quick
def test_a_gpu_that_was_timed_says_where_and_another_that_it_was_not() -> None:
    with target("gpu", "NVIDIA H200"):
        told = explain(nearest_code, *CODES)
    assert told.implementation == "hopper"
    assert (
        "because it goes before xla, reference where no table has the call: measured 14 times as fast as xla "
        "(f32[65536,768] f32[1024,768]: benchmarks/results/2026-11-15-h200-nearest-code.json, row 1)"
    ) in str(told)
    for other in ("NVIDIA H100 80GB HBM3", "NVIDIA GH200 480GB"):
        with target("gpu", other):
            told = explain(nearest_code, *CODES)
        assert told.implementation == "hopper"
        assert "untimed here (measured on NVIDIA H200: 14 times as fast as xla" in str(told)
        assert ": measured" not in str(told)
    with target("gpu", "NVIDIA A100-SXM4-80GB"):
        assert "measured" not in str(explain(nearest_code, *CODES))


def test_a_kernel_that_was_measured_slower_says_so_and_is_left() -> None:
    x, scale = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((65536, 128), (128,)))
    with target("gpu", "NVIDIA H200"):
        told = explain(rms_norm, x, scale)
    assert told.implementation == "xla"
    assert "not hopper: it accepts, and xla was chosen; measured 0.32 times as fast as xla (bf16[65536,128]" in str(
        told
    )


def test_what_a_table_does_not_speak_of_is_untimed() -> None:
    x, weights, sizes = (jax.ShapeDtypeStruct(s, "bfloat16") for s in ((512, 256), (4, 256, 128), (4,)))
    sizes = sizes.update(dtype="int32")
    with target("gpu", "NVIDIA H200"):
        told = explain(lookup("grouped_gated_gemm"), x, weights, weights, sizes)
    assert told.implementation == "hopper"
    assert "it goes before xla where no table has the call: untimed (neither run beside another" in str(told)


@pytest.mark.quick
def test_an_unknown_word_names_the_others() -> None:
    with pytest.raises(UnknownNameError, match="'measured', 'predicted'"):
        trust("hoped")


def _tool(name: str) -> Any:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


def _shipped(chip: str) -> Any:
    return json.loads((evidence.SHIPPED / f"{chip}.json").read_text(encoding="utf-8"))


def test_the_tables_are_what_the_tools_make_of_the_results() -> None:
    v4 = _shipped("tpu_v4")
    assert _tool("predicted_evidence").table([ROOT / source["file"] for source in v4["sources"]]) == v4
    measured = _tool("measured_evidence")
    assert measured.table() == _shipped("nvidia_h200")
    spoken_for = {row["source"] for rows in measured.table()["ops"].values() for row in rows}
    assert spoken_for == set(range(len(measured.READERS))), "every file that is read says something"
    guide = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8").splitlines()
    assert set(measured.lines(measured.table())) <= set(guide)


def test_what_is_first_in_order_was_the_fastest_of_those_timed_or_near_it() -> None:
    """On every measured row: rules are made by runs, and a run that says otherwise is to change one."""
    slower = {}
    for _, timed, call in _tool("measured_evidence").measured():
        op = call.op
        accepting = [name for name in timed.us if name in op.implementations]
        accepting = [name for name in accepting if op.implementations[name].refusal(call) is None]
        first = next(name for name in evidence.order(call, "measured").names if name in accepting)
        loss = timed.us[first] / min(timed.us[name] for name in accepting)
        if loss > 1.12:
            slower[f"{call} {timed.passes or ''}".rstrip()] = loss
    assert not slower


def test_every_measured_row_stands_in_the_results() -> None:
    shipped = _shipped("nvidia_h200")
    for source in shipped["sources"]:
        document = json.loads((ROOT / source["file"]).read_text(encoding="utf-8"))
        assert "H200" in str(document["device"])
        rows = document.get("rows") or document["lengths"]
        assert all(
            row["row"] < len(rows)
            for found in shipped["ops"].values()
            for row in found
            if shipped["sources"][row["source"]] == source
        )


def test_every_tpu_kernel_of_an_op_that_runs_on_one_chip_was_compiled() -> None:
    """Rows of the table are those of 50 µs and more; an op whose cases are all smaller has none."""
    shipped = _shipped("tpu_v4")
    documents = [json.loads((ROOT / source["file"]).read_text(encoding="utf-8")) for source in shipped["sources"]]
    compiled = {(row["op"], row["implementation"]) for document in documents for row in document["rows"] if row["ok"]}
    kernels = {
        (op.name, impl.name)
        for op in registry().values()
        if op.mesh_axes is None
        for impl in op.implementations.values()
        if impl.platforms == ("tpu",)
    }
    assert kernels <= compiled
    assert {
        (op, name) for op, rows in shipped["ops"].items() for row in rows for name in row["us"] if name != "xla"
    } <= (kernels)
