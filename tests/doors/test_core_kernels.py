"""capibara.core.kernels.TPUv4Kernels: each keyword changes something that can be seen."""

from __future__ import annotations

import copy
import logging
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import capibara.core.kernels
import capibara.core.kernels.tpu_v4_wrappers
from capibara.core.kernels import TPUv4Kernels
from capibara.kernels import explain, interpret, target
from capibara.kernels.core import tables
from capibara.kernels.core.dispatch import recording
from capibara.kernels.core.spec import Implementation
from capibara.kernels.ops.linalg.gemm.api import GEMM
from capibara.kernels.ops.linalg.gemm.xla import xla
from capibara.surface import products as levels

RNG = np.random.default_rng(0)
A = jnp.asarray(RNG.normal(size=(24, 48)), jnp.float32)
B = jnp.asarray(RNG.normal(size=(32, 48)), jnp.float32)  # used transposed
EXACT = np.asarray(A, np.float64) @ np.asarray(B, np.float64).T
Q = jnp.asarray(RNG.normal(size=(2, 3, 10, 8)), jnp.float32)
K = jnp.asarray(RNG.normal(size=(2, 3, 12, 8)), jnp.float32)

# K = 48: sqrt(48) units of float32; bfloat16 rounds two operands and the result, 2**-9 each.
FLOAT32 = 4 * 48**0.5 * 2**-24
BFLOAT16 = 3 * 2**-9


def error(got: Any, want: Any = EXACT) -> float:
    assert got.shape == want.shape
    return float(np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want))


def product(kernels: TPUv4Kernels, **options: Any) -> Any:
    return lambda a, b: kernels.optimized_matmul(a, b, transpose_b=True, **options)


@pytest.mark.quick
def test_used_as_documented() -> None:
    kernels = TPUv4Kernels(
        precision="bfloat16",
        optimization_level="aggressive",
        enable_xla_fusion=True,
        memory_layout_optimization=True,
    )
    got = kernels.optimized_matmul(
        a=A, b=B, transpose_a=False, transpose_b=True, precision="bfloat16", algorithm="tpu_optimized"
    )
    assert got.dtype == jnp.bfloat16
    assert error(got) < BFLOAT16
    scores = kernels.einsum_optimize(
        equation="bhnd,bhkd->bhnk", operands=[Q, K], optimize="optimal", memory_efficient=True
    )
    assert scores.dtype == jnp.bfloat16
    assert error(scores, np.einsum("bhnd,bhkd->bhnk", *(np.asarray(x, np.float64) for x in (Q, K)))) < BFLOAT16
    assert capibara.core.kernels.tpu_v4_wrappers.TPUv4Kernels is capibara.core.kernels.TPUv4Kernels
    assert capibara.core.kernels is capibara.core.__getattr__("kernels")


@pytest.mark.quick
def test_precision_is_the_results_type_and_error() -> None:
    errors = {}
    for name, dtype in (("bfloat16", "bfloat16"), ("mixed", "float32"), ("float32", "float32")):
        got = product(TPUv4Kernels(precision=name))(A, B)
        assert got.dtype == dtype
        errors[name] = error(got)
        # A call's own precision goes before the object's.
        assert product(TPUv4Kernels(precision="float32"), precision=name)(A, B).dtype == dtype
        assert TPUv4Kernels(precision=name).einsum_optimize("ij,kj->ik", [A, B]).dtype == dtype
    assert errors["float32"] < FLOAT32 < errors["mixed"] < errors["bfloat16"] < BFLOAT16


@pytest.mark.quick
@pytest.mark.parametrize(
    ("level", "implementation"),
    [("none", "reference"), ("basic", "xla"), ("balanced", "xla"), ("aggressive", "xla")],
)
def test_a_level_decides_what_runs(level: str, implementation: str) -> None:
    kernels = TPUv4Kernels(optimization_level=level, precision="float32")
    found = explain(product(kernels), A, B)
    assert found.implementation == implementation
    asked = "it was asked for by name" in str(found)
    assert asked == (level in ("none", "basic"))
    assert explain(lambda a, b: kernels.einsum_optimize("ij,kj->ik", [a, b]), A, B).implementation == implementation
    assert error(product(kernels)(A, B)) < FLOAT32
    # "none" is not compiled as one program.
    outer = [e.primitive.name for e in jax.make_jaxpr(product(kernels))(A, B).eqns]
    assert ("jit" in outer or "pjit" in outer) == (level != "none")


@pytest.fixture
def twin() -> Iterator[None]:
    """A second implementation for this machine, so that there is something to tune."""
    GEMM.implement(Implementation("twin", xla))
    yield
    del GEMM.implementations["twin"]
    GEMM.runners.clear()


