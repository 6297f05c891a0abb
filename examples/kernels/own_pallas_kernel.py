"""A Pallas kernel of your own for TPU, and one for Hopper, in one op: emulated here, lowered for both chips.

python examples/kernels/own_pallas_kernel.py
capibara kernels compile soft_cap --for v4-32 --import examples/kernels/own_pallas_kernel.py
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.compile import lower_for
from capibara.kernels import Case, Cost, Partition, current_interpret, explain, interpret, out_struct, target
from capibara.kernels.lab.check import check
from vishwamai.kernels.tpu import register_tpu_op

ROWS = 128  # of one TPU program's tile
THREADS = 128  # of one Hopper program, a warpgroup


def soft_cap_reference(x, *, cap=30.0):
    """x [rows, columns], bent so that it stays between -cap and cap."""
    return cap * jnp.tanh(x / cap)


def body(x_ref, out_ref, *, cap):
    x = x_ref[...].astype(jnp.float32)
    out_ref[...] = (cap * jnp.tanh(x / cap)).astype(out_ref.dtype)


@register_tpu_op(
    name="soft_cap",
    reference=soft_cap_reference,
    platforms=("tpu",),
    kernel=True,  # opaque to JAX: the gradient is the reference's
    cost=lambda call: Cost(vector_flops=8.0 * call.need("x").size, bytes=2.0 * call.need("x").size * 2),
    # tanh is good to a few roundings of float32, and the result is rounded once to x's type.
    tolerance=lambda call: 4.0 * float(jnp.finfo(call.need("x").dtype).eps),
    partition=Partition(rule=lambda call: "r0 c -> r0 c"),  # on a mesh, each device caps its own rows
    cases=[
        Case("small", ((300, 256),), tags=frozenset({"test", "tpu", "gpu"})),
        Case("odd", ((37, 100),), "float32", tags=frozenset({"test"})),
    ],
)
def soft_cap(x, *, cap=30.0):
    rows, columns = x.shape
    block = min(ROWS, rows)
    tile = pl.BlockSpec((block, columns), lambda i: (i, 0))
    return pl.pallas_call(
        functools.partial(body, cap=cap),
        grid=(pl.cdiv(rows, block),),
        in_specs=[tile],
        out_specs=tile,
        out_shape=out_struct(x.shape, x.dtype, x),  # says how it lies on a mesh, where there is one
        interpret=current_interpret().pallas_argument(),  # False on a TPU, the emulation inside interpret()
    )(x)


def takes_whole_rows_of_threads(call):
    columns = call.need("x").shape[-1]
    return f"its {THREADS} threads share a row evenly; {columns} columns" if columns % THREADS else None


@soft_cap.implement("hopper", platforms=("gpu",), kernel=True, refuses=takes_whole_rows_of_threads)
def soft_cap_hopper(x, *, cap=30.0):
    rows, columns = x.shape

    def program(x_hbm, out_hbm):
        row = jax.lax.axis_index("row")
        line = plgpu.layout_cast(x_hbm[row], plgpu.Layout.WG_STRIDED((columns,), vec_size=columns // THREADS))
        out_hbm[row] = (cap * jnp.tanh(line.astype(jnp.float32) / cap)).astype(out_hbm.dtype)

    out = out_struct(x.shape, x.dtype, x)
    return plgpu.kernel(program, out_type=out, grid=(rows,), grid_names=("row",))(x)


def main() -> None:
    op = soft_cap.op
    (x,) = op.case("small").arrays()
    print(explain(soft_cap, x))
    with interpret(detect_races=True) as emulated:
        print("emulated:", check(op, (x,), {}, "user").why)
        print("races:", emulated.races_found())
    for platform, chip, name in (("tpu", "tpu", "user"), ("cuda", "gpu", "hopper")):
        with target(chip):
            made = lower_for(functools.partial(soft_cap, implementation=name), (x,), platform)
        print(f"lowered for {platform}:", made.ok, *made.custom_calls)
    print("gradient:", jax.grad(lambda x: soft_cap(x).sum())(x).shape)


if __name__ == "__main__":
    main()
