"""A sharded product on a mesh of 32, rehearsed on virtual CPU devices, with its layout checked.

python examples/tpu_v4_optimization/mesh_of_32.py
"""

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from capibara.jax.tpu_v4 import TPUv4MeshConfigurations
from vishwamai.kernels.tpu import PrecisionConfig, gemm, tpu_kernel, validate_sharding


@tpu_kernel(precision=PrecisionConfig.HIGH)
def product(a, b):
    return gemm(a, b, block_size=128)


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 32)  # these stand in where there are too few chips
    chips = jax.devices() if len(jax.devices()) >= 32 else jax.devices("cpu")
    mesh = TPUv4MeshConfigurations().CULTURAL_ANALYSIS.build(chips[:32])
    a = jax.device_put(np.ones((512, 256), np.float32), NamedSharding(mesh, PartitionSpec("data", None)))
    b = jax.device_put(np.ones((256, 512), np.float32), NamedSharding(mesh, PartitionSpec(None, "model")))
    out = validate_sharding(product(a, b), mesh, PartitionSpec("data", "model"))
    piece = out.sharding.shard_shape(out.shape)
    print(f"the product: {out.shape} on {len(out.sharding.device_set)} devices, {piece} on each")
    try:
        validate_sharding(out, mesh, PartitionSpec("model", "data"))
    except ValueError as error:
        print(f"asked for the layout turned around: {error}")


if __name__ == "__main__":
    main()
