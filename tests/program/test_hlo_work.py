"""The work of compiled programs, held against counts made by hand; and of library calls that a CPU does not make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from capibara.program.hlo_work import HloWork, hlo_work

N = 32


def work(function: Callable[..., Any], *shapes: tuple[int, ...], dtype: str = "float32") -> HloWork:
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    return hlo_work(jax.jit(function).lower(*arguments).compile().as_text())


def convolution(x: jax.Array, kernel: jax.Array) -> jax.Array:
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)


def scanned(x: jax.Array, weights: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda carry, w: (carry @ w, None), x, weights)[0]


def by_threes(x: jax.Array) -> jax.Array:
    return jax.lax.while_loop(lambda s: s[0] < 12, lambda s: (s[0] + 3, s[1] @ s[1]), (0, x))[1]


def nested(x: jax.Array) -> jax.Array:
    def outer(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jax.lax.fori_loop(0, 3, lambda i, inner: inner @ inner, carry), None

    return jax.lax.scan(outer, x, length=5)[0]


B, T, H, D = 1, 64, 2, 64
BY_HAND = [
    pytest.param(jnp.matmul, [(64, 96), (96, 32)], 2 * 64 * 96 * 32, id="gemm"),
    # Two products, and of each score: scaled, less the maximum, exponential, summed, divided.
    pytest.param(jax.nn.dot_product_attention, [(B, T, H, D)] * 3, B * H * T * T * (4 * D + 5), id="attention"),
    pytest.param(convolution, [(1, 8, 8, 4), (3, 3, 4, 6)], 2 * 8 * 8 * 6 * 9 * 4, id="conv"),
    pytest.param(scanned, [(N, N), (9, N, N)], 9 * 2 * N**3, id="scan"),
    pytest.param(lambda x: jax.lax.fori_loop(0, 7, lambda i, c: c @ c, x), [(N, N)], 7 * 2 * N**3, id="fori"),
    pytest.param(by_threes, [(N, N)], 4 * 2 * N**3, id="while by threes"),
    pytest.param(nested, [(N, N)], 15 * 2 * N**3, id="loop in a scan"),
]


@pytest.mark.quick(cases="all")
@pytest.mark.parametrize(("function", "shapes", "flops"), BY_HAND)
def test_operations_are_those_counted_by_hand(function: Any, shapes: list[tuple[int, ...]], flops: float) -> None:
    found = work(function, *shapes)
    assert found.flops == pytest.approx(flops, rel=0.02)
    assert not found.loops_of_unknown_length


def test_the_gradient_of_a_convolution_is_counted_like_the_convolution() -> None:
    gradient = work(jax.grad(lambda k, x: (convolution(x, k) ** 2).sum()), (3, 3, 4, 6), (1, 8, 8, 4))
    assert gradient.matrix_flops == pytest.approx(2 * 2 * 8 * 8 * 6 * 9 * 4, rel=0.02)


def test_a_loop_of_unknown_length_counts_once_and_is_named() -> None:
    found = work(lambda x: jax.lax.while_loop(lambda c: c.sum() < 12, lambda c: c @ c, x), (N, N))
    assert found.loops_of_unknown_length == 1
    assert found.matrix_flops == 2 * N**3


def test_a_scan_reads_the_slices_and_not_the_stack() -> None:
    stacked = work(scanned, (N, N), (50, N, N)).bytes
    # Each trip: a slice, the carry, the result, with copies; the whole stack would be fifty times that.
    assert stacked < 50 * 12 * N * N * 4


def test_only_the_largest_branch_counts() -> None:
    branches = (lambda x: x @ x, lambda x: x @ x @ x, lambda x: x)
    found = hlo_work(
        jax.jit(lambda i, x: jax.lax.switch(i, branches, x))
        .lower(jax.ShapeDtypeStruct((), "int32"), jax.ShapeDtypeStruct((N, N), "float32"))
        .compile()
        .as_text()
    )
    assert found.matrix_flops == 2 * 2 * N**3


@pytest.mark.quick
def test_products_say_their_sizes_and_the_type_they_were_written_in() -> None:
    found = work(jnp.matmul, (24, 40), (40, 56), dtype="bfloat16")
    (op,) = [op for op in found.ops if op.products]
    (product,) = op.products
    assert (product.batch, product.m, product.n, product.k) == (1, 24, 56, 40)
    assert op.written_dtype == "bfloat16"
    assert op.kind == "product"


GEMM = (
    '%call.1 = (bf16[64,32]{1,0}, s8[4]{0}) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul", '
    'metadata={op_name="jit(f)/dot"}, backend_config={"operation_queue_id":"0","gemm_backend_config":{"alpha_real":1,'
    '"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],'
    '"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}'
)
FORWARD = (
    "%call.1 = (f32[2,8,8,6]{3,2,1,0}, u8[0]{0}) custom-call(%x, %k), window={size=3x3 pad=1_1x1_1}, "
    'dim_labels=b01f_01io->b01f, custom_call_target="__cudnn$convForward"'
)
FILTER = (
    "%call.1 = (f32[3,3,4,6]{3,2,1,0}, u8[0]{0}) custom-call(%x, %y), window={size=3x3 pad=1_1x1_1}, "
    'dim_labels=b01f_01io->b01f, custom_call_target="__cudnn$convBackwardFilter"'
)
FMHA = (
    '%call.1 = (bf16[2,128,4,64], u8[0]) custom-call(%q, %q, %q), custom_call_target="{target}", '
    'backend_config={{"cudnn_fmha_backend_config":{{"fmha_scale":0.125,"mask_type":"{mask}",'
    '"intermediate_tensor_shape":{{"element_type":"BF16","dimensions":["2","4","128","128"]}}}}}}'
)
TPU = (
    '%call.1 = bf16[64,32]{1,0} custom-call(%a, %b), custom_call_target="tpu_custom_call", '
    'backend_config={"custom_call_config":{"cost_estimate":{"flops":"1000","bytes_accessed":"2000"}}}'
)
LIBRARY = [
    pytest.param(GEMM, 2 * 64 * 96 * 32, "product", id="cublas"),
    pytest.param(FORWARD, 2 * 2 * 8 * 8 * 6 * 9 * 4, "convolution", id="cudnn forward"),
    pytest.param(FILTER, 2 * 2 * 8 * 8 * 6 * 9 * 4, "convolution", id="cudnn filter"),
    pytest.param(
        FMHA.format(target="__cudnn$fmhaSoftmax", mask="NO_MASK"), 4 * 2 * 4 * 128 * 128 * 64, "attention", id="fmha"
    ),
    pytest.param(
        FMHA.format(target="__cudnn$fmhaSoftmaxBackward", mask="CAUSAL"),
        10 * 2 * 4 * 128 * 128 * 64 / 2,
        "attention",
        id="causal fmha backward",
    ),
    pytest.param(TPU, 1000, "kernel", id="a kernel that states its cost"),
]


@pytest.mark.quick(cases="all")
@pytest.mark.parametrize(("call", "flops", "kind"), LIBRARY)
def test_library_calls_are_counted_by_their_shapes(call: str, flops: float, kind: str) -> None:
    found = hlo_work(_module(call))
    (op,) = found.ops
    assert (op.matrix_flops, op.kind) == (flops, kind)
    assert not found.uncounted


def test_a_kernel_that_states_nothing_is_named() -> None:
    found = hlo_work(_module(TPU.replace("cost_estimate", "other").replace("tpu_custom_call", "mosaic_gpu_v2")))
    assert found.uncounted == ("mosaic_gpu_v2",)
    assert found.flops == 0


def _module(call: str) -> str:
    return "\n".join(
        [
            "HloModule jit_f, is_scheduled=true",
            "",
            "ENTRY %main (a: bf16[64,96], b: bf16[96,32]) -> bf16[64,32] {",
            "  %a = bf16[64,96]{1,0} parameter(0)",
            "  %b = bf16[96,32]{1,0} parameter(1)",
            "  %x = f32[2,8,8,4]{3,2,1,0} parameter(2)",
            "  %k = f32[3,3,4,6]{3,2,1,0} parameter(3)",
            "  %y = f32[2,8,8,6]{3,2,1,0} parameter(4)",
            "  %q = bf16[2,128,4,64]{3,2,1,0} parameter(5)",
            f"  {call}",
            "}",
        ]
    )


# As the compilers for accelerators write it, which leave the conditions of loops unfused.
LOOP = """HloModule jit_loop, is_scheduled=true

