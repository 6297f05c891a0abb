"""Every op says what it costs: its flops against XLA's own count, and its time against the roofline of every chip."""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import pytest
from jax.sharding import PartitionSpec

import capibara.cost
from capibara.cost.ops import op_seconds
from capibara.hardware.chips import CHIPS, chip
from capibara.hardware.facts import Chip
from capibara.kernels.core.context import Target
from capibara.kernels.core.counting import products
from capibara.kernels.core.op import lookup, registry, traced_reference
from capibara.kernels.core.spec import Call, Case

# Of the flops.
TOLERANCE = 0.02
CPU = Target("cpu", "cpu")


def f32(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def i32(*shape: int) -> jax.ShapeDtypeStruct:
    return f32(*shape, dtype="int32")


SEED = f32(2, dtype="uint32")
HEADS = f32(2, 2, 128, 512)  # head_dim 512: the softmax is under 1 % of the products
ROWS, MATRIX, VECTOR = f32(256), f32(256, 1024), f32(1024)
STEPS, STATES = f32(4, 1, 256), f32(4, 1, 16)

# Op -> operands and parameters. In float32, so that no conversion counts; a loop, where the reference has one, of one
# trip, which is as often as XLA counts its body. Products have a long reduction: what is done to their results, which
# their costs leave out, is little beside them.
COUNTED: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "activation": ((MATRIX, MATRIX, SEED), {"kind": "silu", "rate": 0.1}),
    "activation_grad": ((MATRIX, MATRIX, None, None, MATRIX), {"kind": "gelu_tanh"}),
    "all_gather": ((MATRIX,), {}),
    "all_gather_matmul": ((MATRIX, f32(1024, 512)), {}),
    "all_to_all": ((MATRIX,), {}),
    "attention": ((HEADS, HEADS, HEADS), {}),
    "attention_grad": ((HEADS, HEADS, HEADS, *(None,) * 6, HEADS, f32(2, 2, 128), HEADS), {}),
    "causal_conv1d": ((f32(4, 1024, 64), f32(4, 64)), {}),
    "conv2d": ((f32(2, 16, 16, 32), f32(3, 3, 32, 48)), {"padding": "VALID"}),
    "cross_entropy": ((f32(64, 1024), f32(1024, 256), i32(64)), {}),
    "cross_entropy_and_grad": ((f32(64, 1024), f32(1024, 256), i32(64), f32(64)), {}),
    "cross_entropy_grad": ((f32(64, 1024), f32(1024, 256), i32(64), f32(64), f32(64), f32(64)), {}),
    "decode_int8": ((f32(256, 1024, dtype="int8"), f32(256, 4)), {}),
    "encode_int8": ((MATRIX, SEED), {}),
    "gemm": ((f32(2, 256, 512), f32(2, 512, 256)), {}),
    "gated_products": ((f32(64, 1024), f32(1024, 512)), {}),
    "gated_products_grad": ((f32(64, 1024), f32(256, 1024), f32(64, 512)), {}),
    "round_fp8": ((MATRIX, f32(1)), {}),
    "gated_fp8": ((MATRIX, MATRIX, f32(1)), {}),
    "gated_fp8_grad": ((MATRIX, MATRIX, MATRIX, f32(2)), {}),
    "few_rows": ((f32(8, 1024), f32(512, 1024)), {}),
    "summed_row": ((f32(4, 8, 1024), f32(8, 1024), f32(1024), f32(512, 1024)), {}),
    "between_attentions": (
        (MATRIX, MATRIX, f32(1024, 1024), VECTOR, f32(4096, 1024), f32(1024, 2048), VECTOR, f32(512, 1024)),
        {},
    ),
    "grouped_gated_gemm": ((f32(64, 2048), f32(1, 2048, 128), f32(1, 2048, 128), i32(1)), {}),
    "grouped_gemm": ((f32(64, 1024), f32(1, 1024, 128), i32(1)), {}),
    "grouped_gemm_weights": ((f32(1024, 64), f32(1024, 128), i32(1)), {}),
    "linear_recurrence": ((f32(8, 1, 1024), f32(8, 1, 1024)), {}),
    "linear_recurrence_grad": ((f32(8, 1, 1024), f32(8, 1, 1024), None, f32(8, 1, 1024)), {}),
    "matmul_reduce_scatter": ((MATRIX, f32(1024, 512)), {}),
    "norm": ((MATRIX, VECTOR, VECTOR, MATRIX), {}),
    "norm_grad": ((MATRIX, VECTOR, None, None, ROWS, MATRIX), {"kind": "rms"}),
    "paged_attention": ((f32(64, 4, 512), f32(8, 16, 4, 512), f32(8, 16, 4, 512), i32(1, 8), i32(1), i32(2)), {}),
    "paged_write": (
        (f32(64, 12, 128), f32(8, 16, 256), f32(8, 16, 256), f32(64, 64), f32(64, 64), i32(64), i32(64)),
        {},
    ),
    "permute": ((MATRIX,), {}),
    "selective_scan": ((STEPS, STEPS, f32(256, 16), STATES, STATES), {}),
    "selective_scan_grad": ((STEPS, STEPS, f32(256, 16), STATES, STATES, *(None,) * 4, STEPS), {}),
}


