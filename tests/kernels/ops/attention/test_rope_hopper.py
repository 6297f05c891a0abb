"""The Hopper kernel of rope: its numbers by emulation, how heads are cut, what it refuses, and that it waits."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.kernels.pallas import hopper_emulator as emulator

from capibara.kernels import Rope, attention, explain, rope, rope_tables, target, trust
from capibara.kernels.core.dispatch import recording
from capibara.kernels.core.spec import Case
from capibara.kernels.lab.check import check_output, cotangents, expected, with_gradient
from capibara.kernels.ops.attention.rope.api import ROPE
from capibara.kernels.ops.attention.rope.cases import case
from capibara.kernels.ops.attention.rope.hopper import forward
from capibara.kernels.ops.attention.rope.hopper.forward import TurnConfig, candidates, cut_of, rope_hopper

NONE: frozenset[str] = frozenset()
H200 = "NVIDIA H200"
SMALL = [one for one in ROPE.cases if {"test", "gpu"} <= one.tags]


def _normal(seed: int, *shape: int, dtype: Any = "float32") -> Any:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32)).astype(dtype)


@contextlib.contextmanager
def on_emulated_h200() -> Iterator[None]:
    """Calls of the op itself, and none of them kept: what JAX has traced would run as it was traced."""
    ROPE.runners.clear()
    with target("gpu", H200), emulator.emulated(forward):
        yield
    ROPE.runners.clear()


@pytest.mark.quick(cases=4)
@pytest.mark.parametrize(
    ("case", "config"),
    [
        # The last positions and the last heads are turned twice.
        (case("both-ends", (2, 37, 6, 128), NONE), TurnConfig(4, 8)),
        (case("both-ends-bhtd", (2, 37, 6, 128), NONE, layout="bhtd"), TurnConfig(4, 8)),
        # Sequences of fewer positions than a program's, which are taken together.
        (case("a-token-each", (33, 1, 2, 64), NONE, own=True), TurnConfig(2, 8)),
        (case("rest", (1, 70, 3, 96), NONE, rotary=64), TurnConfig(3, 4)),
        (case("a-rest-as-long-as-a-half", (1, 40, 2, 96), NONE, rotary=64, own=True, layout="bhtd"), TurnConfig(1, 8)),
        (case("five-vectors-a-thread", (1, 130, 2, 80), NONE), TurnConfig(1, 8)),
        (case("narrow", (1, 9, 2, 64), NONE, dtype="float16"), TurnConfig(2, 2)),
        (case("float32", (2, 19, 3, 128), NONE, dtype="float32"), TurnConfig(2, 4)),
    ],
    ids=lambda x: getattr(x, "name", None),
)
def test_emulated(case: Case, config: TurnConfig) -> None:
    params = {"style": "half", "layout": "bthd", **case.params}
    with emulator.emulated(forward):
        made = jax.jit(functools.partial(rope_hopper, config=config, **params))(*case.arrays())
        result = check_output(made, expected(ROPE, case.arrays(), case.params))
    assert result.ok, result.why


@pytest.mark.parametrize("case", SMALL, ids=lambda one: one.name)
def test_every_config_of_a_small_case(case: Case) -> None:
    wanted = expected(ROPE, case.arrays(), case.params)
    with target("gpu", H200):
        configs = candidates(ROPE.call(*case.args(), **case.params))
    params = {"style": "half", "layout": "bthd", **case.params}
    assert configs
    for config in configs:
        with emulator.emulated(forward):
            made = jax.jit(functools.partial(rope_hopper, config=config, **params))(*case.arrays())
            result = check_output(made, wanted)
        assert result.ok, f"{config}: {result.why}"


@pytest.mark.quick(cases=2)
@pytest.mark.parametrize("name", ["not-whole-blocks", "part-of-a-head", "own-positions"])
def test_gradients(name: str) -> None:
    """Of x and of the angles, which are operands like others to who calls the op."""
    one = ROPE.case(name)
    arrays, flows = one.arrays(), cotangents(ROPE, one.arrays(), one.params)
    wanted = expected(ROPE, arrays, one.params, grad=True)
    with on_emulated_h200():
        call = with_gradient(functools.partial(ROPE, implementation="hopper", **one.params))
        with recording() as found:
            got = jax.block_until_ready(jax.jit(call)(flows, *arrays))
    (*there, back) = found
    assert there
    assert {one.implementation for one in found} == {"hopper"}, "the kernel turns it, and turns the gradient back"
    assert back.call.args == there[0].call.args
    result = check_output(got, wanted)
    assert result.ok, result.why


@pytest.mark.quick
@pytest.mark.parametrize("given", ["nothing", "positions", "tables", "learned tables"])
def test_what_the_backward_pass_keeps(given: str) -> None:
    x, tables = _normal(0, 2, 32, 4, 64, dtype="bfloat16"), rope_tables(40, 64)
    asked: dict[str, Any] = {} if given == "nothing" else {"positions": jnp.arange(32)}
    if "tables" in given:
        asked["tables"] = tables if given == "tables" else jax.tree.map(jnp.asarray, tables)
    with on_emulated_h200():
        _, pull = jax.vjp(lambda x: rope(x, implementation="hopper", **asked), x)
        (back,) = jax.block_until_ready(pull(x))
    _, as_ever = jax.vjp(lambda x: rope(x, **asked), x)
    # The same products and sums, which a compiler may round together.
    np.testing.assert_allclose(back.astype("float32"), as_ever(x)[0].astype("float32"), rtol=2.0**-7, atol=1e-6)
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves(pull))
    angles = 2 * 32 * 32 * 4
    assert kept == (angles + x.nbytes if given == "learned tables" else angles)


@pytest.mark.quick(cases=2)
@pytest.mark.parametrize("layout", ["bthd", "bhtd"])
@pytest.mark.parametrize("over", ["x", "positions", "both", "x of shared positions"])
def test_vmap(over: str, layout: str) -> None:
    def turned(x: Any, positions: Any, **asked: Any) -> Any:
        x = x if layout == "bthd" else x.swapaxes(1, 2)
        return rope(x, positions, layout=layout, **asked)

    x, positions = _normal(1, 3, 2, 8, 2, 64), jnp.arange(48).reshape(3, 2, 8)
    axes = {"x": (0, None), "positions": (None, 0), "both": (0, 0), "x of shared positions": (0, None)}[over]
    given = (x if axes[0] == 0 else x[0], positions if axes[1] == 0 else positions[0])
    given = (x, positions[0, 0]) if over == "x of shared positions" else given
    wanted = jax.vmap(turned, axes)(*given)
    with on_emulated_h200():
        made = jax.block_until_ready(
            jax.jit(jax.vmap(functools.partial(turned, implementation="hopper"), axes))(*given)
        )
    np.testing.assert_allclose(made, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"style": "interleaved"}, "the style half"),
        ({"sizes": (1, 1, 4, 64)}, "8 positions or more, and here are 1"),
        ({"sizes": (1, 64, 4, 66)}, "66 with 66 turned"),
        ({"sizes": (1, 0, 4, 64)}, "empty"),
        ({"dtype": "float64"}, "not float64"),
        ({"kind": "NVIDIA A100-SXM4-80GB"}, "Hopper"),
    ],
)
def test_what_it_refuses(given: dict[str, Any], why: str) -> None:
    batch, length, heads, depth = given.get("sizes", (1, 64, 4, 64))
    x = jax.ShapeDtypeStruct((batch, length, heads, depth), given.get("dtype", "bfloat16"))
    angles = jax.ShapeDtypeStruct((length, depth // 2), "float32")
    with target("gpu", given.get("kind", H200)):
        call = ROPE.call(x, angles, angles, style=given.get("style", "half"))
        assert why in str(forward.IMPLEMENTATION.refusal(call))


@pytest.mark.quick
@pytest.mark.parametrize("depth", range(64, 257, 16))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_heads_of_every_usual_size_are_taken(depth: int, dtype: str) -> None:
    angles = jax.ShapeDtypeStruct((512, depth // 2), "float32")
    for layout, shape in (("bthd", (2, 512, 8, depth)), ("bhtd", (2, 8, 512, depth))):
        x = jax.ShapeDtypeStruct(shape, dtype)
        with target("gpu", H200):
            call = ROPE.call(x, angles, angles, layout=layout)
            assert forward.IMPLEMENTATION.refusal(call) is None
            best, *_ = candidates(call)
        cut = cut_of(depth, depth // 2, best.vector, x.dtype.itemsize)
        assert cut is not None
        assert cut.positions * cut.half % (128 * best.vector) == 0
        if dtype != "float32":
            assert best.heads >= 2, "angles are read for several heads"


@pytest.mark.quick
def test_it_waits_until_it_is_timed() -> None:
    x = jax.ShapeDtypeStruct((4, 4096, 32, 128), jnp.bfloat16)
    for level in ("measured", "predicted"):
        with target("gpu", H200), trust(level):
            (taken,) = explain(rope, x).selections
            assert taken.implementation == "xla"
            assert "not hopper: it accepts" in str(taken)
            (asked,) = explain(functools.partial(rope, implementation="hopper"), x).selections
            assert asked.implementation == "hopper"


@pytest.mark.quick
def test_attention_says_what_turned_its_queries_and_keys() -> None:
    x = jnp.ones((1, 16, 2, 8))
    found = explain(lambda x: attention(x, x, x, rope=Rope()), x).selections
    assert [one.call.op.name for one in found] == ["rope", "rope", "attention"]


@pytest.mark.quick
def test_a_config_that_does_not_fit_is_the_caller_s_mistake() -> None:
    x = _normal(2, 1, 8, 4, 64)
    with target("gpu", H200), pytest.raises(ValueError, match="vector divides"):
        jax.eval_shape(functools.partial(rope, implementation="hopper", config=TurnConfig(8, 4)), x)
    with pytest.raises(ValueError, match="vector is 8, 4 or 2"):
        TurnConfig(4, 3)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("operands", "says"),
    [
        (((1, 4, 2, 8), (4, 5), (4, 5)), "1 pair to all"),
        (((1, 4, 2, 8), (5, 4), (5, 4)), r"\[4, pairs\]"),
        (((1, 4, 2, 8), (4, 4), (4, 3)), r"\[4, pairs\]"),
        (((1, 4, 2), (4, 4), (4, 4)), "four axes"),
    ],
)
def test_operands_that_do_not_belong_together(operands: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ROPE(*(jnp.ones(shape) for shape in operands))
    with pytest.raises(ValueError, match="float32"):
        ROPE(jnp.ones((1, 4, 2, 8)), *(jnp.ones((4, 4), "bfloat16"),) * 2)
