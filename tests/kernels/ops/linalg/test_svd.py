"""fast_svd against numpy's float64 decomposition: exact triplets, and sketches as near the best as theory says."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.kernels import explain, fast_svd, svd_plan, target
from capibara.kernels.core.spec import unit_roundoff

# Most tests share one shape and rank, and so one compiled program.
SHAPE, RANK = (120, 60), 8
SLOW = 1 / np.arange(1, 61.0)
FAST = 0.9 ** np.arange(60.0)
RNG = np.random.default_rng(0)


def with_spectrum(rows: int, columns: int, s: Any, seed: int = 0) -> np.ndarray:
    """A float64 matrix whose singular values are s, with random vectors."""
    rng = np.random.default_rng(seed)
    u, _ = np.linalg.qr(rng.normal(size=(rows, len(s))))
    v, _ = np.linalg.qr(rng.normal(size=(columns, len(s))))
    return (u * s) @ v.T


def wide(found: Any) -> list[np.ndarray]:
    return [np.asarray(x, np.float64) for x in found]


def rounding(rows: int, columns: int, dtype: str = "float32") -> float:
    """What a backward stable method may do to a matrix of norm one, or to orthonormal vectors: a unit roundoff times a
    slow function of the sizes."""
    return 4 * (rows + columns) ** 0.5 * unit_roundoff(jnp.dtype(dtype))


def assert_orthonormal(u: np.ndarray, vh: np.ndarray, dtype: str = "float32") -> None:
    limit = rounding(u.shape[0], vh.shape[1], dtype)
    assert np.abs(u.T @ u - np.eye(u.shape[1])).max() < limit
    assert np.abs(vh @ vh.T - np.eye(vh.shape[0])).max() < limit


EXACT = [(30, 20), (90, 20), (20, 90), (1, 9), (2, 2, 24, 21)]


@pytest.mark.quick
@pytest.mark.parametrize("shape", EXACT, ids=str)
def test_exact_is_numpys(shape: tuple[int, ...]) -> None:
    a = RNG.normal(size=shape)
    u, s, vh = wide(fast_svd(jnp.asarray(a, jnp.float32)))
    want = np.linalg.svd(a, compute_uv=False)
    assert s.shape == want.shape
    limit = rounding(*shape[-2:]) * want.max()
    assert np.abs(s - want).max() < limit
    assert np.abs((u * s[..., None, :]) @ vh - a).max() < limit
    assert np.all(np.take_along_axis(vh, np.abs(vh).argmax(-1)[..., None], -1) > 0)
    if shape in [(30, 20), (90, 20)]:
        alone = fast_svd(jnp.asarray(a, jnp.float32), compute_uv=False)
        assert np.abs(np.asarray(alone) - want).max() < limit


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_types(dtype: str) -> None:
    with jax.enable_x64(dtype == "float64"):
        a = jnp.asarray(with_spectrum(*SHAPE, FAST), dtype)
        found = fast_svd(a, rank=5, oversampling=10)
        assert {x.dtype.name for x in found} == {"float64" if dtype == "float64" else "float32"}
        u, s, vh = wide(found)
    want = np.linalg.svd(np.asarray(a, np.float64), compute_uv=False)[:5]
    assert_orthonormal(u, vh, found[0].dtype.name)
    # The sketch's own error: (s_16 / s_5)^(2 (2q + 1)) = 0.9^110 of s, for q = 2 power iterations, and a constant.
    assert np.abs(s / want - 1).max() < 100 * 0.9**110


@pytest.mark.quick(cases=2)
@pytest.mark.parametrize("spectrum", [SLOW, FAST], ids=["slow", "fast"])
@pytest.mark.parametrize(("shape", "core"), [(SHAPE, "xla"), (SHAPE, "jacobi"), ((60, 121), "xla")], ids=str)
def test_a_sketch_comes_near_the_best(shape: tuple[int, int], core: str, spectrum: Any) -> None:
    a = with_spectrum(*shape, spectrum)
    u, s, vh = wide(fast_svd(jnp.asarray(a, jnp.float32), rank=RANK, core=core))
    assert_orthonormal(u, vh)
    left_out = a - (u * s) @ vh
    assert np.linalg.norm(left_out) < 1.05 * np.linalg.norm(spectrum[RANK:])
    assert np.linalg.norm(left_out, 2) < 1.05 * spectrum[RANK]


def basis_errors(a: np.ndarray, width: int, power_iterations: int) -> tuple[float, float]:
    """The mean over ten seeds of |A - Q Qᵀ A|, Frobenius and spectral, Q the basis from `width` columns."""
    found = []
    for seed in range(10):
        u, _, _ = wide(
            fast_svd(
                jnp.asarray(a, jnp.float32), rank=width, oversampling=0, method="randomized",
                power_iterations=power_iterations, key=seed,
            )
        )  # fmt: skip
        rest = a - u @ (u.T @ a)
        found.append((np.linalg.norm(rest), np.linalg.norm(rest, 2)))
    frobenius, spectral = np.mean(found, axis=0)
    return float(frobenius), float(spectral)


@pytest.mark.parametrize("spectrum", [SLOW, FAST], ids=["slow", "fast"])
def test_the_expected_error_is_within_the_theorems(spectrum: Any) -> None:
    """Halko, Martinsson and Tropp (2011), for k + p columns and t² = the sum of s_j² over j > k.

    Theorem 10.5: E|rest|_F <= sqrt(1 + k / (p - 1)) t.
    Theorem 10.6: E|rest|_2 <= (1 + sqrt(k / (p - 1))) s_{k+1} + e sqrt(k + p) / p · t.
    Corollary 10.10, q power iterations: E|rest|_2 <= (1 + sqrt(k / (p - 1)) + e sqrt(k + p) / p · sqrt(min(M, N) - k))
    ^ (1 / (2q + 1)) s_{k+1}. They come from E|G|² and E|G⁺|² of Gaussian matrices G [k, k + p]: the best rank k error
    times what the sketch may lose in the k leading directions. The bounds hold for every split of the columns into k
    and p; the least is taken. The mean of ten draws stays below a bound on the expectation because the bound is loose
    by far more than the mean's spread; the best possible error is a bound from below.
    """
    a, width, small = with_spectrum(*SHAPE, spectrum), 20, min(SHAPE)
    splits = [(width - p, p) for p in range(2, width)]
    tail = {k: float(np.linalg.norm(spectrum[k:])) for k, _ in splits}

    def loss(k: int, p: int) -> float:
        return float(np.e * np.sqrt(k + p) / p)

    frobenius_bound = min(np.sqrt(1 + k / (p - 1)) * tail[k] for k, p in splits)
    spectral_bound = min((1 + np.sqrt(k / (p - 1))) * spectrum[k] + loss(k, p) * tail[k] for k, p in splits)
    power_bound = min(
        (1 + np.sqrt(k / (p - 1)) + loss(k, p) * np.sqrt(small - k)) ** (1 / 5) * spectrum[k] for k, p in splits
    )
    frobenius, spectral = basis_errors(a, width, power_iterations=0)
    assert np.linalg.norm(spectrum[width:]) <= frobenius <= frobenius_bound
    assert spectrum[width] <= spectral <= spectral_bound
    _, powered = basis_errors(a, width, power_iterations=2)
    assert spectrum[width] * (1 - 1e-5) <= powered <= power_bound
    assert powered < spectral  # what the power iterations are for


def test_every_keyword_changes_what_happens() -> None:
    a = jnp.asarray(with_spectrum(*SHAPE, SLOW), jnp.float32)

    def error(**keywords: Any) -> float:
        u, s, vh = wide(fast_svd(a, rank=RANK, method="randomized", **keywords))
        return float(np.linalg.norm(np.asarray(a) - (u * s) @ vh))

    plain = error(oversampling=2, power_iterations=0)
    assert error(oversampling=30, power_iterations=0) < plain
    assert error(oversampling=2, power_iterations=2) < plain
    assert error(oversampling=2, power_iterations=0, key=1) != plain
    assert error(oversampling=2, power_iterations=0, key=jax.random.key(0)) == plain
    exact = fast_svd(a, rank=RANK, method="exact")
    best = np.linalg.norm(SLOW[RANK:])
    assert np.linalg.norm(np.asarray(a) - (np.asarray(exact[0]) * exact[1]) @ np.asarray(exact[2])) < best * 1.00001
    one, other = (str(jax.make_jaxpr(lambda x, c=c: fast_svd(x, rank=RANK, core=c))(a)) for c in ("xla", "jacobi"))
    assert "svd[" in one
    assert "svd[" not in other


@pytest.mark.parametrize("core", ["xla", "jacobi"])
@pytest.mark.parametrize("what", ["rank 3", "zeros", "few rows", "tiny", "huge"])
def test_matrices_of_lower_rank_and_any_size(what: str, core: str) -> None:
    """Vectors stay orthonormal where the matrix leaves them free."""
    size = {"tiny": 1e-30, "huge": 1e30}.get(what, 1.0)
    a = with_spectrum(*SHAPE, np.array([3.0, 2.0, 1.0])) * size
    if what == "few rows":
        a = np.concatenate([RNG.normal(size=(4, 60)), np.zeros((116, 60))])
    elif what == "zeros":
        a = np.zeros(SHAPE)
    for keywords in ({"rank": RANK, "core": core}, {"rank": RANK, "method": "exact"}):
        u, s, vh = wide(fast_svd(jnp.asarray(a, jnp.float32), **keywords))
        assert_orthonormal(u, vh)
        want = np.linalg.svd(a, compute_uv=False)[: len(s)]
        assert np.abs(s - want).max() <= rounding(*a.shape) * max(want.max(), 1e-38)


@pytest.mark.parametrize("largest", [3.4e38, 1.2e-38])
def test_elements_at_the_ends_of_float32(largest: float) -> None:
    found = fast_svd(jnp.diag(jnp.array([largest, largest, 0.0])), compute_uv=False)
    np.testing.assert_allclose(found, np.float32([largest, largest, 0]), rtol=1e-6)


def test_a_batch_is_decomposed_one_by_one() -> None:
    a = jnp.asarray(np.stack([with_spectrum(*SHAPE, FAST, seed) for seed in range(4)]), jnp.float32)
    together = jax.jit(jax.vmap(lambda x: fast_svd(x, rank=RANK)))(a.reshape(2, 2, *SHAPE))
    for i in range(4):
        alone = wide(fast_svd(a[i], rank=RANK))
        for one, other in zip(alone, together, strict=True):
            # Batched products add up in another order: rounding alone, seen through gaps of a tenth of s_8 = 0.48.
            np.testing.assert_allclose(other[divmod(i, 2)], one, atol=20 * rounding(*SHAPE))


@pytest.mark.quick
def test_the_same_bits_twice() -> None:
    a = jnp.asarray(with_spectrum(*SHAPE, FAST), jnp.float32)
    for one, other in zip(fast_svd(a, rank=RANK), fast_svd(a, rank=RANK), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (0, 7, 5)], ids=str)
def test_empty(shape: tuple[int, ...]) -> None:
    *batch, m, n = shape
    u, s, vh = fast_svd(jnp.zeros(shape))
    small = min(m, n)
    assert (u.shape, s.shape, vh.shape) == ((*batch, m, small), (*batch, small), (*batch, small, n))
    assert fast_svd(jnp.zeros(shape), compute_uv=False).shape == s.shape


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_in_nan_out(bad: float) -> None:
    a = jnp.ones(SHAPE).at[3, 4].set(bad)
    for keywords in ({"method": "exact"}, {"core": "xla"}, {"core": "jacobi"}):
        for x in fast_svd(a, rank=RANK, **keywords):
            assert bool(jnp.all(jnp.isnan(x)))
    assert bool(jnp.all(jnp.isnan(fast_svd(jnp.ones((90, 20)).at[3, 4].set(bad), compute_uv=False))))


@pytest.mark.quick
def test_mistakes() -> None:
    a = jnp.ones((8, 6))
    for keywords, match in [
        ({"rank": 7}, r"rank is from 1 to the smaller side.*Got rank=7 for a matrix of 8 x 6.*pass 1 to 6"),
        ({"rank": 0}, r"rank is from 1"),
        ({"rank": 2, "power_iterations": -1}, r"power_iterations is a count: 0 or more. Got -1"),
        ({"rank": 2, "oversampling": -1}, r"oversampling .* 0 or more. Got -1"),
        ({"method": "randomized"}, r"leading `rank` triplets. Got rank=None"),
        ({"method": "random"}, r"Unknown method of fast_svd 'random'. Did you mean 'randomized'"),
        ({"rank": 2.0}, r"rank is a whole number. Got 2.0"),
        ({"rank": 2, "oversampling": 1.5}, r"oversampling is a whole number. Got 1.5"),
        ({"rank": 2, "power_iterations": True}, r"power_iterations is a whole number. Got True"),
        ({"rank": 2, "core": "qr"}, r"Unknown core of fast_svd 'qr'"),
        ({"method": "exact", "core": "jacobi"}, r"core are for a sketch, and the exact method takes none"),
        ({"method": "exact", "power_iterations": 0}, r"power_iterations are for a sketch.*Got power_iterations=0"),
        ({"method": "exact", "key": 1}, r"key is for a sketch.*Got key=1"),
        ({"key": "x"}, r"key is one jax.random.key or an int. Got 'x'"),
    ]:
        with pytest.raises(ValueError, match=match):
            fast_svd(a, **keywords)
    with pytest.raises(ValueError, match=r"An empty matrix has no singular triplets.*leave rank out"):
        fast_svd(a[:0], rank=1)
    with pytest.raises(ValueError, match=r"fast_svd takes arrays"):
        fast_svd(None)
    with pytest.raises(ValueError, match=r"takes matrices.*Got f32\[6\]"):
        fast_svd(a[0])
    with pytest.raises(ValueError, match=r"takes bfloat16.*Got i32\[8,6\]"):
        fast_svd(a.astype(jnp.int32))


@pytest.mark.quick
def test_the_plan_says_what_and_why() -> None:
    a = jax.ShapeDtypeStruct((4096, 1024), "float32")
    made = svd_plan(a, rank=64)
    assert (made.method, made.sketch, made.core) == ("randomized", 74, "xla")
    assert "rank 64 and 10 more are at most 1/2 of the smaller side, 1024" in str(made)
    with target("tpu"):
        assert "74 x 74 core by jacobi" in str(svd_plan(a, rank=64))
    assert svd_plan(a, rank=600).method == "exact"
    assert "rows first reduced by Cholesky QR, then a 1024 x 1024 one by XLA" in str(svd_plan(a))
    assert "no rank was given" in svd_plan(a).why
    # Six products of the matrix with 74 columns are most of the work.
    assert 1 < made.flops / (6 * 2 * 4096 * 1024 * 74) < 1.4
    chosen = explain(fast_svd, a, rank=64)
    assert {s.call.op.name for s in chosen.selections} == {"gemm"}


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_lowers_for_accelerators(platform: str) -> None:
    """For a TPU without any of the library's decompositions that take minutes to compile."""
    a = jax.ShapeDtypeStruct((256, 64), "float32")
    with target("gpu" if platform == "cuda" else "tpu"):
        exported = jax.export.export(jax.jit(lambda x: fast_svd(x, rank=8)), platforms=[platform])(a)
    called = " ".join(re.findall(r"custom_call @(\w+)", exported.mlir_module())).lower()
    assert ("svd" in called) == (platform == "cuda")
    assert not re.search("eigh|qdwh|qr", called), called
