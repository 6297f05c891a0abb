"""nearest_code where the shared suite does not look: the true nearest in float64, memory, statistics on a mesh."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from capibara.kernels import explain, interpret, nearest_code, target
from capibara.kernels.lab.check import check_output, expected
from capibara.kernels.ops.vq import NEAREST_CODE
from capibara.kernels.ops.vq.nearest import hopper, statistics, xla


def _normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def _distances(x: Any, codebook: Any) -> np.ndarray:
    x, codebook = (np.asarray(v).astype(np.float64) for v in (x, codebook))
    return ((x[:, None] - codebook[None]) ** 2).sum(-1)


def _adversarial(name: str) -> tuple[np.ndarray, np.ndarray]:
    if name == "clusters far from the origin":
        centres = 100 + _normal(0, 24, 16)
        x = centres[np.arange(300) % 24] + 0.5 * _normal(1, 300, 16)
        return x.astype(np.float32), np.concatenate([centres, centres + 0.01 * _normal(2, 24, 16)]).astype(np.float32)
    if name == "a common offset":
        return 1000 + _normal(15, 200, 16), 1000 + _normal(16, 512, 16)
    if name == "a common offset of most":
        codes = 1000 + _normal(16, 512, 16)
        codes[::5] -= 1000
        return 1000 * (np.arange(200) % 2)[:, None].astype(np.float32) + _normal(15, 200, 16), codes
    if name == "norms from tiny to huge":
        size = np.float32(10.0) ** np.linspace(-12, 12, 40, dtype=np.float32)[:, None]
        codes = _normal(3, 40, 16) * size
        return codes[np.arange(200) % 40] * (1 + np.float32(0.2) * _normal(4, 200, 16)), codes
    assert name == "duplicates"
    codes = _normal(5, 30, 16)
    return codes[np.arange(200) % 30] + np.float32(0.1) * _normal(6, 200, 16), np.concatenate([codes, codes])


ADVERSARIAL = (
    "clusters far from the origin",
    "a common offset",
    "a common offset of most",
    "norms from tiny to huge",
    "duplicates",
)


@pytest.mark.parametrize("name", ADVERSARIAL)
@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_the_true_nearest(name: str, implementation: str) -> None:
    """By float64; a code may stand in for another when their distances differ by less than float32 rounds.

    Differences of float32 numbers, squared and added: D + 4 roundings of each of the two distances, half a unit in
    the last place each.
    """
    x, codebook = _adversarial(name)
    indices = np.asarray(nearest_code(x, codebook, implementation=implementation))
    exact = _distances(x, codebook)
    chosen, least = np.take_along_axis(exact, indices[:, None], 1)[:, 0], exact.min(1)
    assert (chosen - least <= 2 * (16 + 4) * 2.0**-24 * chosen).all()
    if name == "duplicates":
        assert (indices < 30).all(), "the lowest index of equal codes"


@pytest.mark.parametrize("name", ["a common offset", "norms from tiny to huge"])
def test_the_true_nearest_by_the_tpu_kernel(name: str) -> None:
    """It holds no two against each other: the product's own rounding, of rows and codes about their centre."""
    x, codebook = _adversarial(name)
    with interpret("hlo"):
        indices = np.asarray(nearest_code(x, codebook, implementation="pallas_tpu"))
    exact = _distances(x, codebook)
    chosen, least = np.take_along_axis(exact, indices[:, None], 1)[:, 0], exact.min(1)
    about = codebook.mean(0) if "offset" in name else 0
    nearest = codebook[exact.argmin(1)] - about
    scale = (np.linalg.norm(x - about, axis=1) + np.linalg.norm(nearest, axis=1)).astype(np.float64) ** 2
    assert (chosen - least <= (16 + 4) * 2.0**-24 * scale).all()


