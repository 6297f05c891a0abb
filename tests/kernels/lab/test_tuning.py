"""Tuning: a fast wrong kernel never wins, a broken one does not end the search, and the winner is kept."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from capibara.errors import UnknownNameError
from capibara.kernels.core import context, dispatch, tables
from capibara.kernels.core.op import Op, lookup, register, unregister
from capibara.kernels.core.spec import Case, Implementation
from capibara.kernels.lab.tuning import Progress, TuneReport, autotune


@dataclasses.dataclass(frozen=True)
class Steps:
    """How much needless work a candidate does; 0 does not compile, below 0 is wrong."""

    count: int


def _reference(x: Any) -> Any:
    return 2 * x


def _slow(x: Any, steps: int) -> Any:
    """2x, after work whose result does not show."""
    return 2 * x + 1e-30 * jax.lax.fori_loop(0, steps, lambda _, y: jnp.sin(y), x)


def _tunable(x: Any, *, config: Steps) -> Any:
    if config.count == 0:
        raise NotImplementedError("no kernel of zero steps\nand a long tail of MLIR")
    if config.count < 0:
        return 2.5 * x
    return _slow(x, config.count)


@pytest.fixture
def op(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Op]:
    monkeypatch.setenv("CAPIBARA_CACHE_DIR", str(tmp_path / "cache"))
    tables.forget()
    made = Op(
        "doubling",
        family="test",
        reference=_reference,
        operands=("x",),
        cases=(Case("small", ((4096,),), "float32", tags=frozenset({"tune"})),),
    )
    made.implement(Implementation("wrong", lambda x: 2.5 * x))
    made.implement(Implementation("slow", lambda x: _slow(x, 400)))
    made.implement(Implementation("slower", lambda x: _slow(x, 4000)))
    made.implement(Implementation("picky", _reference, refuses=lambda call: "it is never in the mood"))
    made.implement(Implementation("reference", _reference))
    register(made)
    yield made
    unregister("doubling")
    tables.forget()


@pytest.mark.quick
def test_the_fastest_right_one_is_picked_and_kept(op: Op) -> None:
    case = op.case("small")
    call = op.call(*case.args())
    assert dispatch.select(call).implementation == "wrong", "without timings the first would run, which is wrong"
    report = autotune("doubling", "small")
    assert report.best is not None
    assert report.best.implementation == "slow"
    assert report.best.careful is not None
    assert {c.implementation: c.rejected for c in report.rejected}.keys() == {"wrong"}
    assert "wrong result" in str(report.rejected[0].rejected)
    assert report.refused == {"picky": "it is never in the mood"}
    assert all(c.implementation != "reference" for c in report.candidates)

    selection = dispatch.select(call)
    assert selection.implementation == "slow"
    assert "measured it fastest" in selection.why
    tables.forget()
    assert dispatch.select(op.call(*case.args())).implementation == "slow", "it was read back from disk"

    assert report.path is not None
    entries = json.loads(report.path.read_text())["entries"]
    entry = entries[0]
    assert entry["implementation"] == "slow"
    assert all(e["implementation"] != "wrong" for e in entries), "each right implementation's best is kept"
    assert [e["seconds"] for e in entries] == sorted(e["seconds"] for e in entries)
    assert entry["seconds"] > 0
    for part in ("cpu", f"jax {jax.__version__}", "measured"):
        assert part in entry["evidence"]


def test_configs_that_fail_or_are_wrong_are_rejected_with_a_reason(op: Op) -> None:
    op.implement(
        Implementation(
            "tunable",
            _tunable,
            config_type=Steps,
            default_config=lambda call: Steps(2000),
            candidates=lambda call: [Steps(0), Steps(-1), Steps(1500), Steps(5), Steps(2000)],
        )
    )
    seen: list[Progress] = []
    report = autotune(op, "small", implementations=["tunable"], on_progress=seen.append, save=False)
    assert report.path is None
    assert report.best is not None
    assert report.best.config == Steps(5)
    reasons = {c.config.count: str(c.rejected) for c in report.rejected}
    assert reasons[0] == "it does not compile: NotImplementedError: no kernel of zero steps"
    assert reasons[-1].startswith("wrong result")
    assert len(report.candidates) == 5
    assert sum(c.default for c in report.candidates) == 1
    assert all(c.careful for c in report.candidates if c.rejected is None), "few enough to all be finalists"
    assert seen[-1].done == seen[-1].total == 5
    text = str(report)
    assert "* " in text
    assert "rejected" in text
    assert json.dumps(report.as_dict())


def test_the_default_is_always_tried_and_among_the_finalists(op: Op) -> None:
    op.implement(
        Implementation(
            "tunable",
            _tunable,
            config_type=Steps,
            default_config=lambda call: Steps(3000),
            candidates=lambda call: [Steps(n) for n in (1, 2, 3, 4, 5, 6)],
        )
    )
    report = autotune(op, "small", implementations=["tunable", "slower"], max_configs=3, finalists=1, save=False)
    assert {c.config.count for c in report.candidates if c.config} == {3000, 1, 2}
    careful = {c.name for c in report.candidates if c.careful}
    assert careful >= {"tunable Steps(count=3000)", "slower"}
    assert len(careful) == 3


def test_nothing_right_stores_nothing(op: Op) -> None:
    report = autotune(op, "small", implementations=["wrong"])
    assert report.best is None
    assert report.entry is None
    assert report.path is None
    assert not tables.cache_directory().exists()


def test_operands_instead_of_a_case_and_a_table_elsewhere(op: Op, tmp_path: Path) -> None:
    report = autotune(op, jax.ShapeDtypeStruct((256,), jnp.float32), implementations=["slow"], save=tmp_path / "tuned")
    assert report.path == tmp_path / "tuned" / "cpu" / "doubling.json"
    assert report.entry is not None
    assert report.entry.operands == ("f32[256]",)
    assert dispatch.select(op.call(*op.case("small").args())).implementation == "wrong", "not the user's table"
    again = autotune(op, jnp.ones(64), implementations=["slow"], save=str(tmp_path / "one.json"))
    assert again.path == tmp_path / "one.json"


def test_mistakes_are_said_before_anything_runs(op: Op) -> None:
    with pytest.raises(UnknownNameError, match="implementation of doubling"):
        autotune(op, "small", implementations=["fastest"])
    with pytest.raises(UnknownNameError, match="case of doubling"):
        autotune(op, "large")
    with pytest.raises(UnknownNameError, match="op"):
        autotune("tripling", "small")
    with pytest.raises(ValueError, match="case or operands"):
        autotune(op)
    with pytest.raises(ValueError, match="drawn at random"):
        autotune(op, jax.ShapeDtypeStruct((8,), jnp.int32))
    with pytest.raises(ValueError, match="its own parameters"):
        autotune(op, "small", params={"flag": True})
    with context.interpret(), pytest.raises(ValueError, match="on their chip"):
        autotune(op, "small")
    with context.target("tpu"), pytest.raises(ValueError, match="attached chip"):
        autotune(op, "small")


def test_gemm_on_this_machine(op: Op) -> None:
    report: TuneReport = autotune(lookup("gemm"), "odd", save=False)
    assert report.best is not None
    assert report.best.implementation == "xla"
    assert set(report.refused) == {"pallas_tpu", "hopper", "hopper_turned"}
