"""Steps of many kinds, their arguments in no particular order: which is the batch, which are tokens, which neither?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Case = tuple[Callable[..., Any], tuple[Any, ...], tuple[str, ...]]


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def i32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


RAW_KEY = jax.ShapeDtypeStruct((2,), jnp.uint32)
TYPED_KEY = jax.ShapeDtypeStruct((), jax.random.key(0).dtype)


def _sgd(params: Any, moments: Any, gradients: Any) -> tuple[Any, Any]:
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradients)
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, moments), moments


def _nll(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1).mean()


def ppo(key: Any) -> Case:
    """Rows are shuffled by the key and pass in four minibatches."""

    def net(p: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = jnp.tanh(jnp.tanh(x @ p["in"]) @ p["mid"] + p["bias"])
        return h @ p["policy"], (h @ p["value"])[:, 0]

    def loss(p: Any, mb: Any) -> jax.Array:
        logits, value = net(p, mb["obs"])
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), mb["action"][:, None], 1)[:, 0]
        ratio = jnp.exp(chosen - mb["logp"])
        gain = jnp.minimum(ratio * mb["adv"], jnp.clip(ratio, 0.8, 1.2) * mb["adv"])
        return -gain.mean() + ((value - mb["ret"]) ** 2).mean()

    def update(key: Any, rollout: Any, params: Any, moments: Any) -> Any:
        key, own = jax.random.split(key)
        order = jax.random.permutation(own, rollout["obs"].shape[0])
        parts = jax.tree.map(lambda x: x[order].reshape(4, -1, *x.shape[1:]), rollout)

        def one(carry: Any, mb: Any) -> Any:
            params, moments = carry
            value, gradients = jax.value_and_grad(loss)(params, mb)
            return _sgd(params, moments, gradients), value

        (params, moments), values = jax.lax.scan(one, (params, moments), parts)
        return params, moments, key, values.mean()

    params = {"in": f32(17, 64), "mid": f32(64, 64), "bias": f32(64), "policy": f32(64, 6), "value": f32(64, 1)}
    n = 2048
    rollout = {"obs": f32(n, 17), "action": i32(n), "logp": f32(n), "adv": f32(n), "ret": f32(n)}
    return update, (key, rollout, params, params), ("other", "batch", "params", "state")


def images() -> Case:
    """Labels come first, and the images are floats."""

    def loss(p: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        x = jax.lax.conv_general_dilated(x, p["conv"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return _nll(jax.nn.relu(x).mean((1, 2)) @ p["head"] + p["bias"], labels)

    def step(labels: jax.Array, x: jax.Array, moments: Any, params: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, x, labels)
        return (*_sgd(params, moments, gradients), value)

    params = {"conv": f32(3, 3, 3, 32), "head": f32(32, 10), "bias": f32(10)}
    return step, (i32(64), f32(64, 32, 32, 3), params, params), ("batch", "batch", "state", "params")


def seq2seq() -> Case:
    """Two arrays of tokens of different lengths, and the targets."""

    def attend(q: jax.Array, m: jax.Array, w: jax.Array) -> jax.Array:
        scores = jax.nn.softmax(jnp.einsum("btd,bsd->bts", q @ w, m))
        return q + jnp.einsum("bts,bsd->btd", scores, m)

    def loss(p: Any, source: jax.Array, target: jax.Array) -> jax.Array:
        m = p["embed"][source]
        m = attend(m, m, p["encoder"])
        y = p["embed"][target[:, :-1]]
        y = attend(attend(y, y, p["self"]), m, p["cross"])
        return _nll(y @ p["out"], target[:, 1:])

    def step(params: Any, moments: Any, source: jax.Array, target: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, source, target)
        return (*_sgd(params, moments, gradients), value)

    square = f32(32, 32)
    params = {"embed": f32(512, 32), "encoder": square, "self": square, "cross": square, "out": f32(32, 512)}
    return step, (params, params, i32(16, 40), i32(16, 24)), ("params", "state", "batch", "batch")


def diffusion() -> Case:
    """Timesteps look up a table of the schedule, which is no weight and no data; the noise is the key's."""

    def loss(p: Any, schedule: jax.Array, x: jax.Array, t: jax.Array, key: Any) -> jax.Array:
        noise = jax.random.normal(key, x.shape)
        a = schedule[t][:, None]
        noisy = a * x + jnp.sqrt(1 - a * a) * noise
        h = jax.nn.silu(noisy @ p["in"] + p["time"][t])
        return jnp.mean((h @ p["out"] - noise) ** 2)

    def step(params: Any, moments: Any, schedule: jax.Array, x: jax.Array, t: jax.Array, key: Any, rate: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, schedule, x, t, key)
        params, moments = _sgd(params, moments, jax.tree.map(lambda g: rate * g, gradients))
        return params, moments, value

    params = {"in": f32(48, 128), "time": f32(1000, 128), "out": f32(128, 48)}
    args = (params, params, f32(1000), f32(64, 48), i32(64), TYPED_KEY, f32())
    return step, args, ("params", "state", "other", "batch", "batch", "other", "other")


def graph() -> Case:
    """Messages along edges, which are index arrays into the nodes."""

    def loss(p: Any, nodes: jax.Array, senders: jax.Array, receivers: jax.Array, labels: jax.Array) -> jax.Array:
        h = nodes
        for w in (p["first"], p["second"]):
            sent = jnp.tanh(h @ w)[senders]
            h = jax.ops.segment_sum(sent, receivers, num_segments=h.shape[0])
        return _nll(h @ p["head"], labels)

    def step(params: Any, senders: Any, receivers: Any, nodes: Any, labels: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, nodes, senders, receivers, labels)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    params = {"first": f32(32, 64), "second": f32(64, 64), "head": f32(64, 8)}
    args = (params, i32(4096), i32(4096), f32(512, 32), i32(512))
    return step, args, ("params", "batch", "batch", "batch", "batch")


def decode() -> Case:
    """A step of serving: nothing is trained, and the cache comes back."""

    def step(cache: jax.Array, token: jax.Array, params: Any, position: jax.Array) -> Any:
        x = params["embed"][token]
        cache = jax.lax.dynamic_update_slice(cache, (x @ params["key"])[:, None], (0, position, 0))
        scores = jax.nn.softmax(jnp.einsum("bd,btd->bt", x @ params["query"], cache))
        x = x + jnp.einsum("bt,btd->bd", scores, cache) @ params["up"]
        return cache, jnp.argmax(x @ params["out"], -1)

    params = {"embed": f32(512, 64), "key": f32(64, 64), "query": f32(64, 64), "up": f32(64, 64), "out": f32(64, 512)}
    return step, (f32(8, 128, 64), i32(8), params, i32()), ("batch", "batch", "params", "other")
