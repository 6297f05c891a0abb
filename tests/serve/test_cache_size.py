"""How many pages there are: as many as can be filled, or as memory has room for, and it is said which."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from capibara.hardware import devices
from capibara.serve import EngineConfig, cache_size
from tests.serve.engines import CONFIG, engine_of, model_of


def with_memory(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    here = [dataclasses.replace(device, memory_limit_bytes=limit) for device in devices.attached()]
    monkeypatch.setattr(cache_size, "attached", lambda: here)


def size(**changes: Any) -> cache_size.CacheSize:
    config = EngineConfig(**{**CONFIG, "pages": None, **changes})
    return cache_size.cache_size(
        model_of("attention").config, config, max_length=64, dtype="float32", weight_bytes=100_000
    )


@pytest.mark.quick
def test_memory_bounds_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    # 2 layers, keys and values, 4 tokens of 2 heads of 8 numbers of 4 bytes.
    page = 2 * 2 * 4 * 16 * 4
    assert size().page_bytes == page
    with_memory(monkeypatch, 1 << 30)
    assert (size().pages, size().limited_by) == (4 * 16, "max_sequences")
    assert "4 sequences of 64 tokens at a time" in str(size())
    working = cache_size._working_bytes(model_of("attention").config, EngineConfig(**CONFIG))
    with_memory(monkeypatch, 2 * (100_000 + working + 40 * page))
    less = size(memory_share=0.5)
    assert (less.pages, less.limited_by, less.longest_sequences) == (40, "memory", 2)
    assert "as much as memory_share of the device leaves" in str(less)
    assert (size(pages=5).pages, size(pages=5).limited_by) == (5, "pages")
    with_memory(monkeypatch, 2 * (100_000 + working + 10 * page))
    with pytest.raises(ValueError, match=r"room for 40 tokens beside the weights.*max_length=40"):
        size(memory_share=0.5)


def test_an_engine_has_as_many_pages_as_it_says(programs: Path) -> None:
    engine = engine_of(model_of("attention"), programs, pages=None)
    assert engine.cache_size.pages == engine.stats().pages == engine.runner.pages == 64
