"""TPUv4Kernels: many tensors in few launches, and the figures that the object gives of itself."""

from __future__ import annotations

import copy
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.core.kernels import TPUv4Kernels
from capibara.kernels import gelu, layer_norm, rms_norm
from capibara.kernels.core.dispatch import recording
from capibara.surface import workloads
from capibara.surface.figures import work_of

RNG = np.random.default_rng(0)


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


TENSORS = [normal(2, 3, 32), normal(7, 32), normal(5, 48), normal(32)]
WEIGHT, BIAS, RIGHT = normal(32), normal(32), normal(32, 16)

exactly = TPUv4Kernels("float32")

OPERATIONS: dict[str, tuple[Any, Any, int]] = {
    # The tensors' own operation, its parameters, and how many launches the four tensors need.
    "layer_norm": (lambda x: layer_norm(x, eps=1e-3), {"eps": 1e-3}, 2),
    "rms_norm": (lambda x: rms_norm(x, eps=1e-3), {"eps": 1e-3}, 2),
    "gelu": (lambda x: gelu(x, approximate=True), {"approximate": True}, 1),
    "softmax": (lambda x: jax.nn.softmax(x, -1), None, 2),
}


def launches(run: Any) -> int:
    with recording() as found:
        run()
    return len(found)


@pytest.mark.quick
@pytest.mark.parametrize("operation", OPERATIONS)
def test_tensors_that_can_go_together_do(operation: str) -> None:
    plain, parameters, wanted = OPERATIONS[operation]

    def run(together: bool, tensors: Any = TENSORS) -> Any:
        return exactly.batch_operations(operation, tensors, parameters, parallel_execution=together)

    made = run(True)
    for got, alone, x in zip(made, run(False), TENSORS, strict=True):
        assert got.shape == x.shape
        # Rows and numbers are independent: joining them changes the vectors' order at the most, so a few roundings.
        np.testing.assert_allclose(got, plain(x), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(got, alone, rtol=1e-5, atol=1e-6)
    if operation == "softmax":  # no op: its exponentials are counted instead
        counts = [str(jax.make_jaxpr(lambda *xs, t=t: run(t, xs))(*TENSORS)).count("= exp ") for t in (True, False)]
    else:
        counts = [launches(lambda t=t: run(t)) for t in (True, False)]
    assert counts == [wanted, len(TENSORS)]


@pytest.mark.quick
def test_one_program_or_one_for_each_tensor() -> None:
    def programs(together: bool) -> int:
        run = lambda *xs: exactly.batch_operations("gelu", xs, parallel_execution=together)  # noqa: E731
        return sum(e.primitive.name in ("jit", "pjit") for e in jax.make_jaxpr(run)(*TENSORS).eqns)

    assert (programs(True), programs(False)) == (1, len(TENSORS))


def test_vectors_shared_or_of_each_tensor() -> None:
    tensors = [TENSORS[0], TENSORS[1], TENSORS[3]]
    shared = {"weight": WEIGHT, "bias": BIAS}
    made = exactly.batch_operations("layer_norm", tensors, shared)
    for got, x in zip(made, tensors, strict=True):
        np.testing.assert_allclose(got, layer_norm(x, WEIGHT, BIAS), rtol=1e-5, atol=1e-5)
    assert launches(lambda: exactly.batch_operations("layer_norm", tensors, shared)) == 1

    alike = [normal(4, 32) for _ in range(3)]
    each = [{"weight": normal(32), "bias": normal(32)} for _ in alike]
    run = lambda: exactly.batch_operations("layer_norm", alike, each)  # noqa: E731
    for got, x, own in zip(run(), alike, each, strict=True):
        np.testing.assert_allclose(got, layer_norm(x, own["weight"], own["bias"]), rtol=1e-5, atol=1e-5)
    # Vectors of their own, and one shape: a stack. Other shapes, or another eps: apart.
    assert launches(run) == 1
    assert launches(lambda: exactly.batch_operations("layer_norm", [*alike[:2], normal(5, 32)], each)) == 2
    apart = [dict(shared), {**shared, "eps": 1e-2}, dict(shared)]
    assert launches(lambda: exactly.batch_operations("layer_norm", tensors, apart)) == 2
    # An array is its rows along the first axis.
    stack = normal(3, 4, 32)
    for got, x in zip(exactly.batch_operations("rms_norm", stack), stack, strict=True):
        np.testing.assert_allclose(got, rms_norm(x), rtol=1e-5, atol=1e-6)


def test_products_with_one_right_side_or_many() -> None:
    lefts = [normal(5, 32), normal(2, 3, 32), normal(4, 32)]
    pairs = [(normal(6, 32), normal(32, 8)) for _ in range(2)] + [(normal(2, 3, 32), normal(2, 32, 8))]
    batches = [(normal(2, 3, 32), normal(32, 8)) for _ in range(2)]
    for inputs, parameters, wanted in ((lefts, {"b": RIGHT}, 1), (pairs, None, 2), (batches, None, 1)):
        run = lambda together=True, i=inputs, p=parameters: exactly.batch_operations("matmul", i, p, together)  # noqa: E731
        for got, one in zip(run(), inputs, strict=True):
            a, b = one if isinstance(one, tuple) else (one, RIGHT)
            # sqrt(32) units of float32, four for an unlucky draw, of sums of about sqrt(32).
            np.testing.assert_allclose(
                got, np.asarray(a, np.float64) @ np.asarray(b, np.float64), atol=128 * 2**-24 * 6
            )
        assert launches(run) == wanted
        for got, alone in zip(run(), run(False), strict=True):
            np.testing.assert_allclose(got, alone, atol=128 * 2**-24 * 6)
    assert TPUv4Kernels("bfloat16").batch_operations("matmul", pairs)[0].dtype == jnp.bfloat16
    assert exactly.batch_operations("gelu", TENSORS, precision="bfloat16")[0].dtype == jnp.bfloat16


def test_what_is_joined_in_fp8_is_rounded_by_itself() -> None:
    kernels = TPUv4Kernels("fp8")
    big, small = jnp.ones((4, 32)), jnp.full((4, 32), 1e-7)
    right = jnp.ones((32, 8))
    # By rows with one right side, and as a stack of pairs: either way a neighbour's scale would round `small` to 0.
    for inputs, parameters in (
        ([big, small], {"b": right}),
        ([(big, right), (small, normal(32, 8))], None),
        ([(big, right), (big, 1e-7 * right)], None),
    ):
        joined, alone = (kernels.batch_operations("matmul", inputs, parameters, together) for together in (True, False))
        for one, other in zip(joined, alone, strict=True):
            assert float(jnp.abs(other).max()) > 0
            np.testing.assert_array_equal(one, other)


def test_gradients_levels_and_nothing_at_all() -> None:
    def loss(w: Any, together: bool) -> Any:
        parts = exactly.batch_operations("layer_norm", [TENSORS[0], TENSORS[1]], {"weight": w}, together)
        return sum(jnp.square(part).sum() for part in parts)

    slope = jax.jit(jax.grad(loss), static_argnums=1)
    # Sums over 13 rows of squares, some hundreds: a few of their float32 units.
    np.testing.assert_allclose(slope(WEIGHT, True), slope(WEIGHT, False), rtol=1e-5, atol=1e-4)
    plain = TPUv4Kernels("float32", "none", enable_xla_fusion=False)
    with recording() as found:
        text = str(jax.make_jaxpr(lambda *xs: plain.batch_operations("gelu", xs))(*TENSORS))
    assert [selection.implementation for selection in found] == ["reference"]
    assert text.count("optimization_barrier") == 2
    assert exactly.batch_operations("gelu", []) == []


@pytest.mark.quick
def test_mistakes_of_batches() -> None:
    for arguments, said in (
        (("relu", TENSORS), "Unknown operation_type 'relu'.*'layer_norm', 'rms_norm', 'softmax', 'gelu', 'matmul'"),
        (("gelu", TENSORS, {"eps": 1.0}), "Unknown parameter of gelu 'eps'"),
        (("layer_norm", TENSORS, [{}]), "for each tensor, or one for all.*1 for 4"),
        (("matmul", TENSORS), r"pairs \(a, b\).*no b"),
        (("matmul", [(WEIGHT,)]), "1 arrays"),
        (("gelu", [jnp.zeros(3, jnp.int32)]), r"takes float arrays.*i32\[3\]"),
        (("gelu", 3.0), "inputs is a list of tensors"),
        (("gelu", [None]), "takes arrays.*NoneType.*pass an array"),
        (("layer_norm", TENSORS, {"eps": "a"}), "eps is a number.*'a'"),
    ):
        with pytest.raises(ValueError, match=said):
            exactly.batch_operations(*arguments)
    with pytest.raises(ValueError, match=r"matmul takes arrays.*b of type NoneType"):
        exactly.optimized_matmul(RIGHT, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"einsum takes arrays.*operand 1 of type NoneType"):
        exactly.einsum_optimize("ij,jk->ik", [RIGHT, None])
    # A number is a number, whoever made it.
    given, plain = (exactly.batch_operations("layer_norm", TENSORS, {"eps": e}) for e in (jnp.float32(0.5), 0.5))
    np.testing.assert_array_equal(given[0], plain[0])


@pytest.mark.quick
def test_memory_in_use_follows_the_arrays() -> None:
    before = exactly.get_memory_usage()
    held = jnp.ones((1024, 1024), jnp.float32)
    after = exactly.get_memory_usage()
    assert after - before == pytest.approx(2**22 / 2**30, rel=0.01)
    del held
    assert exactly.get_memory_usage() < after


def test_tflops_are_of_the_last_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    from capibara.surface import figures as measured

    monkeypatch.setattr(measured, "seconds_of", lambda fn, **kwargs: (jax.block_until_ready(fn(**kwargs)), 1e-6)[1])
    kernels = TPUv4Kernels("float32", seed=4)
    assert math.isnan(kernels.get_tflops())
    a = normal(16, 32)
    jax.jit(lambda a: kernels.optimized_matmul(a, RIGHT))(a)
    assert math.isnan(kernels.get_tflops()), "inside of jit nothing ran yet"
    kernels.optimized_matmul(a, RIGHT)
    # 2·M·N·K operations in the microsecond that the clock above says.
    product = 2 * 16 * 32 * 16 / 1e-6 / 1e12
    assert kernels.get_tflops() == pytest.approx(product)
    kernels.einsum_optimize("ij,jk->ik", [a, RIGHT], memory_efficient=True, memory_limit_bytes=64)
    assert kernels.get_tflops() == pytest.approx(product)
    rows = normal(16, 32)
    kernels.fused_gelu_dropout(rows, dropout_rate=0.5, inplace=True)
    assert rows.is_deleted()
    assert 0 < kernels.get_tflops() < product
    q = normal(1, 2, 16, 8)
    kernels.flash_attention(q, q, q, attention_mask=jnp.ones((1, 16), bool), dropout_rate=0.1)
    assert kernels.get_tflops() > 0
    kernels.fast_layer_norm(normal(16, 32), eps=np.float32(1e-3))  # type: ignore[arg-type]
    assert kernels.get_tflops() > 0, "a number of NumPy's is no operand to draw anew"
    kernels.batch_operations("softmax", TENSORS)  # no op: by the compiler's count
    assert kernels.get_tflops() > 0
    # Repeats drew none of the object's keys: two calls above did.
    other = TPUv4Kernels("float32", seed=4)
    for _ in range(2):
        other.draws.next()
    np.testing.assert_array_equal(*(jax.random.key_data(k.draws.next()) for k in (kernels, other)))
    assert math.isnan(copy.deepcopy(kernels).get_tflops())


@pytest.mark.quick
def test_tflops_are_measured() -> None:
    kernels = TPUv4Kernels("float32")
    kernels.optimized_matmul(normal(64, 64), normal(64, 64))
    rate = kernels.get_tflops()
    # From a thousandth of what one slow core does, to more than any processor.
    assert 1e-6 < rate < 1e4
    assert kernels.get_tflops() == rate


def test_a_benchmark_of_named_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["optimized_matmul", "fused_gelu_dropout"]
    found = TPUv4Kernels("float32").benchmark_kernels(names)
    assert list(found) == names
    for name, figures in found.items():
        assert set(figures) == {"throughput", "latency_ms", "memory_efficiency"}
        assert all(0 < figure < math.inf for figure in figures.values()), (name, figures)
    work = 2 * 256**3
    matmul = found["optimized_matmul"]
    assert matmul["throughput"] == pytest.approx(work / (matmul["latency_ms"] * 1e-3) / 1e12)

    # Every kernel has a workload that its method takes; the clock is for the two above.
    monkeypatch.setattr(workloads, "seconds_of", lambda fn, **kwargs: (jax.block_until_ready(fn(**kwargs)), 1e-3)[1])
    kernels = TPUv4Kernels()
    every = kernels.benchmark_kernels()
    assert list(every) == list(workloads.WORKLOADS)
    assert math.isnan(kernels.get_tflops()), "a benchmark is not a kernel that the object ran"
    with pytest.raises(ValueError, match=r"Unknown kernel 'sort'.*'flash_attention', 'optimized_matmul'"):
        kernels.benchmark_kernels(["sort"])
    with pytest.raises(ValueError, match=r"takes a list of names.*pass \['optimized_matmul'\]"):
        kernels.benchmark_kernels("optimized_matmul")  # type: ignore[arg-type]


def test_large_workloads_are_calls_that_the_methods_take() -> None:
    kernels = TPUv4Kernels()
    for name, workload in workloads.WORKLOADS.items():
        shape = lambda s: jax.ShapeDtypeStruct(s, "bfloat16")  # noqa: E731
        arrays = {k: list(map(shape, s)) if isinstance(s, list) else shape(s) for k, s in workload.large.items()}
        if workload.draws:
            arrays["rng"] = jax.random.key(0)
        assert work_of(getattr(kernels, name), **arrays, **workload.options).flops > 1e8, name
