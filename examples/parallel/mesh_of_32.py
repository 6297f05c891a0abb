"""The documented meshes of 32 chips, how their axes are wired on a v4 slice, and a model laid out on one by names.

python examples/parallel/mesh_of_32.py
"""

import jax
import jax.numpy as jnp

from capibara.mesh import (
    TPUv4MeshConfigurations,
    shard_params,
    training_mesh_config,
    use_rules,
    wiring,
    with_sharding_constraint,
)

SLICE = "v4-64"  # 32 chips, a grid of 2x4x4

PARAMS = {
    "embedding": jax.ShapeDtypeStruct((512, 128), jnp.float32),
    "up": jax.ShapeDtypeStruct((128, 512), jnp.float32),
    "down": jax.ShapeDtypeStruct((512, 128), jnp.float32),
}
NAMES = {"embedding": ("vocab", None), "up": (None, "mlp"), "down": ("mlp", None)}


@jax.jit
def forward(params, tokens):
    x = with_sharding_constraint(params["embedding"][tokens], ("batch", None, None))
    hidden = with_sharding_constraint(jax.nn.gelu(x @ params["up"]), ("batch", None, "mlp"))
    return with_sharding_constraint(x + hidden @ params["down"], ("batch", None, None))


def show_wiring() -> None:
    print(f"How the axes of some meshes lie on {SLICE}")
    meshes = {**dict(TPUv4MeshConfigurations()), "training": training_mesh_config(32, 4, 4, pipeline_parallel_size=2)}
    for name, config in meshes.items():
        for axis, found in wiring(config, on=SLICE).items():
            if found.size > 1:
                shape = "a ring" if found.ring else f"a line, {found.closing_hops} hops back"
                print(f"  {name:18} {axis:9} {found.size:2} chips, {found.max_hops} hop to the next, {shape}")


def show_layouts() -> None:
    print("One model on the first of them, under three tables of rules")
    chips = jax.devices() if len(jax.devices()) >= 32 else jax.devices("cpu")
    mesh = TPUv4MeshConfigurations().CULTURAL_ANALYSIS.build(chips[:32])
    params = {name: jnp.ones(leaf.shape, leaf.dtype) / 64 for name, leaf in PARAMS.items()}
    tokens = jnp.zeros((32, 16), jnp.int32)
    # The same model and the same function under three tables.
    tables = {
        "by the default rules": {},
        "batch over all chips": {"batch": ("data", "model"), "mlp": None, "vocab": None},
        "weights over all chips": {"batch": None, "mlp": ("data", "model"), "vocab": ("data", "model")},
    }
    for words, rules in tables.items():
        with jax.set_mesh(mesh), use_rules(rules):
            placed = shard_params(params, NAMES, mesh)
            out = forward(placed, tokens)
            held = sum(leaf.addressable_shards[0].data.nbytes for leaf in placed.values())
            piece = out.addressable_shards[0].data.shape
            print(f"  {words}: {held // 1024} KiB of weights a chip, output {piece} a chip, sum {float(out.sum()):.1f}")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 32)  # these stand in where there are too few chips
    show_wiring()
    show_layouts()
