"""Predicted step times: of the engine's own programs, by what a step reads."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import pytest
from tests.serve.engines import MODELS

from capibara.cost.estimate import estimate
from capibara.models.config import ModularModelConfig
from capibara.plan.place import place
from capibara.program.spreading import spread
from capibara.program.tracing import trace
from capibara.serve import EngineConfig
from capibara.serve.prediction.served import ServedModel, served_model
from capibara.serve.prediction.step_times import StepTimes, Tokens
from capibara.serve.programs import Shape, StepPrograms, decode_fields

CONFIG = EngineConfig(max_sequences=4, max_batch_tokens=64, page_size=16)


def served(name: str = "attention", **changes: Any) -> ServedModel:
    sizes: dict[str, Any] = {"hidden": 64, "layers": 2, "vocab": 512, "max_length": 4096, **MODELS[name], **changes}
    return ServedModel(name, ModularModelConfig(**sizes), "bfloat16")


def times_of(model: ServedModel, on: str = "h200", config: EngineConfig = CONFIG, **changes: Any) -> StepTimes:
    return StepTimes(model, config, place(on), **{"pages": 512, "max_length": 1024, **changes})


@pytest.mark.quick
def test_a_step_reads_the_pages_that_are_there_and_not_those_that_a_table_has_room_for() -> None:
    model = served()
    times = times_of(model)
    shape = times.decode_shape(4)
    length = [times.seconds(shape, [Tokens(1, keys)] * 4) for keys in (160, 320, 480)]
    # 10 pages more of 4 sequences, keys and values of 2 heads of 16 in both layers, at 0.72 of 4.8 TB/s.
    more = 10 * 4 * 16 * (2 * 2 * 16 * 2) * 2 / (0.72 * 4.8e12)
    assert length[1] - length[0] == pytest.approx(more, rel=1e-3)
    assert length[2] - length[1] == pytest.approx(more, rel=1e-3)
    # Sequences that are not there are padding: their rows are multiplied, and no page of theirs is read.
    assert times.seconds(shape, [Tokens(1, 160)]) < length[0]
    wide = times_of(model, pages=2048, max_length=4096)
    assert wide.seconds(wide.decode_shape(4), [Tokens(1, 160)] * 4) == pytest.approx(length[0], rel=1e-3)


def test_a_window_is_read_and_no_more() -> None:
    step = Tokens(2, 100)
    assert (step.pages(16, None), step.pairs(None)) == (7, 99 + 100)
    # Keys 94 to 99 are in sight of one or the other.
    assert (step.pages(16, 5), step.pairs(5)) == (2, 10)
    first = Tokens(6, 6)
    assert (first.pairs(None), first.pairs(4)) == (21, 1 + 2 + 3 + 4 + 4 + 4)
    times = times_of(served("window"))
    shape = times.decode_shape(4)
    assert times.seconds(shape, [Tokens(1, 64)] * 4) == times.seconds(shape, [Tokens(1, 1024)] * 4)


def test_depth_is_told_by_two_repetitions() -> None:
    times = times_of(served(layers=6))
    shape = Shape(64, 4, 64, 4)
    whole = times._repetitions(shape, 6)
    assert times.priced(shape).seconds == pytest.approx(whole.seconds, rel=0.02)
    assert len(whole.attention) == 1
    assert sum(part.bytes for part in times.priced(shape).parts) == pytest.approx(
        sum(part.bytes for part in whole.parts), rel=0.02
    )


def test_several_steps_in_one_program_are_so_many_steps() -> None:
    """The engine's own loop over steps, traced whole."""
    times = times_of(served())
    shape = times.decode_shape(4)._replace(steps=8)
    model = times.served.config
    _, args = times._program(model, shape._replace(steps=1))
    programs = StepPrograms(model, times.dtype, model.vocab, longest=lambda shape: 1)
    said = jax.ShapeDtypeStruct((decode_fields(shape).size,), "int32")
    layout = times.placement.layout(model, args, times.where)
    traced = trace(
        programs.several(shape, "greedy"), (*args[:2], said), donate=(1,), roles=("params", "other", "batch"),
        device_kind="NVIDIA H200", share_repeats=True,
    )  # fmt: skip
    looped = estimate(spread(traced, layout), layout.mesh, times.where).seconds
    # In the loop attention is counted for all pages of the pool: the same here.
    alone = [Tokens(1, 16 * times.pages // 4)] * 4
    assert times.seconds(shape, alone) == pytest.approx(looped, rel=0.1)


def test_chips_of_one_engine_share_weights_and_heads() -> None:
    model = served(hidden=1024, blocks={"attention": {"heads": 8, "kv_heads": 4}, "mlp": {"ffn": 4096}})
    one, two = times_of(model), times_of(model, "h200x2", tensor_parallel=2)
    shape = one.decode_shape(4)
    apart, together = one.priced(shape), two.priced(shape)
    assert (apart.link_seconds, together.link_seconds > 0) == (0, True)
    assert together.attention[0].page_seconds == pytest.approx(apart.attention[0].page_seconds / 2)
    whole, half = (sum(part.bytes for part in priced.parts) for priced in (apart, together))
    assert half == pytest.approx(whole / 2, rel=0.1)
    own, loaded = two.placement.weight_bytes()
    assert own == pytest.approx(one.placement.weight_bytes()[0] / 2, rel=0.01)
    assert loaded == own  # in the type that is computed in


def test_8_bit_weights_are_read_as_such_and_8_bit_pages_are_widened_by_the_table() -> None:
    model = served(hidden=512, blocks={"attention": {"heads": 4, "kv_heads": 2}, "mlp": {"ffn": 4096}})
    plain, narrow = times_of(model), times_of(model, config=dataclasses.replace(CONFIG, weights="int8"))
    shape = plain.decode_shape(1)
    reads = [sum(part.bytes for part in times.priced(shape).parts) for times in (plain, narrow)]
    assert reads[1] < 0.6 * reads[0]
    pages = times_of(model, config=dataclasses.replace(CONFIG, cache_dtype="int8"))
    few, many = (sum(part.bytes for part in pages.priced(shape._replace(pages=width)).parts) for width in (4, 64))
    # Of keys and values of 256 numbers in both layers: 8 bits are read, and 16 written.
    assert many - few >= 60 * 16 * 256 * 2 * 2 * (1 + 2)


@pytest.mark.parametrize("name", ["moe", "hybrid"])
def test_other_blocks_have_times_too(name: str) -> None:
    times = times_of(served(name, **({"layers": 3} if name == "hybrid" else {})))
    for shape, step in ((times.decode_shape(4), [Tokens(1, 64)] * 4), (Shape(64, 4, 64, 4), [Tokens(60, 60)])):
        low, mid, high = (times.seconds(shape, step, level) for level in ("high", "mid", "low"))
        assert 0 < low <= mid <= high


def test_the_1b_llama_on_an_h200_is_below_what_its_bandwidth_allows_and_near_it() -> None:
    times = times_of(served_model("llama-1b"), config=EngineConfig(), pages=4096, max_length=768)
    priced = times.priced(times.decode_shape(1))
    # Weights but for the table of embeddings, of which a row is read: 1.07 G numbers of 2 bytes.
    read = 2 * (16 * (2048 * 4096 + 2048 * 2048 + 3 * 2048 * 8192) + 2048 * 32000)
    assert sum(part.bytes for part in priced.parts) == pytest.approx(read, rel=0.01)
    step = times.seconds(times.decode_shape(1), [Tokens(1, 576)])
    # 0.46 ms is the bandwidth of the memory; the engine was seen to take 1.46 ms a token once, before this was there.
    assert 0.53e-3 < step < 2e-3
    # Keys and values of 256 contexts are 9.7 GB more: 2 ms at the least.
    assert 256 / times.seconds(times.decode_shape(256), [Tokens(1, 576)] * 256) < 83_000


@pytest.mark.quick
def test_attention_is_not_traced_into(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel would take as long as all else of a program, and nothing of it would be read."""

    def entered(*args: Any, **options: Any) -> None:
        raise AssertionError("the kernel is traced")

    monkeypatch.setattr("capibara.kernels.ops.attention.paged.hopper.forward._kernel", entered)
    times = times_of(served_model("llama-1b"), pages=517)
    shape = times.decode_shape(4)
    assert times.anatomy(shape, [Tokens(1, 100)] * 4)["paged_attention"] > 0
