"""Data-parallel training whose gradients travel as int8: the same loss for a quarter of the bytes.

python examples/parallel/compressed_gradients.py
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from capibara.kernels.ops.collective.buckets import bucketed_all_reduce
from capibara.kernels.ops.collective.compressed import compressed_all_reduce, feedback_state

CLASSES, PIXELS, HIDDEN = 10, 64, 96
BATCH, STEPS, RATE, MOMENTUM = 256, 120, 0.05, 0.9
WAYS = ("exact", "int8 nearest, feedback", "int8 unbiased, feedback", "int8 nearest, no feedback")


def digits(seed, shape):
    """Noisy 8x8 pictures of ten fixed patterns, each with a brightness of its own."""
    patterns = np.random.default_rng(7).standard_normal((CLASSES, PIXELS))
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, CLASSES, shape)
    pictures = patterns[labels] * draw.uniform(0.5, 1.5, (*shape, 1)) + 3.0 * draw.standard_normal((*shape, PIXELS))
    return pictures.astype(np.float32), labels.astype(np.int32)


def start():
    draw = np.random.default_rng(0)
    return {
        "hidden": np.float32(draw.standard_normal((PIXELS, HIDDEN)) * PIXELS**-0.5),
        "bias": np.zeros(HIDDEN, np.float32),
        "out": np.float32(draw.standard_normal((HIDDEN, CLASSES)) * HIDDEN**-0.5),
    }


def loss_of(params, batch):
    pictures, labels = batch
    hidden = jax.nn.relu(pictures @ params["hidden"] + params["bias"])
    chances = jax.nn.log_softmax(hidden @ params["out"])
    return -jnp.take_along_axis(chances, labels[:, None], 1).mean()


def reduced(way, gradients, kept, key):
    """The mean of the devices' gradients, and what was not sent."""
    if way == "exact":
        return bucketed_all_reduce(gradients, "data", op="mean"), kept
    state = None if "no feedback" in way else kept
    unbiased_key = key if "unbiased" in way else None
    mean, state = compressed_all_reduce(gradients, "data", op="mean", state=state, key=unbiased_key)
    return mean, kept if state is None else state


def mesh_of(devices):
    chips = jax.devices() if len(jax.devices()) >= devices else jax.devices("cpu")
    return jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,), devices=chips[:devices])


def train(way, devices, steps):
    """The loss, on pictures not seen before, after training with one kind of all-reduce."""

    def on_a_device(params, kept, batches):
        def step(carry, batch):
            params, speed, kept, number = carry
            # Without this mark, shard_map would add the gradients of shared parameters up by itself, exactly.
            own = jax.tree.map(lambda x: jax.lax.pcast(x, "data", to="varying"), params)
            key = jax.random.fold_in(jax.random.key(1), number)
            gradients, kept = reduced(way, jax.grad(loss_of)(own, batch), kept, key)
            speed = jax.tree.map(lambda v, g: MOMENTUM * v + g, speed, gradients)
            params = jax.tree.map(lambda p, v: p - RATE * v, params, speed)
            return (params, speed, kept, number + 1), None

        speed = jax.tree.map(jnp.zeros_like, params)
        (params, _, kept, _), _ = jax.lax.scan(step, (params, speed, kept, 0), batches)
        return params, kept

    whole, split = PartitionSpec(), PartitionSpec("data")
    spread = jax.shard_map(
        on_a_device,
        mesh=mesh_of(devices),
        in_specs=(whole, split, PartitionSpec(None, "data")),
        out_specs=(whole, split),
    )
    params = start()
    batches = digits(1, (steps, BATCH))
    params, _ = jax.jit(spread)(params, feedback_state(params, devices), batches)
    return float(jax.jit(loss_of)(jax.device_get(params), digits(2, (2048,))))


def losses(devices, ways=WAYS, steps=STEPS):
    """Final losses, the exact all-reduce's first."""
    exact = train("exact", devices, steps)
    made = []
    for way in ways:
        loss = exact if way == "exact" else train(way, devices, steps)
        made.append({"devices": devices, "way": way, "loss": loss, "of_exact": loss / exact})
    return made


def hostile_losses(ways=WAYS, devices=8, steps=100):
    """Small gradients beside a large one that the devices' sum cancels: what rounding each step alone loses for good.

    Every coordinate wants to be 1. The first also has ±100 from device to device, so a step of the code is 0.8 there
    and for its neighbours, whose gradients are below the half of it from the start.
    """

    def on_a_device(kept, way):
        sign = 1.0 - 2.0 * (jax.lax.axis_index("data") % 2)
        noise = jnp.zeros(256).at[0].set(100.0) * sign

        def step(carry, number):
            x, kept = carry
            key = jax.random.fold_in(jax.random.key(3), number)
            mean, kept = reduced(way, 0.3 * (x - 1.0) + noise, kept, key)
            return (x - 0.3 * mean, kept), None

        (x, _), _ = jax.lax.scan(step, (jnp.zeros(256), kept), jnp.arange(steps))
        return 0.5 * jnp.square(x - 1.0)[1:].mean()

    made = {}
    for way in ways:
        spread = jax.shard_map(
            functools.partial(on_a_device, way=way),
            mesh=mesh_of(devices),
            in_specs=PartitionSpec("data"),
            out_specs=PartitionSpec(),
        )
        made[way] = float(jax.jit(spread)(feedback_state(jnp.zeros(256), devices)))
    return made


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 8)  # these stand in where there are too few chips
    print(f"digits, {STEPS} steps, 8 devices; gradients travel as they are (exact) or as int8")
    rows = losses(8, WAYS[:3])
    for row in rows:
        print(f"  {row['way']:27} loss {row['loss']:.4f}, {100 * (row['of_exact'] - 1):+.2f} % of exact")
    print(f"  all within 1 %: {all(abs(row['of_exact'] - 1) < 0.01 for row in rows)}")
    print("small gradients beside a large one that cancels between the devices")
    hostile = hostile_losses((WAYS[1], WAYS[3]))
    for way, loss in hostile.items():
        print(f"  {way:27} loss {loss:.1e}")
    print(f"  feedback brings what rounding loses: {hostile[WAYS[1]] < 0.01 * hostile[WAYS[3]]}")


if __name__ == "__main__":
    main()
