"""Tuned tables: written whole, read back, found when near, set aside when broken."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from capibara.kernels import target
from capibara.kernels.core import dispatch, tables
from capibara.kernels.core.context import Target
from capibara.kernels.core.op import Op
from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.ops.attention.api import ATTENTION_GRAD

CHIP = Target("cpu", "Some Chip v1")


@dataclasses.dataclass(frozen=True)
class Block:
    size: int


def _fn(x: Any, y: Any = None, *, config: Any = None, flag: bool = False) -> Any:
    return x


@pytest.fixture
def op() -> Op:
    made = Op("tabled", family="test", reference=_fn, operands=("x", "y"), params={"flag": False})
    made.implement(Implementation("plain", lambda x, y=None, *, flag=False: x))
    made.implement(Implementation("blocked", _fn, config_type=Block, default_config=lambda call: Block(1)))
    return made


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("CAPIBARA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tables, "SHIPPED", tmp_path / "shipped")
    tables.forget()
    yield tmp_path
    tables.forget()


def _call(op: Op, *shape: int, dtype: str = "float32", **params: Any) -> Call:
    return op.call(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)), target=CHIP, **params)


def _entry(call: Call, size: int = 8, implementation: str = "blocked", **changes: Any) -> tables.Entry:
    from capibara.kernels.core.spec import describe

    made = tables.Entry(
        operands=tuple(map(describe, call.args)),
        params=call.changed_params,
        implementation=implementation,
        config={"size": size},
        seconds=1e-6,
        evidence="a test",
    )
    return dataclasses.replace(made, **changes)


@pytest.mark.quick
def test_round_trip(op: Op) -> None:
    call = _call(op, 64, 64)
    assert tables.find(call, ["plain", "blocked"]) is None
    path = tables.store(call, _entry(call))
    assert path == tables.cache_directory() / "some_chip_v1" / "tabled.json"
    tables.forget()
    found = tables.find(call, ["plain", "blocked"])
    assert found is not None
    assert (found.implementation, found.config) == ("blocked", Block(8))
    assert "this call" in found.why
    assert "user's" in found.why
    assert [p.name for p in path.parent.iterdir()] == ["tabled.json"], "nothing temporary is left behind"


def test_the_table_decides_dispatch_and_a_new_entry_replaces_the_old(op: Op) -> None:
    call = _call(op, 64, 64)
    assert dispatch.select(call).implementation == "plain"
    tables.store(call, _entry(call, size=8))
    tables.store(call, _entry(call, size=16))
    chosen = dispatch.select(call)
    assert (chosen.implementation, chosen.config) == ("blocked", Block(16))
    assert len(tables.entries(CHIP.device_kind, "tabled")) == 1


def test_storing_changes_the_generation(op: Op) -> None:
    before = tables.generation()
    call = _call(op, 8)
    tables.store(call, _entry(call))
    assert tables.generation() > before


@pytest.mark.quick
def test_the_nearest_entry_within_a_factor_of_two(op: Op) -> None:
    for side, size in ((64, 1), (128, 2), (1024, 3)):
        call = _call(op, side, side)
        tables.store(call, _entry(call, size=size))

    def size_for(*shape: int, **keywords: Any) -> int | None:
        found = tables.find(_call(op, *shape, **keywords), ["blocked"])
        return None if found is None else found.config.size

    assert size_for(128, 128) == 2
    assert size_for(120, 128) == 2
    assert size_for(70, 70) == 1
    assert size_for(256, 256) == 2  # exactly twice as large
    assert size_for(257, 128) is None  # beyond
    assert size_for(64, 1024) is None  # each dimension counts
    assert size_for(64, 64, dtype="bfloat16") is None
    assert size_for(64, 64, flag=True) is None
    assert size_for(64) is None
    assert size_for() is None
    assert "near case f32[64,64]" in tables.find(_call(op, 70, 70), ["blocked"]).why  # type: ignore[union-attr]


def test_what_is_exact_must_be_alike(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    call = _call(op, 64, 64)
    tables.store(call, _entry(call))
    monkeypatch.setattr(op, "exact", lambda shapes: shapes[op.operands[0]][1])
    assert tables.find(_call(op, 96, 64), ["blocked"]) is not None
    assert tables.find(_call(op, 64, 96), ["blocked"]) is None


@pytest.mark.parametrize(("heads", "length", "parts"), [(7, 32768, 1), (8, 16384, 1), (6, 65536, 2)])
def test_a_near_backward_pass_goes_in_as_many_launches_as_it_should(heads: int, length: int, parts: int) -> None:
    """Seven key heads have no halves: two launches, as eight were tuned with, are an error there."""

    def call(heads: int, length: int) -> Call:
        q = jax.ShapeDtypeStruct((1, heads, length, 64), "bfloat16")
        lse = jax.ShapeDtypeStruct((1, heads, length), "float32")
        return ATTENTION_GRAD.call(q, q, q, *[None] * 6, q, lse, q, None, causal=True)

    with target("gpu", "NVIDIA H200"):
        tuned = call(8, 32768)
        config: Any = dispatch.select(tuned, implementation="hopper").config
        assert config.parts == 2
        tables.store(tuned, _entry(tuned, implementation="hopper", config=dataclasses.asdict(config)))
        made: Any = dispatch.select(call(heads, length), implementation="hopper").config
    assert made.parts == parts


def test_a_very_long_backward_pass_goes_in_two_parts() -> None:
    """Where no table has it: half of the sums of dq at a time."""
    q = jax.ShapeDtypeStruct((1, 8, 32768, 128), "bfloat16")
    lse = jax.ShapeDtypeStruct((1, 8, 32768), "float32")
    with target("gpu", "NVIDIA H200"):
        call = ATTENTION_GRAD.call(q, q, q, *[None] * 6, q, lse, q, None, causal=True)
        chosen = dispatch.select(call)
    assert chosen.implementation == "hopper"
    assert chosen.config.parts == 2  # type: ignore[union-attr]


def test_a_refusing_implementation_is_passed_over(op: Op) -> None:
    call = _call(op, 64)
    tables.store(call, _entry(call))
    assert tables.find(call, ["plain"]) is None


def test_the_users_entry_speaks_before_the_shipped_one(op: Op) -> None:
    call, near = _call(op, 64), _call(op, 96)
    shipped = tables.table_path(tables.SHIPPED, CHIP.device_kind, "tabled")
    tables.write(shipped, "tabled", CHIP.device_kind, [_entry(call, size=1), _entry(near, size=2)])
    found = tables.find(call, ["blocked"])
    assert found is not None
    assert "shipped" in found.why
    assert found.config.size == 1
    tables.store(call, _entry(call, size=7))
    assert tables.find(call, ["blocked"]).config.size == 7  # type: ignore[union-attr]
    # A shipped entry for the very call still beats the user's for a near one.
    assert tables.find(near, ["blocked"]).config.size == 2  # type: ignore[union-attr]


@pytest.mark.quick
def test_a_shipped_entry_of_a_near_call_configures_and_does_not_choose(op: Op) -> None:
    call, near = _call(op, 64), _call(op, 96)
    shipped = tables.table_path(tables.SHIPPED, CHIP.device_kind, "tabled")
    tables.write(shipped, "tabled", CHIP.device_kind, [_entry(near, size=2)])
    assert tables.find(call, ["blocked"]) is None
    assert dispatch.select(call).implementation != "blocked"
    assert dispatch.select(call, implementation="blocked").config.size == 2  # type: ignore[union-attr]
    # What the user measured stands for what is near it.
    tables.store(near, _entry(near, size=3))
    selection = dispatch.select(call)
    assert (selection.implementation, selection.config.size) == ("blocked", 3)  # type: ignore[union-attr]


def test_an_entry_with_other_config_fields_is_passed_over(op: Op) -> None:
    call, near = _call(op, 64), _call(op, 96)
    tables.store(call, _entry(call, config={"tile": 3}))
    assert tables.find(call, ["blocked"]) is None
    tables.store(near, _entry(near, size=2))
    assert tables.find(call, ["blocked"]).config.size == 2  # type: ignore[union-attr]


@pytest.mark.quick
@pytest.mark.parametrize(
    "broken",
    [
        b"{ not json",
        b"\xff\xfe\x00 not text",
        b"[]",
        b'{"format": 99, "entries": []}',
        b'{"format": 1, "entries": [{"operands": ["f32[8]"]}]}',
        b"",
    ],
)
def test_a_broken_cache_is_set_aside_and_rebuilt(op: Op, broken: bytes) -> None:
    call = _call(op, 64)
    path = tables.store(call, _entry(call))
    path.write_bytes(broken)
    tables.forget()
    with pytest.warns(UserWarning, match="cannot be read") as caught:
        assert tables.find(call, ["blocked"]) is None
    assert "kernels tune" in str(caught[0].message)
    assert path.with_suffix(".corrupt").read_bytes() == broken
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tables.store(call, _entry(call, size=4))
        assert tables.find(call, ["blocked"]).config.size == 4  # type: ignore[union-attr]


def test_a_broken_shipped_table_stays_where_it_is(op: Op) -> None:
    path = tables.table_path(tables.SHIPPED, CHIP.device_kind, "tabled")
    path.parent.mkdir(parents=True)
    path.write_text("nonsense")
    with pytest.warns(UserWarning, match="reinstall"):
        assert tables.find(_call(op, 64), ["blocked"]) is None
    assert path.read_text() == "nonsense"


def test_writers_at_once_lose_nothing_and_readers_see_whole_files(op: Op) -> None:
    calls = [_call(op, 2 ** (3 + 2 * i)) for i in range(8)]
    path = tables.table_path(tables.cache_directory(), CHIP.device_kind, "tabled")
    tables.store(calls[0], _entry(calls[0]))

    def write(call: Call) -> None:
        for size in range(5):
            tables.store(call, _entry(call, size=size + 1))

    def read(_: int) -> int:
        return sum(len(json.loads(path.read_text())["entries"]) > 0 for _ in range(50))

    with ThreadPoolExecutor(10) as pool:
        writers, readers = pool.map(write, calls), pool.map(read, range(2))
        list(writers)
        assert list(readers) == [50, 50]
    entries = json.loads(path.read_text())["entries"]
    assert len(entries) == 8
    assert {e["config"]["size"] for e in entries} == {5}


def test_a_write_that_fails_leaves_the_old_table(op: Op, root: Path) -> None:
    call = _call(op, 64)
    path = tables.store(call, _entry(call))
    before = path.read_bytes()
    with pytest.raises(TypeError):
        tables.store(call, _entry(call, config={"size": object()}))
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == ["tabled.json"]


def test_a_table_elsewhere(op: Op, tmp_path: Path) -> None:
    call = _call(op, 64)
    path = tables.store(call, _entry(call), tmp_path / "given" / "table.json")
    assert json.loads(path.read_text())["entries"][0]["config"] == {"size": 8}
    assert tables.find(call, ["blocked"]) is None, "it is not the user's own table"
