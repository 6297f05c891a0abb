"""Plain jax code with one changed import: the same results, and kernel dispatch inside a context.

python examples/jax_native/drop_in.py
"""

import numpy as np

import capibara.jax as jax
import capibara.jax.numpy as jnp
from capibara.jax._src.core import tpu_v4_optimization_context
from capibara.kernels import explain


def layer(x, w, b):
    return jax.nn.gelu(jnp.matmul(x, w) + b)


def loss(params, x, y):
    w, b = params
    return jnp.mean((layer(x, w, b) - y) ** 2)


def main() -> None:
    rng = np.random.default_rng(0)
    x, y, w = (jnp.asarray(rng.normal(size=s), "float32") for s in ((64, 256), (64, 128), (256, 128)))
    params = (w / 16, jnp.zeros(128))

    step = jax.jit(jax.value_and_grad(loss))
    before, _ = step(params, x, y)
    for _ in range(20):
        value, grads = step(params, x, y)
        params = jax.tree.map(lambda p, g: p - 0.5 * g, params, grads)
    print(f"loss {before:.4f} -> {value:.4f}")

    with tpu_v4_optimization_context():
        print(explain(layer, x, *params))
        inside = layer(x, *params)
    difference = jnp.max(jnp.abs(inside - layer(x, *params)))
    print(f"largest difference inside the context: {difference:.1e}")


if __name__ == "__main__":
    main()
