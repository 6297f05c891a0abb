"""Levels are real options: each platform's compiler takes them, and what it refuses is left out and said once."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from capibara.compile import options
from capibara.compile.options import ASYNC_COLLECTIVES, LEVELS, MEMORY, compiler_options

PAGE = Path(__file__).parents[2] / "docs" / "compilation.md"


def lowered() -> Any:
    x = jax.ShapeDtypeStruct((32, 32), jnp.float32)
    return jax.jit(lambda x: jnp.exp(jnp.tanh(x @ x) * x).sum(0)).lower(x)


@pytest.mark.quick
def test_levels_make_other_machine_code() -> None:
    program = lowered()
    sizes = {
        level: len(program.compile(compiler_options=compiler_options(level)).runtime_executable().serialize())
        for level in ("none", "basic", "balanced")
    }
    assert len(set(sizes.values())) == 3, sizes
    assert "aggressive" in LEVELS["cpu"]


def test_every_option_of_every_platform_is_known_here_or_has_another_spelling() -> None:
    """A CPU's compiler knows the names of all but the TPU's own options, whatever it makes of them."""
    device = jax.devices()[0]
    wishes = [wish for table in (*LEVELS.values(),) for wishes in table.values() for wish in wishes] + [
        wish for table in (ASYNC_COLLECTIVES, MEMORY) for wishes in table.values() for wish in wishes
    ]
    ours = [wish for wish in wishes if not re.match(r"xla_(tpu|jf|enable_async)", wish.name)]
    assert len(ours) >= 10
    assert [wish.name for wish in ours if options._accepted(wish, device) is None] == []


@pytest.mark.quick
def test_what_is_refused_is_left_out_and_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, nothing_said_yet: None
) -> None:
    wishes = (
        options._wish("everything is faster", xla_no_such_option=True),
        options.Wish((("xla_no_such_either", 1), ("xla_backend_optimization_level", 1)), "less is done"),
    )
    monkeypatch.setitem(LEVELS["cpu"], "basic", wishes)
    with caplog.at_level(logging.WARNING):
        assert compiler_options("basic") == {"xla_backend_optimization_level": 1}
        assert compiler_options("basic") == {"xla_backend_optimization_level": 1}
    (said,) = caplog.messages
    assert "everything is faster" in said
    assert "xla_no_such_option" in said
    lowered().compile(compiler_options=compiler_options("basic"))


def test_a_cpu_has_no_collectives_to_overlap(caplog: pytest.LogCaptureFixture, nothing_said_yet: None) -> None:
    with caplog.at_level(logging.WARNING):
        assert compiler_options("balanced", async_collectives=True) == {}
        compiler_options("balanced", async_collectives=True)
    (said,) = caplog.messages
    assert "changes nothing on a CPU" in said


def test_an_unknown_level_names_the_choices() -> None:
    with pytest.raises(ValueError, match="Did you mean 'aggressive'"):
        compiler_options("agressive")  # type: ignore[arg-type]


@pytest.mark.quick
def test_the_page_has_every_option() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for table in (*LEVELS.values(), ASYNC_COLLECTIVES, MEMORY):
        for wishes in table.values():
            for wish in wishes:
                assert f"`{wish.name}={wish.spellings[0][1]}`" in text, wish
                assert wish.does in text, wish


@pytest.mark.tpu_compiler
def test_a_tpu_takes_them_and_its_programs_differ() -> None:
    """By the real compiler, for a slice that is not here; nothing runs."""
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from capibara.hardware import topology

    devices = topology.abstract_devices(topology.slice_by_name("v4-8"))
    mesh = Mesh(np.array(devices), ("model",))

    def place(*axes: str | None) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*axes))

    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        y = jax.nn.gelu(x @ w)
        return (jax.lax.with_sharding_constraint(y, place(None, None)) @ w.T).astype(jnp.float32).sum()

    shapes = [
        jax.ShapeDtypeStruct((512, 512), jnp.bfloat16, sharding=sharding)
        for sharding in (place("model", None), place(None, "model"))
    ]
    program = jax.jit(jax.grad(step, argnums=1)).lower(*shapes)

    def text(**asked: Any) -> str:
        chosen = compiler_options(asked.pop("level", "balanced"), device=devices[0], **asked)
        return re.sub(r"metadata=\{[^}]*\}", "", program.compile(compiler_options=chosen).as_text())

    texts = {level: text(level=level) for level in ("none", "basic", "balanced", "aggressive")}
    assert texts["none"] != texts["basic"] != texts["balanced"]
    assert text(async_collectives=True).count("-start(") > texts["balanced"].count("-start(")
    assert len(compiler_options("aggressive", memory=True, async_collectives=True, device=devices[0])) == 5
