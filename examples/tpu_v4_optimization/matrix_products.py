"""Matrix products by the documented objects: precision, blocks, and what would run on a TPU.

python examples/tpu_v4_optimization/matrix_products.py
"""

import jax.numpy as jnp
import numpy as np

from capibara.core.kernels import TPUv4Kernels
from capibara.jax.tpu_v4.backend import TpuV4LinalgOps
from capibara.kernels import explain, target


def main() -> None:
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.normal(size=s), "float32") for s in ((256, 1000), (1000, 128)))
    exact = jnp.matmul(a, b, precision="highest")

    linalg = TpuV4LinalgOps()
    for precision in ("bfloat16", "mixed", "float32"):
        out = linalg.optimized_gemm(a, b, precision=precision, chunk_size=256)
        error = jnp.linalg.norm(out.astype(jnp.float32) - exact) / jnp.linalg.norm(exact)
        print(f"{precision}: {out.dtype}, relative error {error:.1e}")

    kernels = TPUv4Kernels(precision="mixed", optimization_level="balanced")
    out = kernels.optimized_matmul(a, b.T, transpose_b=True, bias=jnp.ones(128), activation="gelu")
    print(f"fused epilogue: {out.shape} {out.dtype}")

    # What dispatch would choose on a v4 chip, decided here without one.
    with target("tpu", "TPU v4"):
        print(explain(linalg.optimized_gemm, a, b, chunk_size=256))


if __name__ == "__main__":
    main()
