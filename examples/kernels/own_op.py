"""An op of your own: a reference, a faster form, a cost; then dispatch, gradients and checks come with it.

python examples/kernels/own_op.py
capibara kernels explain squared_distances 'f32[100,32]' 'f32[80,32]' --import examples/kernels/own_op.py
"""

import jax
import jax.numpy as jnp

from capibara.kernels import Case, Cost, explain
from capibara.kernels.lab.check import check
from vishwamai.kernels.tpu import register_tpu_op


def distances_reference(x, y):
    """Squared distances between the rows of x [n, d] and of y [m, d]."""
    return jnp.sum((x[:, None, :] - y[None, :, :]) ** 2, axis=-1)


def cost(call) -> Cost:
    (n, d), (m, _) = call.need("x").shape, call.need("y").shape
    return Cost(matrix_flops=2.0 * n * m * d, bytes=4.0 * (n * d + m * d + n * m), dtype="float32")


@register_tpu_op(
    name="squared_distances",
    reference=distances_reference,
    cost=cost,
    # |x|^2 - 2xy + |y|^2 loses digits where the rows nearly agree: far fewer than these draws have.
    tolerance=lambda call: 1e-5,
    cases=[Case("small", ((100, 32), (80, 32)), "float32", tags=frozenset({"test"}))],
)
def squared_distances(x, y):
    squares = jnp.sum(x * x, -1)[:, None] + jnp.sum(y * y, -1)[None, :]
    return squares - 2 * jnp.matmul(x, y.T, precision="highest")


def main() -> None:
    op = squared_distances.op
    x, y = op.case("small").arrays()
    print(explain(squared_distances, x, y))
    print("against the reference:", check(op, (x, y), {}, "user").why)
    print("gradient of x:", jax.grad(lambda x: squared_distances(x, y).sum())(x).shape)
    print(f"work: {op.cost(op.call(x, y)).flops:,.0f} flops")


if __name__ == "__main__":
    main()