%body (p: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %p = (s32[], f32[8,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %one = s32[] constant(2)
  %next = s32[] add(%i, %one)
  %x = f32[8,8]{1,0} get-tuple-element(%p), index=1
  %y = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %t = (s32[], f32[8,8]{1,0}) tuple(%next, %y)
  %late = f32[8,8]{1,0} copy(%y)
}

%cond (p: (s32[], f32[8,8])) -> pred[] {
  %p = (s32[], f32[8,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant(10)
  %far = pred[] custom-call(%p), custom_call_target="far"
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (a: s32[], x: f32[8,8]) -> f32[8,8] {
  %a = s32[] parameter(0)
  %zero = s32[] constant(0)
  %start = s32[] copy(%zero)
  %x = f32[8,8]{1,0} parameter(1)
  %init = (s32[], f32[8,8]{1,0}) tuple(%start, %x)
  %w = (s32[], f32[8,8]{1,0}) while(%init), condition=%cond, body=%body
  ROOT %r = f32[8,8]{1,0} get-tuple-element(%w), index=1
}
"""


@pytest.mark.quick
@pytest.mark.parametrize(
    ("written", "instead", "trips"),
    [
        ("", "", 5),
        ("tuple(%start", "tuple(%a", None),  # it starts anywhere
        ("%less = pred[]", "%less.1 = pred[]", 5),
        ("add(%i, %one)", "multiply(%i, %one)", None),
        ("add(%i, %one)", "add(%i, %i)", None),
        ("constant(0)", "constant(20)", 0),
        # It ends when either does: at the tenth at the latest.
        (
            "  ROOT %less = pred[] compare(%i, %n), direction=LT",
            "  %less = pred[] compare(%i, %n), direction=LT\n  ROOT %both = pred[] and(%less, %far)",
            None,
        ),
    ],
    ids=["by twos", "any start", "renamed", "doubled", "by itself", "never", "or earlier"],
)
def test_a_counter_alone_tells_how_long_a_loop_is(written: str, instead: str, trips: int | None) -> None:
    assert written in LOOP
    found = hlo_work(LOOP.replace(written, instead) if written else LOOP)
    assert found.matrix_flops == 2 * 8**3 * (1 if trips is None else trips)
    assert found.loops_of_unknown_length == (trips is None)