def _xla_flops(call: Call) -> float:
    """XLA's count for the reference; a collective's inside shard_map, on a mesh of one."""
    if call.op.mesh_axes is None:
        traced = traced_reference(call)
    else:
        reference, everywhere = call.op.reference, (PartitionSpec(),) * len(call.args)
        mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
        one = jax.shard_map(
            lambda *arrays: reference(*arrays, **call.specified), mesh=mesh, in_specs=everywhere,
            out_specs=PartitionSpec(), check_vma=False,
        )  # fmt: skip
        traced = jax.jit(one).trace(*call.args)
    # -1 says that it knows of none.
    return max(0.0, float((traced.lower().cost_analysis() or {}).get("flops", 0.0)))


@pytest.mark.quick
@pytest.mark.parametrize("name", COUNTED)
def test_flops_are_what_xla_counts_for_the_reference(name: str) -> None:
    operands, params = COUNTED[name]
    call = lookup(name).call(*operands, target=CPU, **params)
    assert call.op.cost(call).flops == pytest.approx(_xla_flops(call), rel=TOLERANCE)


def _eqns(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for param in eqn.params.values():
            inner = getattr(param, "jaxpr", param)
            if hasattr(inner, "eqns"):
                yield from _eqns(inner)


def _in_transforms(call: Call) -> float:
    """The customary 5 n log2 n for each transform that the reference makes, half of it for a real one, and of complex
    numbers 6 operations a product and 2 a sum. XLA counts 8 n log2 n, and a complex product as one."""
    total = 0.0
    for eqn in _eqns(traced_reference(call).jaxpr.jaxpr):
        read, made = eqn.invars[0].aval, eqn.outvars[0].aval
        if eqn.primitive.name == "fft":
            n = math.prod(eqn.params["fft_lengths"])
            real = "float32" in (read.dtype, made.dtype)
            points = max(read.size, made.size) if not real else (read if read.dtype == "float32" else made).size
            total += (2.5 if real else 5.0) * points * math.log2(n)
        elif made.dtype == "complex64" and made.shape and eqn.primitive.name in ("mul", "reduce_sum"):
            # By a number alone it is a norm's scale.
            scaled = any(not getattr(atom.aval, "shape", ()) for atom in eqn.invars)
            total += 0.0 if scaled else 6.0 * made.size if eqn.primitive.name == "mul" else 2.0 * read.size
    return total


def _counted(fn: Callable[..., Any], *args: Any) -> float:
    return float((jax.jit(fn).lower(*args).cost_analysis() or {})["flops"])


def _chunked(name: str) -> Callable[..., Any]:
    """The implementation in plain JAX."""
    return functools.partial(lookup(name).implementations["xla"].fn, return_final_state=False)


def _ssd_backward(call: Call) -> float:
    """XLA's count for the chunked form's gradient, where the forward pass keeps what that needs."""

    def gradient(d_out: Any, *operands: Any) -> Any:
        return jax.vjp(_chunked("ssd"), *operands)[1](d_out)

    with mock.patch("jax.checkpoint", lambda fn: fn):
        return _counted(gradient, call.need("d_out"), *call.args[:4])


LENGTH = 1 << 14
SIGNALS = f32(2, 3, LENGTH)
CHUNKS = (f32(1, 128, 2, 256), f32(1, 128, 2), f32(1, 128, 2, 256), f32(1, 128, 2, 256))

# Op -> why XLA's count of the reference is not the measure, operands and parameters, and what is.
OTHERWISE: dict[str, tuple[str, tuple[Any, ...], dict[str, Any], Callable[[Call], float]]] = {
    **{
        name: ("XLA counts 8 n log2 n for a transform, not the customary 5", operands, params, _in_transforms)
        for name, operands, params in (
            ("fft", (f32(4, LENGTH), f32(4, LENGTH)), {}),
            ("rfft", (f32(4, LENGTH),), {}),
            ("fft_filter", (SIGNALS, SIGNALS, f32(3, 2 * LENGTH), f32(3, 2 * LENGTH)), {}),
            ("causal_filter", (SIGNALS, f32(3, LENGTH)), {}),
            ("causal_taps", (SIGNALS, SIGNALS), {"taps": LENGTH}),
            ("long_conv", (f32(2, LENGTH, 3), f32(LENGTH, 3)), {}),
        )
    },
    "irfft": (
        "the reference is the definition, n² operations; a transform back is as much work as one there",
        (f32(4, 513), f32(4, 513)),
        {"n": 1024},
        lambda call: lookup("rfft").cost(lookup("rfft").call(f32(4, 1024))).flops,
    ),
    **{
        name: (
            "XLA counts as if two devices each added the whole operand; in a ring one adds what it passes on",
            (f32(1024, 64),),
            {"devices": 4},
            lambda call: 3 / 4 * 1024 * 64,
        )
        for name in ("all_reduce", "reduce_scatter")
    },
    "route": (
        "XLA counts nothing for top_k: here four operations an expert and choice",
        (f32(256, 256),),
        {"top_k": 2},
        lambda call: _xla_flops(call) + 4 * 256 * 256 * 2,
    ),
    "nearest_code": (
        "the reference takes differences, a code at a time; the work is the product of the expanded squares",
        (f32(64, 512), f32(32, 512)),
        {},
        lambda call: _counted(lambda rows, codes: rows @ codes.T, *call.args),
    ),
    "causal_conv1d_grad": (
        "XLA counts a sum for each tap's lone product; the inputs' share and the filters' are a forward pass each",
        (f32(4, 1024, 64), f32(4, 64), None, None, f32(4, 1024, 64)),
        {},
        lambda call: 2 * _xla_flops(lookup("causal_conv1d").call(*call.args[:2], target=CPU)),
    ),
    "ssd": (
        "the reference walks through time; the work is that of chunks",
        CHUNKS,
        {},
        lambda call: _counted(_chunked("ssd"), *CHUNKS),
    ),
    "ssd_grad": (
        "the reference walks through time; the work is that of chunks",
        (*CHUNKS, None, None, None, CHUNKS[0]),
        {},
        _ssd_backward,
    ),
    "gated_linear_attention": (
        "the reference walks through time; the work is the products of chunks, the decays of their pairs apart",
        (f32(1, 128, 2, 64), f32(1, 128, 2, 64), f32(1, 128, 2, 64), f32(1, 128, 2, 64)),
        {},
        lambda call: sum(flops for flops, _ in products(jax.make_jaxpr(_chunked(call.op.name))(*call.args[:4]))),
    ),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_flops_where_xla_counts_something_else(name: str) -> None:
    _, operands, params, expected = OTHERWISE[name]
    call = lookup(name).call(*operands, target=CPU, **params)
    assert call.op.cost(call).flops == pytest.approx(expected(call), rel=TOLERANCE)


@pytest.mark.quick
def test_every_op_is_counted() -> None:
    ours = {name for name, op in registry().items() if op.reference.__module__.startswith("capibara.")}
    assert not COUNTED.keys() & OTHERWISE.keys()
    assert ours == COUNTED.keys() | OTHERWISE.keys()


@pytest.mark.parametrize("name", COUNTED)
def test_products_are_matrix_work_and_the_rest_is_not(name: str) -> None:
    operands, params = COUNTED[name]
    call = lookup(name).call(*operands, target=CPU, **params)
    cost = call.op.cost(call)
    # One filter a channel is a sum of a few taps, though the reference writes it as a convolution.
    summed = name == "causal_conv1d"
    multiplies = call.op.mesh_axes is None and any(products(traced_reference(call).jaxpr)) and not summed
    assert (cost.matrix_flops > 0) == (multiplies or "matmul" in name)
    both = name in ("summed_row", "between_attentions")  # a norm, and the product of it
    assert (cost.vector_flops > 0) == (both or (cost.flops > 0 and cost.matrix_flops == 0))


def _roofline(case: Case, name: str, which: Chip) -> float:
    cost = lookup(name).cost(lookup(name).call(*case.args(), target=_target(which), **case.params))
    products_seconds = cost.matrix_flops / which.product_flops(cost.dtype)
    return max(products_seconds, cost.vector_flops / which.vector_flops, cost.bytes / which.hbm_bandwidth)


def _target(which: Chip) -> Target:
    return Target(which.platform, which.device_kinds[0])


@pytest.mark.quick(cases="all")
@pytest.mark.parametrize("which", CHIPS, ids=lambda which: which.name)
def test_predictions_lie_between_the_roofline_and_ten_times_it(which: Chip) -> None:
    looked = 0
    for name, op in registry().items():
        for case in (case for case in op.cases if "bench" in case.tags):
            predicted = op_seconds(name, *case.args(), chip=which, **case.params)
            if predicted > 20e-6:
                looked += 1
                assert 1 <= predicted / _roofline(case, name, which) <= 10, (name, case.name)
    assert looked > 50


@pytest.mark.quick
def test_a_product_with_a_gather_runs_on_the_matrix_units() -> None:
    """2.2 Tflop on each of 16 chips, at 0.88 of 275 TFLOP/s."""
    x, w = f32(2048, 8192, dtype="bfloat16"), f32(8192, 4096, dtype="bfloat16")
    gather = {"devices": 16, "chip": "v4"}
    assert op_seconds("all_gather_matmul", x, w, **gather) == pytest.approx(9e-3, rel=0.05)
    rows = f32(16 * 2048, 8192, dtype="bfloat16")
    assert op_seconds("matmul_reduce_scatter", rows, w, **gather) == pytest.approx(9e-3, rel=0.05)
    assert op_seconds("gemm", rows, w, chip=chip("v4")) == pytest.approx(9e-3, rel=0.05)


@pytest.mark.quick
def test_links_count_where_they_take_longer_than_the_work() -> None:
    """32 MiB summed over 16 chips: 15/16 of it sent twice, both ways round a ring of 45 GB/s links."""
    x = f32(4096, 4096, dtype="bfloat16")
    shared = {"devices": 16, "axis_name": ("x",)}
    assert op_seconds("all_reduce", x, chip="v4", **shared) == pytest.approx(2 * 15 / 16 * 2**25 / 90e9)
    # A product that is as long for as many bytes is not: there the links are done first.
    small, w = f32(256, 4096, dtype="bfloat16"), f32(4096, 1024, dtype="bfloat16")
    sent = 15 * 2 * small.size / 90e9
    assert op_seconds("all_gather_matmul", small, w, chip="v4", **shared) == pytest.approx(sent)
    wide = f32(4096, 8192, dtype="bfloat16")
    assert op_seconds("all_gather_matmul", small, wide, chip="v4", **shared) > 2 * sent
    # Eight GPUs have a switch: 7/8 of it twice, at the bandwidth of one.
    gpus = 2 * 7 / 8 * 2**25 / chip("h200").ici_link_bandwidth
    assert op_seconds("all_reduce", x, chip="h200", devices=8, axis_name=("x",)) == pytest.approx(gpus)


@pytest.mark.quick
def test_the_cost_model_names_no_op() -> None:
    # What chips exchange has the collectives' own names.
    names = {name for name, op in registry().items() if op.family != "collective"}
    room = Path(capibara.cost.__file__).parent
    for path in (*room.glob("*.py"), room.parent / "program" / "op_calls.py"):
        literals = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
        assert not names & literals, path.name


def test_what_an_op_reaches_says_where_it_comes_from() -> None:
    for name, op in registry().items():
        for which in CHIPS:
            for case in op.cases[:1]:
                reached = op.efficiency(op.call(*case.args(), target=_target(which), **case.params), which)
                assert reached.source.startswith(("measured: ", "predicted: ")), name
                assert not reached.source.startswith("measured") or which.name == "h200", name
