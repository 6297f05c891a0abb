"""A model warmed up: each shape once, smallest first, counted; quiet where nobody looks."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import pytest

from capibara.compile import model_warmup
from capibara.compile.events import count_compilations
from capibara.compile.model_warmup import TpuWarmupManager
from capibara.models import ModularCapibaraModel, load_preset


@pytest.mark.quick
def test_each_shape_is_compiled_once_and_then_ready(capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[tuple[int, ...]] = []
    model = jax.jit(lambda x: calls.append(x.shape) or x.sum(-1))
    manager = TpuWarmupManager(compilation_cache_size_gb=2.0, warmup_steps=3, progressive_warmup=True)
    done = manager.warmup_model(model, [(8, 4), (2, 4), (8, 4)], batch_sizes=[[8, 1], 2, 8])
    assert [row.shape for row in done.shapes] == [(1, 4), (2, 4), (8, 4)]
    assert calls == [(1, 4), (2, 4), (8, 4)]
    assert [(row.compiled, row.from_disk) for row in done.shapes] == [(1, 0)] * 3
    assert all(row.seconds > row.run_seconds > 0 for row in done.shapes)
    assert "3 compiled" not in str(done)
    assert str(done).count("1 compiled, 0 from disk") == 3
    with count_compilations() as counts:
        model(jnp.ones((8, 4)))
    assert "jit(<lambda>)" not in counts.names
    assert capsys.readouterr() == ("", "")  # no terminal, no bar


def test_order_steps_and_size_are_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(
        model_warmup,
        "persistent_cache",
        lambda max_bytes: asked.append(max_bytes) or model_warmup.PersistentCache(None, max_bytes, 1, "off"),
    )
    runs: list[int] = []

    class Model:
        def __call__(self, x: jax.Array) -> jax.Array:
            runs.append(x.shape[0])
            return x

    done = TpuWarmupManager(0.5, warmup_steps=0, progressive_warmup=False).warmup_model(Model(), [(4, 2), (3, 2)])
    assert [row.shape for row in done.shapes] == [(4, 2), (3, 2)]
    assert runs == [4, 3]
    assert math.isnan(done.shapes[0].run_seconds)
    TpuWarmupManager(0.5, warmup_steps=2, progressive_warmup=True).warmup_model(Model(), [(4, 2), (3, 2)])
    assert runs[2:] == [3, 3, 3, 4, 4, 4]
    assert asked == [500_000_000, 500_000_000]


def test_a_model_of_tokens_gets_tokens() -> None:
    model = ModularCapibaraModel(load_preset("dev").model)
    done = TpuWarmupManager(warmup_steps=0).warmup_model(model, [(1, 8)], batch_sizes={(1, 8): [1, 2]})
    assert [(row.dtype, row.shape) for row in done.shapes] == [("int32", (1, 8)), ("int32", (2, 8))]


def test_a_terminal_sees_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    TpuWarmupManager(warmup_steps=0).warmup_model(jax.jit(jnp.tanh), [(2, 2), (3, 2)])
    assert "2/2" in capsys.readouterr().err


def test_what_is_refused() -> None:
    manager = TpuWarmupManager(warmup_steps=0)
    with pytest.raises(ValueError, match="an entry, a number or several, for each of input_shapes"):
        manager.warmup_model(jnp.tanh, [(2, 2)], batch_sizes=[1, 2])
    with pytest.raises(ValueError, match="A shape is a tuple"):
        manager.warmup_model(jnp.tanh, ["2x2"])
    with pytest.raises(ValueError, match="a whole number of 1 or more"):
        manager.warmup_model(jnp.tanh, [(2, 2)], batch_sizes=[0])
    with pytest.raises(ValueError, match="shapes of input_shapes"):
        manager.warmup_model(jnp.tanh, [(2, 2)], batch_sizes={(3, 3): [1]})
    with pytest.raises(ValueError, match="called with an array"):
        manager.warmup_model("model", [(2, 2)])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="compilation_cache_size_gb is above 0"):
        TpuWarmupManager(compilation_cache_size_gb=0)
    with pytest.raises(ValueError, match="warmup_steps is 0 or more"):
        TpuWarmupManager(warmup_steps=-1)
