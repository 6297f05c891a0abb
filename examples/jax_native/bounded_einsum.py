"""An einsum whose intermediate would be large, in a bounded amount of memory.

python examples/jax_native/bounded_einsum.py
"""

import jax
import jax.numpy as jnp
import numpy as np

from capibara.kernels import contract, path_report

MiB = 2**20


def temporary_bytes(fn, *args) -> int:
    """What the compiled program needs beside its arguments and result."""
    return jax.jit(fn).lower(*args).compile().memory_analysis().temp_size_in_bytes


def main() -> None:
    # Scores of every query with every key, applied to the values: [n, n] in between.
    equation = "nd,kd,ke->ne"
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2048, 64)), "float32") for _ in range(3))

    def whole(q, k, v):
        return contract(equation, q, k, v, optimize=False)

    def bounded(q, k, v):
        return contract(equation, q, k, v, optimize=False, memory_efficient=True, memory_limit_bytes=MiB)

    print(path_report(equation, q, k, v, optimize=False, memory_efficient=True, memory_limit_bytes=MiB))
    for name, fn in (("whole", whole), ("bounded", bounded)):
        print(f"{name}: {temporary_bytes(fn, q, k, v) / MiB:.1f} MiB of temporary memory")
    error = jnp.max(jnp.abs(whole(q, k, v) - bounded(q, k, v))) / jnp.max(jnp.abs(whole(q, k, v)))
    print(f"largest relative difference: {error:.1e}")


if __name__ == "__main__":
    main()
