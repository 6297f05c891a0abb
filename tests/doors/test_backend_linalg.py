"""capibara.jax.tpu_v4: the linear algebra object and the families' second path, used as the documents do."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import capibara.kernels.ops.linalg
from capibara.core.kernels import TPUv4Kernels
from capibara.jax.tpu_v4 import backend, kernels
from capibara.jax.tpu_v4.backend import TpuV4LinalgOps
from capibara.kernels import explain, target
from capibara.kernels.core.families import FAMILIES

RNG = np.random.default_rng(0)
A = jnp.asarray(RNG.normal(size=(64, 500)), jnp.float32)
B = jnp.asarray(RNG.normal(size=(500, 32)), jnp.float32)
EXACT = np.asarray(A, np.float64) @ np.asarray(B, np.float64)

ops = TpuV4LinalgOps()


def error(got: Any, want: Any = EXACT) -> float:
    return float(np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want))


# Rounding both operands to bfloat16 (unit 2**-9) costs about that in norm, and a bfloat16 result once more;
# float32 costs sqrt(500) of its units; fp8 has 4 significant bits, hence 2**-4 for an operand at the most.
LIMITS = {"bfloat16": 3 * 2**-9, "mixed": 2 * 2**-9, "float32": 4 * 500**0.5 * 2**-24, "fp8": 2 * 2**-4}
TYPES = {"bfloat16": "bfloat16", "mixed": "float32", "float32": "float32", "fp8": "bfloat16"}


@pytest.mark.quick(cases=2)
@pytest.mark.parametrize("chunk_size", [None, 200])
@pytest.mark.parametrize("precision", LIMITS)
@pytest.mark.filterwarnings("ignore:precision='fp8'")
def test_a_product_in_each_precision(precision: str, chunk_size: int | None) -> None:
    got = ops.optimized_gemm(a=A, b=B, precision=precision, use_async=True, chunk_size=chunk_size)
    assert got.dtype == TYPES[precision]
    assert error(got) < LIMITS[precision]


def test_the_precisions_differ() -> None:
    """A keyword that did nothing would make these equal."""
    found = {p: error(ops.optimized_gemm(A, B, precision=p)) for p in ("bfloat16", "mixed", "float32")}
    assert found["float32"] * 100 < found["mixed"] < found["bfloat16"]


@pytest.mark.quick
def test_chunks_change_the_program() -> None:
    def program(chunk_size: int | None) -> str:
        return str(jax.make_jaxpr(lambda a, b: ops.optimized_gemm(a, b, chunk_size=chunk_size))(A, B))

    assert "scan" not in program(None)
    assert "length=3" in program(128)
    assert "length=2" in program(200)
    x = jax.ShapeDtypeStruct((4096, 4096), "bfloat16")
    with target("tpu", "TPU v4"):
        (chosen,) = explain(ops.optimized_gemm, x, x, chunk_size=1024).selections
    assert chosen.config.block_k == 1024


@pytest.mark.quick
def test_waiting_is_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[Any] = []
    real = jax.block_until_ready
    monkeypatch.setattr(jax, "block_until_ready", lambda x: (waited.append(x), real(x))[1])
    ops.optimized_gemm(A, B, use_async=True)
    assert not waited
    got = ops.optimized_gemm(A, B, use_async=False)
    assert len(waited) == 1
    assert got.is_ready()
    # Inside of a trace there is nothing to wait for, and both are the same program.
    one, other = (jax.make_jaxpr(lambda a, b, w=w: ops.optimized_gemm(a, b, use_async=w))(A, B) for w in (True, False))
    assert str(one) == str(other)


def test_batches_an_epilogue_and_gradients() -> None:
    batch = jnp.stack([A, A + 1])
    got = ops.optimized_gemm(batch, B, precision="float32", chunk_size=128, bias=jnp.ones(32), activation="silu")
    z = np.asarray(batch, np.float64) @ np.asarray(B, np.float64) + 1
    assert error(got, z / (1 + np.exp(-z))) < 2 * LIMITS["float32"]
    grad = jax.grad(lambda a: ops.optimized_gemm(a, B, precision="float32", chunk_size=100).sum())(A)
    want = np.broadcast_to(np.asarray(B, np.float64).sum(1), A.shape)
    assert error(grad, want) < LIMITS["float32"]


def test_singular_values_by_a_sketch_or_exactly() -> None:
    """A spectrum of 1/i: a sketch comes near the best rank 4 matrix, and only the exact method is it."""
    spectrum = 1 / np.arange(1, 61.0)
    u, v = (np.linalg.qr(RNG.normal(size=(n, 60)))[0] for n in (120, 60))
    matrix = jnp.asarray((u * spectrum) @ v.T, jnp.float32)
    best = np.linalg.norm(spectrum[4:])

    def left_out(**keywords: Any) -> float:
        u, s, vh = ops.fast_svd(matrix, compute_uv=True, rank=4, **keywords)
        return float(np.linalg.norm(np.asarray(matrix, np.float64) - np.asarray(u * s, np.float64) @ np.asarray(vh)))

    assert left_out(use_randomized=False) < best * (1 + 1e-5)  # float32 rounding
    crude = left_out(use_randomized=True, power_iterations=0)
    assert best * (1 + 1e-3) < crude
    assert left_out(use_randomized=True) < min(crude, best * 1.05)
    with pytest.raises(ValueError, match="power_iterations are for a sketch"):
        ops.fast_svd(matrix, use_randomized=False, power_iterations=0)
    # Without a rank there is nothing to leave out.
    s = ops.fast_svd(matrix, compute_uv=False, use_randomized=True)
    np.testing.assert_allclose(s, spectrum, atol=1e-5)
    documented = ["self", "matrix", "compute_uv", "use_randomized", "rank"]
    assert list(inspect.signature(TpuV4LinalgOps.fast_svd).parameters)[:5] == documented


@pytest.mark.quick
def test_mistakes_and_what_is_not_there() -> None:
    with pytest.raises(ValueError, match=r"Unknown precision 'float8'.*'bfloat16', 'float32', 'mixed', 'fp8'"):
        ops.optimized_gemm(A, B, precision="float8")
    with pytest.raises(TypeError, match="no_such"):
        ops.optimized_gemm(A, B, no_such=1)
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = backend.Nothing
    documented = ["self", "a", "b", "precision", "use_async", "chunk_size"]
    assert list(inspect.signature(TpuV4LinalgOps.optimized_gemm).parameters)[:6] == documented


@pytest.mark.quick
def test_a_family_is_the_same_module_by_its_second_path() -> None:
    assert kernels.linalg is capibara.kernels.ops.linalg
    second = importlib.import_module("capibara.jax.tpu_v4.kernels.linalg")
    assert second is capibara.kernels.ops.linalg
    deep = importlib.import_module("capibara.jax.tpu_v4.kernels.linalg.gemm.api")
    assert deep is importlib.import_module("capibara.kernels.ops.linalg.gemm.api")
    from capibara.jax.tpu_v4.kernels.linalg import gemm

    assert gemm is capibara.kernels.gemm
    assert capibara.kernels.ops.linalg.__name__ == "capibara.kernels.ops.linalg"


def test_a_family_can_be_imported_by_its_second_path_first() -> None:
    code = (
        "import capibara.jax.tpu_v4.kernels.linalg.einsum as e, capibara.kernels.ops.linalg.einsum as f;"
        "from capibara.kernels import registry;"
        "print(e is f, 'gemm' in registry())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True True"


@pytest.mark.quick
def test_all_eight_families_are_there_and_no_other() -> None:
    eight = ["attention", "collective", "conv", "fft", "layers", "linalg", "scan", "vq"]
    assert sorted(FAMILIES) == eight
    for family in eight:
        assert getattr(kernels, family) is importlib.import_module(f"capibara.kernels.ops.{family}")
    with pytest.raises(AttributeError, match="no attribute 'sorting'"):
        _ = kernels.sorting
    assert dir(kernels) == sorted(FAMILIES)


@pytest.mark.quick
def test_a_call_is_the_one_that_tables_are_made_of() -> None:
    """A policy leaves no parameter that says nothing: it would hide what was measured for this call."""
    x = jax.ShapeDtypeStruct((64, 64), "float32")
    for precision, changed in (
        ("bfloat16", {}),
        ("mixed", {"out_dtype": "float32"}),
        ("float32", {"precision": "highest"}),
        (None, {}),
    ):
        (found,) = explain(ops.optimized_gemm, x, x, precision=precision).selections
        assert found.call.changed_params == changed
    kernels = TPUv4Kernels()
    for fn in (kernels.optimized_matmul, lambda a, b: kernels.einsum_optimize("ij,jk->ik", [a, b])):
        (found,) = explain(fn, x, x).selections
        assert found.call.changed_params == {}
        assert found.call.need("a").dtype == jnp.bfloat16
