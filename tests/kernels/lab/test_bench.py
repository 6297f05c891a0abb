"""Benchmarks: dispatch's choice and its peers in one run, each checked, none hidden."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from capibara.errors import UnknownNameError
from capibara.kernels.core import context
from capibara.kernels.core.op import Op, lookup
from capibara.kernels.core.spec import Case, Cost, Implementation
from capibara.kernels.lab import bench as benches
from capibara.kernels.lab.bench import bench

LAUNCHES: list[str] = []


def _reference(x: Any, y: Any = None) -> Any:
    return x * 2 + 1


def _two_programs(case: Case) -> Any:
    first, second = jax.jit(lambda x: x * 2), jax.jit(lambda x: x + 1)

    def run(x: Any, y: Any = None) -> Any:
        assert not isinstance(x, jax.core.Tracer), "a peer of two programs must not be traced into one"
        LAUNCHES.append(case.name)
        return second(first(x))

    return run


@pytest.fixture
def op() -> Op:
    made = Op(
        "affine",
        family="test",
        reference=_reference,
        operands=("x", "y"),
        cost=lambda call: Cost(vector_flops=2.0 * 4096, bytes=2.0 * 4 * 4096, dtype="float32"),
        cases=(
            Case("one", ((4096,), None), "float32", tags=frozenset({"bench"})),
            Case("other", ((2048, 2), None), "float32"),
        ),
        peers={
            "two-programs": _two_programs,
            "never": lambda case: None,
            "broken": lambda case: jax.jit(lambda x, y=None: jnp.dot(x, jnp.ones((3, 3)))),
            "one-program": lambda case: jax.jit(lambda x, y=None: x * 2 + 1),
        },
    )
    made.implement(Implementation("xla", _reference))
    made.implement(Implementation("wrong", lambda x, y=None: x * 2 + 1.5))
    made.implement(Implementation("elsewhere", _reference, platforms=("tpu",)))
    return made


@pytest.mark.quick
def test_a_row_has_what_a_reader_needs(op: Op) -> None:
    (row,) = bench(op, against=("xla", "two-programs", "never", "broken", "elsewhere"), samples=3)
    assert (row.op, row.case, row.direction) == ("affine", "one", "forward")
    assert row.ours.name == "xla"
    assert "it comes first for" in row.why
    assert row.ok
    peers = {peer.name: peer for peer in row.peers}
    assert row.speedup(peers["xla"]) == 1.0
    assert row.speedup(peers["two-programs"]) > 0  # type: ignore[operator]
    assert peers["never"].timing is None
    assert "does not apply" in peers["never"].note
    assert "TypeError" in peers["broken"].note
    assert "it is for tpu" in peers["elsewhere"].note
    assert row.ours.check is not None
    assert row.ours.check.error <= row.ours.check.tolerance
    assert row.tflops(row.ours) == pytest.approx(2 * 4096 / row.ours.timing.seconds / 1e12)  # type: ignore[union-attr]
    assert row.gigabytes(row.ours) == pytest.approx(8 * 4096 / row.ours.timing.seconds / 1e9)  # type: ignore[union-attr]
    assert row.limit_seconds is not None
    assert row.fraction(row.ours) == pytest.approx(row.limit_seconds / row.ours.timing.seconds)  # type: ignore[union-attr]


def test_peers_of_several_programs_stay_several(op: Op) -> None:
    LAUNCHES.clear()
    bench(op, ["one"], ("two-programs",), samples=3)
    assert len(LAUNCHES) > 3


@pytest.mark.quick
def test_a_wrong_result_is_shown(op: Op) -> None:
    (row,) = bench(op, ["one"], ("wrong",), samples=3)
    assert not row.ok
    (peer,) = row.peers
    assert peer.check is not None
    assert not peer.check.ok
    assert json.loads(json.dumps(row.as_dict(), allow_nan=False))["ok"] is False
    assert peer.timing is not None, "its time is shown beside the fact that it is wrong"


def test_gradients_are_timed_with_the_forward_pass(op: Op) -> None:
    (row,) = bench(op, ["one"], ("one-program", "two-programs"), grad=True, samples=3)
    assert row.direction == "forward+backward"
    assert row.ok
    assert row.cost.flops == 3 * 2 * 4096
    peers = {peer.name: peer for peer in row.peers}
    assert peers["one-program"].timing is not None
    assert "several programs" in peers["two-programs"].note


def test_cases_by_name_or_tag_and_progress(op: Op) -> None:
    seen: list[str] = []
    assert [row.case for row in bench(op, None, (), samples=1, on_progress=seen.append)] == ["one"]
    assert [row.case for row in bench(op, ["other", op.case("one")], (), samples=1)] == ["other", "one"]
    assert seen == ["one"]


def test_unknown_names(op: Op) -> None:
    with pytest.raises(UnknownNameError, match="cudnn"):
        bench(op, ["one"], ("cudnn",))
    with pytest.raises(UnknownNameError, match="case of affine"):
        bench(op, ["two"])
    with pytest.raises(UnknownNameError, match="op"):
        bench("afine")


def test_a_choice_that_does_not_run_is_not_hidden(op: Op) -> None:
    def fails(x: Any, y: Any = None) -> Any:
        raise ValueError("this implementation is broken")

    op.implement(Implementation("best", fails, ahead_of=("xla",)))
    with pytest.raises(ValueError, match="is broken"):
        bench(op, ["one"], ("xla",))


def test_the_document_says_where_it_comes_from(op: Op) -> None:
    document = benches.document(bench(op, ["one"], ("xla", "never"), samples=1), command="capibara bench")
    read = json.loads(json.dumps(document))
    assert read["device"]["platform"] == "cpu"
    assert read["versions"]["jax"] == jax.__version__
    assert read["command"] == "capibara bench"
    assert read["date"].endswith("+00:00")
    (row,) = read["rows"]
    assert row["ours"]["name"] == "xla"
    assert row["peers"][0]["ours_is_times_as_fast"] == 1.0
    assert row["peers"][1]["timing"] is None


@pytest.mark.parametrize(
    ("chip", "kind", "dtype", "params", "flops_a_second"),
    [
        ("tpu", "TPU v4", "bfloat16", {}, 275e12),
        ("tpu", "TPU v4", "float32", {}, 275e12),  # one bfloat16 pass
        ("tpu", "TPU v4", "float32", {"precision": "highest"}, 275e12 / 6),
        ("gpu", "NVIDIA H200", "float32", {}, 494.7e12),  # tfloat32
        ("gpu", "NVIDIA H200", "float32", {"precision": "highest"}, 66.9e12),
        ("gpu", "NVIDIA H200", "bfloat16", {}, 989.4e12),
    ],
)
def test_the_limit_is_the_rate_of_the_unit_that_does_the_work(
    chip: str, kind: str, dtype: str, params: dict[str, Any], flops_a_second: float
) -> None:
    gemm = lookup("gemm")
    x = jax.ShapeDtypeStruct((8192, 8192), jnp.dtype(dtype))
    with context.target(chip, kind) as target:
        call = gemm.call(x, x, target=target, **params)
    limit = benches.limit_seconds(call, gemm.cost(call))
    assert limit == pytest.approx(2 * 8192**3 / flops_a_second)


def test_a_chip_outside_the_table_has_no_limit() -> None:
    gemm = lookup("gemm")
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    with context.target("gpu", "NVIDIA Unheard Of") as target:
        call = gemm.call(x, x, target=target)
    assert benches.limit_seconds(call, gemm.cost(call)) is None


def test_the_runner_of_the_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).parents[3] / "benchmarks" / "tpu_v4_performance.py"
    spec = importlib.util.spec_from_file_location("tpu_v4_performance", path)
    assert spec is not None
    assert spec.loader is not None
    runner = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(runner)
    out = tmp_path / "rows.json"
    assert runner.main(["gemm", "--case", "odd", "--out", str(out)]) == 0
    assert json.loads(out.read_text())["rows"][0]["case"] == "odd"
    assert "Not a TPU v4" in capsys.readouterr().out
    assert runner.main(["gemm", "--case", "nope"]) == 2
    assert runner.main(["gemm", "--against", "nope"]) == 2


def test_large_cases_are_left_to_accelerators() -> None:
    gemm = lookup("gemm")
    kept, left = benches.affordable(gemm, gemm.cases)
    assert {"one", "prime"} <= {case.name for case in kept}
    assert {"llama-up", "square-8192"} <= {case.name for case in left}
    assert len(kept) + len(left) == len(gemm.cases)
