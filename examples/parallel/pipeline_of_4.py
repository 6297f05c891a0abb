"""A decoder whose layers lie on the stages of a pipeline, trained without a change to its code.

python examples/parallel/pipeline_of_4.py
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from capibara.mesh import MeshConfig
from capibara.parallel import Schedule, pipelined

STAGES, DATA, MICROBATCHES = 4, 2, 8
LAYERS, HIDDEN, VOCAB = 8, 32, 64
STEPS, RATE = 20, 0.5


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def loss(params, ids):
    """Mean cross-entropy of the next token: a table, a scan over the layers, a table."""

    def layer(x, w):
        before = jnp.cumsum(norm(x), axis=1) / jnp.arange(1, x.shape[1] + 1)[:, None]
        return x + jax.nn.gelu((norm(x) + before) @ w["up"]) @ w["down"], None

    x, _ = jax.lax.scan(layer, params["embed"][ids[:, :-1]], params["layers"])
    scores = jax.nn.log_softmax(norm(x) @ params["unembed"])
    return -jnp.mean(jnp.take_along_axis(scores, ids[:, 1:, None], axis=-1))


def init(random):
    def normal(*shape):
        return jnp.asarray(random.normal(size=shape) * shape[-2] ** -0.5, jnp.float32)

    layers = {"up": normal(LAYERS, HIDDEN, 2 * HIDDEN), "down": normal(LAYERS, 2 * HIDDEN, HIDDEN)}
    return {"embed": normal(VOCAB, HIDDEN), "layers": layers, "unembed": normal(HIDDEN, VOCAB)}


def text(random):
    """Rows in which each token follows from the one before it."""
    rows = [random.integers(0, VOCAB, 16)]
    for _ in range(16):
        rows.append((5 * rows[-1] + 3) % VOCAB)
    return jnp.asarray(np.stack(rows, axis=1))


def train(loss, params, ids):
    @jax.jit
    def step(params):
        value, gradients = jax.value_and_grad(loss)(params, ids)
        return jax.tree.map(lambda p, g: p - RATE * g, params, gradients), value

    values = []
    for _ in range(STEPS):
        params, value = step(params)
        values.append(float(value))
    return params, values


def main() -> None:
    jax.config.update("jax_num_cpu_devices", STAGES * DATA)  # these stand in where there are too few chips
    chips = jax.devices() if len(jax.devices()) >= STAGES * DATA else jax.devices("cpu")
    mesh = MeshConfig((STAGES, DATA), ("pipeline", "data")).build(chips[: STAGES * DATA])

    random = np.random.default_rng(0)
    params, ids = init(random), text(random)
    _, plain = train(loss, params, ids)

    staged = {
        name: jax.device_put(leaf, NamedSharding(mesh, PartitionSpec("pipeline" if name == "layers" else None)))
        for name, leaf in params.items()
    }
    rows = jax.device_put(ids, NamedSharding(mesh, PartitionSpec("data")))
    with jax.set_mesh(mesh):
        trained, values = train(pipelined(loss, microbatches=MICROBATCHES), staged, rows)

    schedule = Schedule(STAGES, MICROBATCHES)
    held = trained["layers"]["up"].addressable_shards[0].data.shape[0]
    print(f"{LAYERS} layers on {STAGES} stages: {held} on each, after training too")
    print(f"{MICROBATCHES} microbatches in {schedule.ticks} ticks: a stage waits for {schedule.bubble:.0%} of them")
    for number in (0, STEPS // 2, STEPS - 1):
        print(f"step {number:2}: loss {plain[number]:.5f} on one device, {values[number]:.5f} in stages")
    # Sums of 16 x 16 tokens in another order, step after step.
    print("the same training:", np.allclose(plain, values, rtol=16 * 16 * np.finfo(np.float32).eps))


if __name__ == "__main__":
    main()