@pytest.mark.usefixtures("twin")
def test_aggressive_tunes_a_shape_at_first_sight(monkeypatch: pytest.MonkeyPatch) -> None:
    from capibara.kernels.lab import tuning

    tuned: list[Any] = []
    nothing = types.SimpleNamespace(best=None, path=None)
    monkeypatch.setattr(
        tuning, "autotune", lambda op, *arrays, params: tuned.append((op.name, arrays, params)) or nothing
    )
    levels._SEEN.clear()
    levels._TUNED.clear()
    for level in ("none", "basic", "balanced"):
        product(TPUv4Kernels(optimization_level=level))(A, B)
    assert not tuned
    kernels = TPUv4Kernels(optimization_level="aggressive")
    for _ in range(2):
        product(kernels)(A, B)
    ((name, arrays, params),) = tuned
    assert name == "gemm"
    assert [None if x is None else (x.shape, x.dtype.name) for x in arrays] == [
        ((24, 48), "bfloat16"),
        ((32, 48), "bfloat16"),
        None,
        None,
    ]
    assert params["transpose_b"] is True
    product(kernels, algorithm="xla")(A + 1, B)
    jax.jit(product(kernels))(A[:3], B)
    with target("tpu"):
        explain(product(kernels), A[:5], B)
    assert len(tuned) == 1
    kernels.einsum_optimize("bhnd,bhkd->bhnk", [Q, K])
    assert len(tuned) == 2


@pytest.mark.usefixtures("twin")
def test_what_was_tuned_is_what_runs() -> None:
    levels._SEEN.clear()
    levels._TUNED.clear()
    got = product(TPUv4Kernels(optimization_level="aggressive"))(A[:8], B)
    assert error(got, EXACT[:8]) < BFLOAT16
    found = explain(product(TPUv4Kernels(optimization_level="balanced")), A[:8], B)
    assert "user's table measured it fastest for this call" in str(found)