@pytest.mark.quick
@pytest.mark.parametrize("implementation", ["xla", "reference", "pallas_tpu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_codes_whose_squares_vanish(dtype: str, implementation: str) -> None:
    """At 1e-25; a row of an ordinary size is as far from all of them, and a code that is no number is left out."""
    x, codebook = _normal(7, 60, 16), _normal(8, 40, 16)
    codebook[3] = np.nan
    x[5], x[6] = 0, 1e25
    x, codebook = (jnp.asarray(1e-25 * v, dtype) for v in (x, codebook))
    with interpret("hlo"):
        indices = np.asarray(nearest_code(x, codebook, implementation=implementation))
    exact = _distances(x, codebook)
    exact[:, 3] = np.inf
    right = exact.argmin(1)
    assert indices[6] >= 0
    assert indices[6] != 3
    right[6] = indices[6]
    np.testing.assert_array_equal(indices, right)
    # One power of two more or less changes no digit, and no index.
    with interpret("hlo"):
        again = nearest_code(x * 2.0**70, codebook * 2.0**70, implementation=implementation)
    np.testing.assert_array_equal(np.delete(indices, 6), np.delete(np.asarray(again), 6))


def test_huge_codes_do_not_overflow_about_their_centre() -> None:
    codebook = jnp.array([[1.7e19, 0.0], [-1.7e19, 0.0], [0.0, 1.7e19], [jnp.nan, 0.0]])
    assert nearest_code(codebook[jnp.array([2, 0, 1, 3])], codebook).tolist() == [2, 0, 1, -1]


def test_rows_and_codes_that_are_no_numbers() -> None:
    codebook = jnp.array([[jnp.nan, 0.0], [0.0, 0.0], [jnp.inf, 1.0], [5.0, 5.0]])
    x = jnp.array([[1.0, 1.0], [jnp.nan, 0.0], [0.0, -jnp.inf], [4.0, 6.0], [3e38, 3e38]])
    indices, distances, counts, sums = nearest_code(x, codebook, return_distances=True, return_stats=True)
    assert indices.tolist() == [1, -1, -1, 3, -1]
    np.testing.assert_array_equal(distances, [2, np.nan, np.nan, 2, np.nan])
    assert counts.tolist() == [0, 1, 0, 1]
    assert sums.tolist() == [[0, 0], [1, 1], [0, 0], [4, 6]]
    nothing = jnp.full((2, 2), jnp.nan)
    for implementation in ("xla", "reference", "pallas_tpu"):
        with interpret("hlo"):
            assert nearest_code(x[:1], nothing, implementation=implementation).tolist() == [-1], implementation


@pytest.mark.parametrize("codes", [1024, 8192])
def test_the_table_is_never_stored(codes: int) -> None:
    """At the size of an image tokenizer's batch, statistics and distances included: under 5 % of N x K float32."""
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((65536, 768), (codes, 768))]
    both = jax.jit(lambda x, c: nearest_code(x, c, return_distances=True, return_stats=True))
    used = both.lower(*shapes).compile().memory_analysis()
    assert used is not None
    assert 0 < used.temp_size_in_bytes < 0.05 * 65536 * codes * 4


def test_chunks_of_rows_that_do_not_divide(monkeypatch: pytest.MonkeyPatch) -> None:
    x, codebook = _normal(7, 103, 8), _normal(8, 19, 8)
    at_once = nearest_code(x, codebook, return_distances=True, return_stats=True)
    for module in (xla, statistics):
        monkeypatch.setattr(module, "TABLE_NUMBERS", 19 * 10)  # ten rows at a time
    chunked = xla.xla(jnp.asarray(x), jnp.asarray(codebook), return_distances=True, return_stats=True)
    for one, other in zip(at_once, chunked, strict=True):
        # Sums of other partial sums: float32, of some ten numbers of size 1.
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_sums_by_a_product_with_ones_are_exact(dtype: str) -> None:
    """What accelerators do: three bfloat16 parts hold a float32, so only the order of the additions differs."""
    x = jnp.asarray(_normal(9, 90, 12)).astype(dtype)
    at = jnp.asarray(np.random.default_rng(10).integers(0, 7, 90), jnp.int32)
    counts, sums = statistics.by_product(x, at, 7)
    right_counts, right = statistics.by_address(x, at, 7, jnp.float32)
    np.testing.assert_array_equal(counts, right_counts)
    # Some 13 additions of numbers up to 3: 13 roundings of sums up to 16.
    np.testing.assert_allclose(sums, right, atol=13 * 16 * 2.0**-24)
    with target("tpu"):
        np.testing.assert_allclose(statistics.statistics(x, at, 7, jnp.float32)[1], right, atol=13 * 16 * 2.0**-24)


@pytest.mark.quick
@pytest.mark.parametrize("layout", [("data", None), (None, "model"), ("data", "model")])
def test_statistics_on_a_mesh(layout: tuple[str | None, str | None]) -> None:
    """Rows split, codes split, both: a broken row and a tie between codes of two devices among them."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:8])
    x, codebook = _normal(11, 64, 16), _normal(12, 24, 16)
    x[5, 3] = np.nan
    codebook[20] = codebook[2]
    x[7] = codebook[2]
    want = nearest_code(x, codebook, return_distances=True, return_stats=True, implementation="reference")
    placed = (
        jax.device_put(x, NamedSharding(mesh, P(layout[0], None))),
        jax.device_put(codebook, NamedSharding(mesh, P(layout[1], None))),
    )
    got = jax.jit(lambda x, c: nearest_code(x, c, return_distances=True, return_stats=True))(*placed)
    assert got[0][7] == 2
    for one, other in zip(got, want, strict=True):
        # Distances are sums of 16 squares and codes' sums of few rows: a few roundings of numbers up to 50.
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=2e-5)


def test_derivative_of_distances_and_none_of_indices() -> None:
    x, codebook = jnp.array([[1.0, 2.0]]), jnp.array([[0.0, 0.0], [9.0, 9.0]])
    dx, dc = jax.grad(lambda x, c: nearest_code(x, c, return_distances=True)[1].sum(), (0, 1))(x, codebook)
    assert dx.tolist() == [[2.0, 4.0]]
    assert dc.tolist() == [[-2.0, -4.0], [0.0, 0.0]]
    through_indices = jax.grad(lambda x: (nearest_code(x, codebook) * x.sum()).sum())(x)
    assert through_indices.tolist() == [[0.0, 0.0]]


def test_dispatch_says_why_not() -> None:
    x, codebook = jax.ShapeDtypeStruct((65536, 768), "float32"), jax.ShapeDtypeStruct((1024, 768), "float32")
    with target("gpu"):
        assert "hopper" in str(explain(nearest_code, x, codebook))
        for shape, why in (((100, 8200), "up to 8192 numbers"), ((0, 72), "no rows")):
            call = NEAREST_CODE.call(
                jax.ShapeDtypeStruct(shape, "float32"), jax.ShapeDtypeStruct((8, shape[1]), "float32")
            )
            assert why in str(hopper.IMPLEMENTATION.refuses(call))


@pytest.mark.parametrize(
    ("x", "codebook", "text"),
    [
        (jnp.ones((2, 3)), jnp.ones((4, 5)), "as many numbers as a row"),
        (jnp.ones((2, 3)), jnp.ones((0, 3)), "one or more"),
        (jnp.ones((2, 3)), jnp.ones(3), r"\[K, D\]"),
        (jnp.float32(1), jnp.ones((4, 1)), "last axis"),
        (jnp.ones((2, 3), jnp.int32), jnp.ones((4, 3)), r"astype\(jnp.float32\)"),
        (jnp.ones((2, 3)), jnp.ones((4, 3), jnp.int32), "codebook of i32"),
        (object(), jnp.ones((4, 3)), "x of type object"),
        (None, jnp.ones((4, 3)), "x of type NoneType"),
    ],
)
def test_bad_input(x: Any, codebook: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        nearest_code(x, codebook)


def test_a_large_call_is_checked_on_its_first_rows() -> None:
    arrays = (jnp.asarray(_normal(13, 2100, 8)), jnp.asarray(_normal(14, 5, 8)))
    wanted = expected(NEAREST_CODE, arrays, {}, host_seconds=-1.0)
    assert "the first 2048 rows" in wanted.how
    found = NEAREST_CODE(*arrays)
    assert check_output(found, wanted).ok
    assert not check_output(found.at[5].add(1), wanted).ok
