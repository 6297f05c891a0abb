"""Tables of attention that is not one kernel: which buffers they are, and how many of them a chip may hold."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from capibara.cost.estimate import estimate
from capibara.cost.fusion import fuse
from capibara.cost.result import Memory
from capibara.cost.tables import tables
from capibara.hardware.topology import slice_by_name
from capibara.mesh.layout import Layout
from capibara.mesh.mesh import MeshConfig
from capibara.program import spread, trace
from capibara.program.chip import ChipProgram

LENGTH, HEADS, WIDE, VOCAB = 4096, 4, 64, 8192
SCORES = HEADS * LENGTH * LENGTH
MESH = MeshConfig((4, 1))


def _mixed(kind: str, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    if kind in ("plain", "grouped"):
        heads = 2 if kind == "grouped" else HEADS
        return jax.nn.dot_product_attention(q, k[:, :, :heads], v[:, :, :heads])
    wanted = None if kind == "converted" else jnp.float32
    scores = jnp.einsum("btnd,bsnd->bnts", q, k, preferred_element_type=wanted).astype(jnp.float32)
    scores = jnp.tanh(scores) if kind == "capped" else scores
    return jnp.einsum("bnts,bsnd->btnd", jax.nn.softmax(scores).astype(v.dtype), v)


def _layer(kind: str, x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    q, k, v = (jnp.einsum("bth,hnd->btnd", x, w[name].astype(x.dtype)) for name in ("q", "k", "v"))
    return x + jnp.einsum("btnd,ndh->bth", _mixed(kind, q, k, v), w["o"].astype(x.dtype))


def _forward(params: Any, x: jax.Array, dtype: str = "bfloat16", kind: str = "plain") -> jax.Array:
    layer = jax.checkpoint(functools.partial(_layer, kind))
    return jax.lax.scan(lambda c, w: (layer(c, w), None), x.astype(dtype), params["layers"])[0]


def _loss(params: Any, x: jax.Array, **how: Any) -> jax.Array:
    scores = (_forward(params, x, **how) @ params["out"].astype(jnp.bfloat16)).astype(jnp.float32)
    return jnp.mean(jax.nn.logsumexp(scores, axis=-1))


def _step(params: Any, x: jax.Array, **how: Any) -> Any:
    gradients = jax.grad(functools.partial(_loss, **how))(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)


def _chip(fn: Any) -> ChipProgram:
    """One chip's program; nothing is split, so that each holds one row's tables."""
    f32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    inner = {name: f32((2, HEADS * WIDE, HEADS, WIDE)) for name in "qkv"}
    params = {"layers": {**inner, "o": f32((2, HEADS, WIDE, HEADS * WIDE))}, "out": f32((HEADS * WIDE, VOCAB))}
    args = (params, f32((1, LENGTH, HEADS * WIDE)))
    traced = trace(fn, args, donate=(0,) if fn is not _forward else (), roles=("params", "batch"), device_kind="TPU v4")
    return spread(traced, Layout(MESH, (P(),) * len(jax.tree.leaves(args)), {}))


def _memory(fn: Any) -> Memory:
    return estimate(_chip(fn), MESH, slice_by_name("v4-8")).memory


def test_tables_are_the_scores_and_what_is_made_of_them() -> None:
    program = _chip(_step)
    found = [program.buffers[id] for id in tables(program, *fuse(program)).all]
    assert found
    # Forward: scores, exponentials. Backward: those again, the softmax, and the gradients of both; no logits, which a
    # weight has a part in, and no weight's gradient, which no product reads.
    assert {_numbers(one.shape) for one in found} == {SCORES}
    assert len(found) >= 6


def _numbers(shape: tuple[int, ...]) -> int:
    return functools.reduce(lambda a, b: a * b, shape, 1)


@pytest.mark.parametrize(
    ("how", "low", "high"),
    [
        # In bytes of scores in float32: the exponentials, and in bfloat16 the gradients of the softmax and of the
        # scores, 1 + 1/2 + 1/2; the compiler took 2.0 of the same at 16 heads and 2.5, the softmax too, when grouped.
        ({}, 2.0, 2.5),
        ({"kind": "grouped"}, 2.0, 2.5),
        # The softmax's gradient is float32 then; the compiler took 2.5.
        ({"dtype": "float32"}, 2.5, 3.0),
        # Kept as the product wrote them, in bfloat16, and not as float32 exponentials; or those as well.
        ({"kind": "converted"}, 1.5, 2.5),
        # Neither a tanh of them nor the exponentials are kept beside the scores; or both.
        ({"kind": "capped"}, 2.0, 3.5),
    ],
)
def test_what_a_backward_pass_holds_of_them(how: dict[str, Any], low: float, high: float) -> None:
    memory = _memory(functools.partial(_step, **how))
    tables = sum(size for _, size in memory.largest if size >= 2.0 * SCORES)
    assert tables == low * 4.0 * SCORES
    assert memory.unsure == pytest.approx((high - low) * 4.0 * SCORES, rel=0.1)


def test_a_loss_that_is_told_last_may_keep_the_logits() -> None:
    def step(params: Any, x: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            scores = (_forward(params, x) @ params["out"].astype(jnp.bfloat16)).astype(jnp.float32)
            return jnp.mean(jax.nn.logsumexp(scores, axis=-1) - scores[..., 7])

        value, gradients = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    # Half a table more, the softmax, and the logits, which the program keeps in bfloat16.
    logits = 2.0 * LENGTH * VOCAB
    assert _memory(step).unsure == pytest.approx(2.0 * SCORES + logits, rel=0.1)


def test_a_program_without_them_has_no_more_than_the_margin() -> None:
    def step(params: Any, x: jax.Array) -> Any:
        return jnp.tanh(x @ params["out"]) @ params["out"].T

    memory = _memory(step)
    assert memory.unsure == 0
    assert memory.most == pytest.approx(1.08 * memory.total)


def test_a_forward_pass_may_hold_the_scores_and_their_exponentials() -> None:
    """The compiler wrote them beside each other in some programs, and computed them again in others."""
    memory = _memory(_forward)
    assert sum(size for _, size in memory.largest if size >= 2.0 * SCORES) == 4.0 * SCORES
    assert memory.unsure == pytest.approx(4.0 * SCORES, rel=0.1)
