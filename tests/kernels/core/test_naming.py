"""A split kernel's name: the same for the same work, another for other work, none for somebody else's code."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from capibara.kernels.core import naming, tables
from capibara.kernels.core.op import Op, lookup
from capibara.kernels.core.spec import Implementation, Preference

SHAPE = jax.ShapeDtypeStruct((2, 8), jnp.float32)


def name_of(fn: Any = jnp.add, prefer: Preference | None = None, **params: Any) -> str | None:
    call = lookup("fft").call(SHAPE, SHAPE, **params)
    return naming.program_name(fn, call, prefer or Preference("fft", "xla"))


@pytest.mark.quick
def test_a_name_is_of_what_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAPIBARA_CACHE_DIR", str(tmp_path))
    tables.forget()
    name = name_of()
    assert name is not None
    assert name_of() == name
    others = [
        name_of(inverse=True),
        name_of(prefer=Preference("fft", "xla_matmul")),
        name_of(jnp.subtract),
        name_of(norm="ortho"),
    ]
    with jax.default_matmul_precision("highest"):
        others.append(name_of())
    tuned = tables.cache_directory() / "chip" / "fft.json"
    tuned.parent.mkdir(parents=True)
    tuned.write_text("{}")
    tables.forget()
    others.append(name_of())
    assert len({name, *others}) == 1 + len(others)
    assert None not in others


def test_what_only_this_process_knows_has_no_name() -> None:
    @dataclasses.dataclass(frozen=True)
    class Config:
        what: object

    assert name_of(prefer=Preference("fft", "xla", Config(object()))) is None


@pytest.mark.quick
def test_nothing_is_named_after_code_of_somebody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(naming, "_foreign", False)
    monkeypatch.setattr(naming, "_cache_folder", lambda: "somewhere")
    assert naming.wanted()
    own = Op("named", family="mine", reference=jnp.tanh, operands=("x",))
    own.implement(Implementation("ours", functools.partial(naming.program_name, None)))
    assert naming.wanted()
    own.implement(Implementation("theirs", lambda x: jnp.tanh(x)))
    assert not naming.wanted()


@pytest.mark.quick
def test_on_one_device_there_is_nothing_to_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(naming, "_foreign", False)
    monkeypatch.setattr(naming, "_cache_folder", lambda: "somewhere")
    assert naming.wanted()
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert not naming.wanted()
