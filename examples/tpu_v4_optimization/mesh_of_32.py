"""A sharded product on a mesh of 32, rehearsed on virtual CPU devices, with its layout checked.

XLA_FLAGS=--xla_force_host_platform_device_count=32 python examples/tpu_v4_optimization/mesh_of_32.py
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
    mesh = TPUv4MeshConfigurations().CULTURAL_ANALYSIS.build()
    a = jax.device_put(np.ones((512, 256), np.float32), NamedSharding(mesh, PartitionSpec("data", None)))
    b = jax.device_put(np.ones((256, 512), np.float32), NamedSharding(mesh, PartitionSpec(None, "model")))
    out = validate_sharding(product(a, b), mesh, PartitionSpec("data", "model"))
    piece = out.sharding.shard_shape(out.shape)
    print(f"{out.shape} on {len(out.sharding.device_set)} devices, {piece} on each")
    try:
        validate_sharding(out, mesh, PartitionSpec("model", "data"))
    except ValueError as error:
        print(error)


if __name__ == "__main__":
    main()
