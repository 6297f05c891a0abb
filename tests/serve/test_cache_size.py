"""How many pages there are: as many as can be filled, or as memory has room for, and it is said which."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from tests.serve.engines import CONFIG, GREEDY, answers, engine_of, model_of, prompts_of, run

from capibara.hardware import devices
from capibara.serve import EngineConfig, Request, SamplingParams, cache_size


def with_memory(monkeypatch: pytest.MonkeyPatch, limit: int, held: int = 100_000) -> None:
    """A CPU with so much memory, of which so much is held: by the weights, or by others too."""
    here = [dataclasses.replace(device, memory_limit_bytes=limit) for device in devices.attached()]
    monkeypatch.setattr(cache_size, "attached", lambda: here)
    monkeypatch.setattr(cache_size, "_free_of_host", lambda: limit - held)


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
    working = cache_size.working_bytes(model_of("attention").config, EngineConfig(**CONFIG), 64, page, "float32")
    with_memory(monkeypatch, 4 * (100_000 + working + (40 + 1) * page) // 3 + 1)  # one for what is written nowhere
    less = size(memory_share=0.75)
    assert (less.pages, less.limited_by, less.longest_sequences) == (40, "memory", 2)
    assert "as much as memory_share of the device leaves" in str(less)
    assert (size(pages=5).pages, size(pages=5).limited_by) == (5, "pages")
    with_memory(monkeypatch, 4 * (100_000 + working + (10 + 1) * page) // 3 + 1)
    with pytest.raises(ValueError, match=r"room for 40 tokens beside the weights.*max_length=40"):
        size(memory_share=0.75)


def test_what_others_hold_of_a_hosts_memory_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    page = size().page_bytes
    working = cache_size.working_bytes(model_of("attention").config, EngineConfig(**CONFIG), 64, page, "float32")
    whole = 100_000_000
    with_memory(monkeypatch, whole, held=int(0.85 * whole) - working - (20 + 1) * page)
    assert size().pages == 4 * 16, "half of what is free"
    with_memory(monkeypatch, whole, held=whole - 2 * (working + (30 + 1) * page))
    assert (size().pages, size().limited_by) == (30, "memory")
    with_memory(monkeypatch, whole, held=whole)
    with pytest.raises(ValueError, match="room for 0 tokens beside the weights"):
        size()


def test_the_counts_of_penalties_have_their_place(programs: Path) -> None:
    """They are made when a request first brings a penalty: by then all other memory is pages."""
    model = model_of("attention").config
    one, two = (
        cache_size.working_bytes(model, EngineConfig(**{**CONFIG, "max_sequences": n}), 64, 1, "float32")
        for n in (1, 2)
    )
    logits = 3 * model.vocab * 4
    engine = engine_of(model_of("attention"), programs)
    counts = engine.runner._counts_of_slots()
    assert two - one == logits + sum(leaf.nbytes for leaf in counts) // CONFIG["max_sequences"]


@pytest.mark.quick
def test_a_step_holds_its_widest_products_and_the_logits() -> None:
    model, config = model_of("attention").config, EngineConfig(**CONFIG)
    # Gate and up of the mlp, 48 each, side by side; queries, keys and values are 32 + 16 + 16, the way out 32.
    # A word's logit thrice in four bytes; and for penalties a count of four bytes and whether the prompt has it.
    layers, words = 4 * 32 * (2 * 48) * 4, 4 * model.vocab * (3 * 4 + 5)
    assert cache_size.working_bytes(model, config, 64, 1, "float32") == layers + words
    # Two of four experts, 32 wide each.
    mixture = model_of("moe").config
    assert cache_size.working_bytes(mixture, config, 64, 1, "float32") == 4 * 32 * (3 * 32) * 4 + words


def test_a_device_that_is_not_here_has_the_bytes_that_are_said() -> None:
    config = EngineConfig(**{**CONFIG, "pages": None, "memory_share": 0.5})
    model = model_of("attention").config
    sized = {"max_length": 64, "dtype": "float32", "weight_bytes": 100_000}
    page = cache_size.cache_size(model, config, **sized).page_bytes
    working = cache_size.working_bytes(model, config, 64, page, "float32")
    needed = 100_000 + working + (20 + 1) * page
    assert cache_size.cache_size(model, config, **sized, device_bytes=2 * needed).pages == 20
    with pytest.raises(ValueError, match="holds one sequence"):
        cache_size.cache_size(model, config, **sized, device_bytes=2 * (needed - 5 * page))


def test_an_engine_has_as_many_pages_as_it_says(programs: Path) -> None:
    engine = engine_of(model_of("attention"), programs, pages=None)
    assert engine.cache_size.pages == engine.stats().pages == engine.runner.pages == 64


def test_pages_of_8_bit_numbers_hold_more_and_change_little(programs: Path) -> None:
    model = model_of("attention")
    wide, narrow = engine_of(model, programs), engine_of(model, programs, cache_dtype="int8")
    # A key of a head: 8 numbers and a scale, for 8 float32.
    assert narrow.cache_size.page_bytes / wide.cache_size.page_bytes == (8 + 4) / 32
    prompts = prompts_of(5, 16, 30)
    asked = SamplingParams(max_tokens=3, logprobs=20, **GREEDY)
    chances = []
    for engine in (wide, narrow):
        outputs = run(engine, [Request(str(n), prompt, asked) for n, prompt in enumerate(prompts)])
        # Of the tokens after the prompt, whose contexts are the same in both.
        first = [dict(each[0].logprobs[0].top) for each in outputs.values() if each[0].logprobs]
        chances.append(first)
    off = [abs(a[t] - b[t]) for a, b in zip(*chances, strict=True) for t in a if t in b]
    assert len(off) > 40
    # An eighth bit is lost of keys and values: a hundredth of them, and of what comes of them in two layers.
    assert 0 < max(off) < 0.05


def test_pages_of_8_bit_numbers_are_shared_and_copied_like_others(programs: Path) -> None:
    for name in ("attention", "hybrid"):
        engine = engine_of(model_of(name), programs, cache_dtype="int8")
        prompts = prompts_of(16, 16)
        once = answers(engine, prompts)
        assert answers(engine, prompts) == once
        assert (engine.stats().prefix_hits > 0) == (name == "attention")
