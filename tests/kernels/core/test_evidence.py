"""Which evidence dispatch acts on: what was measured, and where predictions are trusted, what a compiler said."""

from __future__ import annotations

import functools
import importlib.util
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from capibara.errors import UnknownNameError
from capibara.kernels import Case, Implementation, Op, explain, gemm, lookup, registry, rms_norm, target, trust
from capibara.kernels.core import evidence
from capibara.mesh import tpu_v4_optimization_context
from capibara.mesh.context import disable_everywhere, enable_everywhere

ROOT = Path(__file__).parents[3]
ROWS = jax.ShapeDtypeStruct((8192, 4096), "bfloat16")


@pytest.fixture(autouse=True)
def on_v4() -> Iterator[None]:
    with target("tpu", "TPU v4"):
        yield
    assert evidence.trusted() == "measured", "a test left its trust behind"


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
        traced.append(evidence.trusted())
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
    assert "the least of" in found.source


def test_other_chips_have_no_table_and_keep_to_xla() -> None:
    with target("tpu", "TPU v5e"), trust("predicted"):
        assert _runs() == "xla"
        assert "untimed (neither run nor compared" in str(explain(rms_norm, ROWS))


def test_an_op_from_outside_goes_by_its_authors_rank() -> None:
    op = Op("mine", family="mine", reference=lambda x: x, operands=("x",), cases=[Case("one", ((8, 128),))])
    op.implement(Implementation("xla", lambda x: x, rank=lambda call: 1))
    op.implement(Implementation("kernel", lambda x: x, platforms=("tpu",), kernel=True, rank=lambda call: 2))
    assert explain(op, ROWS).implementation == "kernel"


def test_an_implementation_from_outside_of_our_op_goes_by_its_authors_rank() -> None:
    norm = lookup("norm")
    theirs = functools.partial(lambda *arrays, scale, **params: arrays[0], scale=1.0)
    norm.implement(Implementation("theirs", theirs, platforms=("tpu",), kernel=True, rank=lambda call: 1e9))
    try:
        assert _runs() == "theirs"
    finally:
        del norm.implementations["theirs"]
        norm.runners.clear()
    assert _runs() == "xla"


@pytest.mark.quick
def test_an_unknown_word_names_the_others() -> None:
    with pytest.raises(UnknownNameError, match="'measured', 'predicted'"):
        trust("hoped")


def test_the_table_is_what_the_tool_makes_of_the_results() -> None:
    shipped = json.loads((evidence.SHIPPED / "tpu_v4.json").read_text(encoding="utf-8"))
    spec = importlib.util.spec_from_file_location("predicted_evidence", ROOT / "tools" / "predicted_evidence.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.table([ROOT / source["file"] for source in shipped["sources"]]) == shipped


def test_every_tpu_kernel_of_an_op_that_runs_on_one_chip_was_compiled() -> None:
    """Rows of the table are those of 50 µs and more; an op whose cases are all smaller has none."""
    shipped = json.loads((evidence.SHIPPED / "tpu_v4.json").read_text(encoding="utf-8"))
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
    assert {(op, name) for op, rows in shipped["ops"].items() for name in rows} <= kernels
