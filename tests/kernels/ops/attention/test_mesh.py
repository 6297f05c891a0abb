"""Attention on a mesh of 8 virtual devices: the rules that stand in for a kernel, and the chunked form by XLA.

The kernels of this test are the reference made opaque: JAX sees nothing of what is inside, so the op's own gradient,
batching and mesh rules do all the work, as for a Pallas kernel.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from capibara.kernels import attention, explain
from capibara.kernels.core.op import Op
from capibara.kernels.core.spec import Gradient, Implementation
from capibara.kernels.ops.attention import gradient, mesh, rules
from capibara.kernels.ops.attention.api import ATTENTION, ATTENTION_GRAD
from capibara.kernels.ops.attention.reference import reference, reference_grad


def _opaque() -> Op:
    shared = {"family": "attention", "batch": mesh.batch, "hints": ATTENTION.hints}
    backward = Op(
        "opaque_grad", reference=reference_grad, operands=ATTENTION_GRAD.operands, params=ATTENTION_GRAD.params,
        check=rules.check_grad, partition=mesh.PARTITION_GRAD, **shared,
    )  # fmt: skip
    backward.implement(Implementation("opaque", reference_grad, kernel=True))
    made = Op(
        "opaque", reference=reference, operands=ATTENTION.operands, params=ATTENTION.params, check=rules.check,
        gradient=Gradient(gradient.forward, functools.partial(gradient.backward, backward)),
        partition=mesh.PARTITION, **shared,
    )  # fmt: skip
    made.implement(Implementation("opaque", reference, kernel=True))
    return made


OPAQUE = _opaque()


def _devices(shape: tuple[int, int] = (4, 2)) -> jax.sharding.Mesh:
    return jax.make_mesh(
        shape, ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices("cpu")[: shape[0] * shape[1]]
    )


def _normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _loss(run: Any, q: Any, k: Any, v: Any, bias: Any) -> Any:
    return (run(q, k, v, bias, causal=True) ** 2).sum()


@pytest.mark.quick
@pytest.mark.parametrize(
    ("op", "kv"),
    # The last is the quick run's: the op's own rules sum in it, where XLA's form would have them from JAX.
    [(functools.partial(ATTENTION, implementation="xla"), 2), (OPAQUE, 4), (OPAQUE, 2), (OPAQUE, 1)],
    ids=["xla-groups", "kernel-heads", "kernel-groups", "kernel-one-key-head"],
)
def test_batch_and_heads_are_split_and_shared_gradients_summed(op: Any, kv: int) -> None:
    """A bias shared by the batch, and one key head shared by all, get gradients summed over the devices."""
    q, k, v = _normal(0, 4, 4, 6, 8), _normal(1, 4, kv, 6, 8), _normal(2, 4, kv, 6, 8)
    bias = _normal(3, 1, 4, 1, 6)
    place = _devices()
    heads = "model" if kv > 1 else None
    specs = (P("data", "model"), P("data", heads), P("data", heads), P(None, "model"))
    placed = [jax.device_put(x, NamedSharding(place, s)) for x, s in zip((q, k, v, bias), specs, strict=True)]
    step = jax.jit(jax.value_and_grad(functools.partial(_loss, op), (0, 1, 2, 3))).lower(*placed).compile()
    value, gradients = step(*placed)
    plain = functools.partial(ATTENTION, implementation="reference")
    wanted_value, wanted = jax.jit(jax.value_and_grad(functools.partial(_loss, plain), (0, 1, 2, 3)))(q, k, v, bias)
    np.testing.assert_allclose(value, wanted_value, rtol=1e-5)
    for name, got, want in zip(("dq", "dk", "dv", "dbias"), gradients, wanted, strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5, err_msg=name)
    assert gradients[0].sharding.is_equivalent_to(placed[0].sharding, 4)
    assert "all-gather" not in step.as_text()


def test_a_split_length_is_gathered_and_right() -> None:
    q, k, v = (_normal(i, 2, 2, 8, 8) for i in range(3))
    sharding = NamedSharding(_devices(), P(None, None, "data"))
    placed = [jax.device_put(x, sharding) for x in (q, k, v)]
    wanted = jax.jit(reference)(q, k, v)
    for op in (OPAQUE, ATTENTION):
        np.testing.assert_allclose(jax.jit(op)(*placed), wanted, atol=1e-5)


def test_heads_that_do_not_divide_the_mesh_are_gathered_and_right() -> None:
    """Two key heads over a mesh axis of four: no error, no wrong number."""
    q, k, v = _normal(0, 2, 4, 6, 8), _normal(1, 2, 2, 6, 8), _normal(2, 2, 2, 6, 8)
    place = _devices((2, 4))
    placed = [jax.device_put(q, NamedSharding(place, P("data", "model")))]
    placed += [jax.device_put(x, NamedSharding(place, P("data"))) for x in (k, v)]
    wanted = jax.jit(reference)(q, k, v)
    for op in (OPAQUE, ATTENTION):
        np.testing.assert_allclose(jax.jit(op)(*placed), wanted, atol=1e-5)


def test_dropout_on_a_mesh_drops_the_same() -> None:
    """What is dropped is decided by the position in the whole batch, however the batch is split."""
    q, k, v = (_normal(i, 4, 2, 6, 8) for i in range(3))
    seed = np.array([1, 2], np.uint32)
    sharding = NamedSharding(_devices(), P("data", "model"))
    placed = [jax.device_put(x, sharding) for x in (q, k, v)]
    wanted = reference(*map(jnp.asarray, (q, k, v)), dropout_seed=seed, dropout_rate=0.5)
    for op in (OPAQUE, ATTENTION):
        run = jax.jit(lambda *x, op=op: op(*x, *(None,) * 5, seed, dropout_rate=0.5))
        np.testing.assert_allclose(run(*placed), wanted, atol=1e-5)


def test_vmap_of_the_gradient_with_a_shared_bias() -> None:
    q, k, v = (_normal(i, 3, 2, 2, 5, 4) for i in range(3))
    bias = _normal(3, 1, 2, 5, 5)
    grads = [
        jax.jit(jax.vmap(jax.grad(functools.partial(_loss, op), (0, 3)), (0, 0, 0, None)))(q, k, v, bias)
        for op in (OPAQUE, functools.partial(ATTENTION, implementation="reference"))
    ]
    for got, want in zip(*grads, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.quick
def test_the_public_function_is_a_function() -> None:
    x = jnp.ones((1, 2, 4, 8))
    assert attention(x, x, x, layout="bhtd").shape == x.shape
    assert inspect.isfunction(attention)
    assert "query_offset" in inspect.signature(attention).parameters
    assert explain("attention", x, x, x, layout="bhtd").implementation == "xla"
    assert explain(attention, x, x, x, causal=True, layout="bhtd").implementation == "xla"