@pytest.mark.usefixtures("twin", "nothing_said_yet")
def test_tuning_is_said_with_its_file_and_seconds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Loudly once, and not again in a later process that finds the answer in the cache."""
    monkeypatch.setenv("CAPIBARA_CACHE_DIR", str(tmp_path))
    tables.forget()
    levels._SEEN.clear()
    levels._TUNED.clear()
    kernels = TPUv4Kernels(optimization_level="aggressive")
    with caplog.at_level(logging.INFO, "capibara.kernels"):
        product(kernels)(A[:4], B)
        product(kernels)(A[:2], B)
    said = [(one.levelname, one.getMessage()) for one in caplog.records]
    assert [level for level, _ in said] == ["WARNING", "WARNING", "INFO", "INFO"], said
    (written,) = tmp_path.rglob("gemm.json")
    before, after = said[0][1], said[1][1]
    assert before.startswith("gemm(bf16[4,48] bf16[32,48]")
    assert f"keeps the answer in {written}" in before
    assert "optimization_level='balanced' does neither" in before
    assert re.search(r"tuned in [\d.]+ s: fastest is \w+; written to " + re.escape(str(written)), after)
    caplog.clear()
    stamp = written.read_bytes()
    levels._SEEN.clear()
    levels._TUNED.clear()
    tables.forget()
    with caplog.at_level(logging.INFO, "capibara.kernels"):
        product(kernels)(A[:4], B)
        product(TPUv4Kernels(optimization_level="balanced"))(A[:7], B)
    assert not caplog.records
    assert written.read_bytes() == stamp


@pytest.mark.quick
def test_fusion_off_puts_barriers_around_a_product() -> None:
    epilogue = {"bias": jnp.ones(32), "activation": "gelu"}
    for options in ({}, epilogue):
        with target("tpu", "TPU v4"):  # on a CPU gemm has barriers of its own
            on, off = (
                str(jax.make_jaxpr(product(TPUv4Kernels(enable_xla_fusion=f), **options))(A, B)) for f in (True, False)
            )
        assert "optimization_barrier" not in on
        assert off.count("optimization_barrier") == 2
    with_it, without = (
        product(TPUv4Kernels(precision="float32", enable_xla_fusion=f), **epilogue)(A, B) for f in (True, False)
    )
    np.testing.assert_allclose(with_it, without, rtol=1e-5, atol=1e-5)

    def einsum(fuse: bool) -> Any:
        kernels = TPUv4Kernels(enable_xla_fusion=fuse)
        return lambda q, k: kernels.einsum_optimize("bhnd,bhkd->bhnk", [q, k])

    with target("tpu", "TPU v4"):
        assert "optimization_barrier" not in str(jax.make_jaxpr(einsum(True))(Q, K))
        assert "optimization_barrier" in str(jax.make_jaxpr(einsum(False))(Q, K))
    # Differentiable with barriers too.
    grad = jax.grad(lambda a: product(TPUv4Kernels("float32", enable_xla_fusion=False))(a, B).sum())(A)
    np.testing.assert_allclose(grad, np.broadcast_to(np.asarray(B).sum(0), A.shape), rtol=1e-5, atol=1e-5)


@pytest.mark.quick
def test_layout_optimisation_off_copies_the_transposed() -> None:
    for kernels, copies in (
        (TPUv4Kernels("float32"), 0),
        (TPUv4Kernels("float32", memory_layout_optimization=False), 1),
    ):
        assert str(jax.make_jaxpr(product(kernels))(A, B)).count("transpose[") == copies
        with recording() as found:
            product(kernels)(A, B)
        assert found[0].call.params["transpose_b"] is (copies == 0)
        scores = lambda q, k, kernels=kernels: kernels.einsum_optimize("bhnd,bhkd->bhnk", [q, k])  # noqa: E731
        assert str(jax.make_jaxpr(scores)(Q, K)).count("transpose[") == copies
        # The compiler does not fold it back: the copy is in what runs.
        text = jax.jit(product(kernels)).lower(A, B).compile().as_text()
        assert ("f32[48,32]" in text) == (copies == 1)
        assert error(product(kernels)(A, B)) < FLOAT32
        assert error(kernels.optimized_matmul(A.T, B.T, transpose_a=True)) < FLOAT32


@pytest.mark.quick
def test_an_algorithm_is_an_implementation() -> None:
    kernels = TPUv4Kernels(optimization_level="none", precision="float32")
    for algorithm, implementation in (
        ("xla", "xla"),
        ("reference", "reference"),
        ("tpu_optimized", "reference"),
    ):
        assert explain(product(kernels, algorithm=algorithm), A, B).implementation == implementation
    with interpret():
        assert explain(product(kernels, algorithm="pallas"), A, B).implementation == "pallas_tpu"
        # The kernel's blocks add up in float32 too.
        assert error(product(kernels, algorithm="pallas")(A, B)) < FLOAT32
    with target("gpu"):
        x = jax.ShapeDtypeStruct((256, 256), "bfloat16")
        chosen = explain(product(kernels, algorithm="pallas", precision="bfloat16"), x, x)
        assert chosen.implementation == "hopper"
    with pytest.raises(ValueError, match=r"'pallas_tpu' was asked for and cannot take this call"):
        product(kernels, algorithm="pallas")(A, B)


def test_memory_efficient_bounds_the_intermediates() -> None:
    kernels = TPUv4Kernels("float32")
    operands = [jnp.asarray(RNG.normal(size=s), jnp.float32) for s in ((300, 8), (200, 8), (200, 8))]

    def memory(**options: Any) -> int:
        fn = lambda *x: kernels.einsum_optimize("id,jd,je->ie", list(x), optimize=False, **options)  # noqa: E731
        return int(jax.jit(fn).lower(*operands).compile().memory_analysis().temp_size_in_bytes)

    whole = 4 * 300 * 200
    assert memory() >= whole
    # A twentieth for the intermediate; the rest is slices and the output, of 300*8 numbers at the most each.
    assert memory(memory_efficient=True, memory_limit_bytes=whole // 20) <= whole // 20 + 4 * 4 * 300 * 8


@pytest.mark.quick
def test_mistakes_and_what_is_not_there() -> None:
    for options, said in (
        (
            {"optimization_level": "max"},
            "Unknown optimization_level 'max'.*'none', 'basic', 'balanced', 'aggressive'",
        ),
        ({"precision": "half"}, "Unknown precision 'half'.*'bfloat16'"),
    ):
        with pytest.raises(ValueError, match=said):
            TPUv4Kernels(**options)  # type: ignore[arg-type]
    kernels = TPUv4Kernels()
    with pytest.raises(ValueError, match=r"Unknown algorithm 'tpu'.*'tpu_optimized', 'xla', 'pallas', 'reference'"):
        kernels.optimized_matmul(A, B, algorithm="tpu")
    with pytest.raises(ValueError, match="Unknown precision 'int8'"):
        kernels.optimized_matmul(A, B, precision="int8")
    with pytest.raises(ValueError, match="contracted axes"):
        kernels.optimized_matmul(A, B)
    assert not hasattr(kernels, "fast_sort")
    with pytest.raises(AttributeError, match=r"'fast_sort' in this version; it has .*optimized_matmul, einsum"):
        kernels.fast_sort()
    assert copy.deepcopy(kernels).settings == kernels.settings
    assert repr(kernels).startswith("TPUv4Kernels(precision='bfloat16', optimization_level='balanced'")
