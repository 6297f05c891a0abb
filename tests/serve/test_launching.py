"""Which programs are launched kernel by kernel: those whose kernels the host launches faster than they run."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from capibara.models import ModularCapibaraModel, load_preset
from capibara.serve import Engine, EngineConfig, launching
from capibara.serve.launching import launched_one_by_one
from capibara.serve.programs import Shape

pytestmark = pytest.mark.quick

MODEL = load_preset("llama-1b").model
PAGE_BYTES = 64 * 2 * 8 * 128 * 2  # 64 keys and values of 8 heads in 16 bits


def _asked(sequences: int, *, megabytes: float = 126, steps: int = 8, pages: int = 12, **changes: Any) -> bool:
    shape = Shape(sequences, sequences, pages, sequences, steps)
    given = {"model": MODEL, "config": EngineConfig(), "device_kind": "NVIDIA H200", **changes}
    return launched_one_by_one(shape=shape, layer_bytes=megabytes * 1e6, page_bytes=PAGE_BYTES, **given)


@pytest.fixture(autouse=True)
def _a_jax_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "can_overlap", lambda: True)


def test_long_kernels_are_launched_one_by_one() -> None:
    """Measured on an H200: at 1, 16, 32 and 64 sequences of a 1.1B model in 16 bits, which read 126 MB a layer."""
    assert [_asked(n) for n in (1, 16, 32, 64)] == [True] * 4


def test_short_ones_are_not() -> None:
    """A lone sequence's 8-bit weights take the device 27 us a layer, and the host 24 and what the program takes."""
    assert not _asked(1, megabytes=63)
    assert not _asked(4)  # eight kernels and no more keys than a lone sequence
    assert not _asked(32, megabytes=63)
    # A table that has room for more says nothing of what is in it: 512 keys a sequence are counted on.
    assert _asked(16, megabytes=110, pages=16) == _asked(16, megabytes=110, pages=1000)


def test_short_programs_are_not() -> None:
    """The host is to be done with a program before the device is, whatever it takes beside the launches."""
    assert [_asked(32, steps=steps) for steps in (1, 2, 4, 8)] == [False, False, True, True]


def test_other_programs_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    mixture = load_preset("moe").model
    assert not _asked(128)  # products of the compiler's
    assert not _asked(32, model=mixture)
    assert not _asked(32, config=dataclasses.replace(EngineConfig(), adapters={"a": "folder"}))
    assert not _asked(32, config=dataclasses.replace(EngineConfig(), mesh=object()))
    for kind in ("cpu", "TPU v4", "NVIDIA A100-SXM4-80GB", "NVIDIA B200"):
        assert not _asked(32, device_kind=kind)
    monkeypatch.setattr(launching, "can_overlap", lambda: False)
    assert not _asked(32)


def test_who_says_so_goes_before_the_rule() -> None:
    """But not where there are no such kernels."""
    on, off = (dataclasses.replace(EngineConfig(), overlap=overlap) for overlap in (True, False))
    assert not _asked(32, config=off)
    assert _asked(1, megabytes=63, config=on)
    assert _asked(32, config=on, device_kind="NVIDIA H100 of an unknown make")
    assert not _asked(32, device_kind="NVIDIA H100 of an unknown make")
    assert not _asked(32, config=on, steps=1)
    assert not _asked(32, config=on, device_kind="TPU v4")


def test_an_engine_says_where_it_means_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model = ModularCapibaraModel(load_preset("dev").model, precision="float32")
    config = EngineConfig(max_sequences=2, max_batch_tokens=16, max_length=32, page_size=16, overlap=True)
    Engine(model, config=config).close()
    assert "overlap=True means nothing here" in caplog.text
