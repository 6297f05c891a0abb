"""conv2d: what the documents promise, beyond what every op must pass."""

from __future__ import annotations

import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.errors import ImplementationRefused
from capibara.kernels import direct_error_bound, explain, target, winograd_conv2d, winograd_error_bound
from capibara.kernels.core.dispatch import select
from capibara.kernels.ops.conv import conv2d
from capibara.kernels.ops.conv.conv2d.api import CONV2D
from capibara.kernels.ops.conv.conv2d.points import TILES, amplification, transforms
from capibara.kernels.ops.conv.conv2d.winograd import PRODUCTS, WinogradConfig


def _normal(*shape: int, seed: int = 0, dtype: Any = "float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape), dtype)


def _naive(x: Any, w: Any, stride: int = 1, pad: int = 1) -> np.ndarray:
    """Tap by tap in float64."""
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    x = np.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    rows, columns = ((size - k) // stride + 1 for size, k in zip(x.shape[1:3], w.shape[:2], strict=True))
    y = np.zeros((x.shape[0], rows, columns, w.shape[3]))
    for r in range(w.shape[0]):
        for s in range(w.shape[1]):
            seen = x[:, r : r + (rows - 1) * stride + 1 : stride, s : s + (columns - 1) * stride + 1 : stride]
            y += seen @ w[r, s]
    return y


def _error(got: Any, want: np.ndarray) -> float:
    """The worst element's error against the largest result, which is what the bounds are of."""
    return float(np.abs(np.asarray(got, np.float64) - want).max() / np.abs(want).max())


X, W = _normal(2, 14, 13, 24), _normal(3, 3, 24, 16, seed=1)
EXACT = _naive(X, W)
SHAPES = (jax.ShapeDtypeStruct((2, 14, 14, 8), "float32"), jax.ShapeDtypeStruct((3, 3, 8, 8), "float32"))


@pytest.mark.quick
@pytest.mark.parametrize("tile", TILES)
def test_the_transforms_are_a_convolution(tile: int) -> None:
    inputs, filters, outputs = (np.array(m, float) for m in transforms(tile))
    d, g = np.random.default_rng(0).standard_normal(tile + 2), np.random.default_rng(1).standard_normal(3)
    # Float64, whose roundings the transforms amplify at most some hundred times.
    np.testing.assert_allclose(
        outputs @ ((filters @ g) * (inputs @ d)), [d[i : i + 3] @ g for i in range(tile)], atol=1e-12
    )


@pytest.mark.quick
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_errors_are_under_their_bounds_and_not_far_under(dtype: str) -> None:
    """Against float64 on the rounded operands. A bound a hundred times what happens would say nothing."""
    x, w = X.astype(dtype), W.astype(dtype)
    exact = _naive(x.astype("float32"), w.astype("float32"))
    cin = X.shape[3]
    assert _error(conv2d(x, w).astype("float32"), exact) <= direct_error_bound(dtype, cin)
    found = []
    for tile in TILES if dtype == "float32" else (2, 4):
        error = _error(conv2d(x, w, tile_size=tile).astype("float32"), exact)
        bound = winograd_error_bound(tile, dtype, cin)
        assert bound / 100 < error <= bound, (tile, error, bound)
        found.append(error)
    assert found == sorted(found), "a larger tile rounds more"
    assert [amplification(t) for t in TILES] == sorted(amplification(t) for t in TILES)


@pytest.mark.quick
def test_sixteen_bits_by_a_tile_of_four_only_when_asked() -> None:
    x, w = (jax.ShapeDtypeStruct(s.shape, "bfloat16") for s in SHAPES)
    (chosen,) = explain(conv2d, x, w).selections
    told = {v.implementation: v for v in chosen.verdicts}
    assert "times the direct form's" in told["xla_winograd4"].reason
    assert told["xla_winograd2"].accepts
    assert explain(conv2d, x, w, tile_size=4).implementation == "xla_winograd4"
    assert explain(conv2d, x, w, implementation="xla_winograd4").implementation == "xla_winograd4"
    assert explain(winograd_conv2d, x, w).implementation == "xla_winograd2"
    with pytest.raises(ImplementationRefused, match="float32"):
        conv2d(X.astype("bfloat16"), W.astype("bfloat16"), implementation="xla_winograd6")
    with target("gpu"):  # where float32 is multiplied as TF32 unless more is asked for
        assert "times the direct" in str(explain(conv2d, *SHAPES))
        assert "times the direct" not in str(explain(conv2d, *SHAPES, precision="highest"))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("window", "options", "why"),
    [
        ((5, 5), {}, "3x3 filters, and these are 5x5"),
        ((3, 3), {"strides": 2}, r"strides of 1, and they are \(2, 2\)"),
        ((3, 3), {"dilation": (1, 2)}, r"dilation of 1, and they are \(1, 2\)"),
        ((3, 3), {"groups": 2}, "one group"),
    ],
)
def test_what_winograd_is_not_for_goes_direct_visibly(
    window: tuple[int, int], options: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    w = jax.ShapeDtypeStruct((*window, 8 // options.get("groups", 1), 8), "float32")
    with caplog.at_level(logging.WARNING, logger="capibara.kernels"):
        told = explain(conv2d, SHAPES[0], w, tile_size=6, **options)
    assert told.implementation == "xla"
    assert "not xla_winograd6" in str(told)
    for name in ("xla_winograd2", "xla_winograd4", "xla_winograd6"):
        with pytest.raises(ImplementationRefused, match=why):
            explain(conv2d, SHAPES[0], w, implementation=name, **options)


@pytest.mark.usefixtures("nothing_said_yet")
def test_a_refused_tile_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="capibara.kernels"):
        explain(conv2d, SHAPES[0], jax.ShapeDtypeStruct((4, 4, 8, 8), "float32"), tile_size=2)
    assert "instead of xla_winograd2" in caplog.text


@pytest.mark.quick
def test_against_numpy_with_numbers_for_pairs() -> None:
    for options, want in (
        ({"strides": 2, "padding": ((1, 1), (1, 1))}, _naive(X, W, stride=2)),
        ({"padding": "valid"}, _naive(X, W, pad=0)),
    ):
        # Float32: sums of 216 products and their rounding.
        np.testing.assert_allclose(conv2d(X, W, **options), want, atol=1e-4)  # type: ignore[arg-type]


def test_numpys_whole_numbers_are_pythons() -> None:
    pairs = {"strides": np.array([2, 1]), "padding": np.array([[1, 1], [1, 1]]), "dilation": (np.int32(1), np.int64(1))}
    told = explain(lambda x, w: conv2d(x, w, groups=np.int64(1), tile_size=np.int32(4), **pairs), *SHAPES)
    (plain,) = explain(
        lambda x, w: conv2d(x, w, strides=(2, 1), padding=((1, 1), (1, 1)), tile_size=4), *SHAPES
    ).selections
    assert told.selections[0].call.params == plain.call.params
    assert {type(n) for n in told.selections[0].call.params["strides"]} == {int}  # type: ignore[attr-defined]


def test_two_is_not_taken_for_two_point_zero() -> None:
    """Nor after a right call, whose decision is kept."""
    conv2d(X, W, strides=2)
    with pytest.raises(ValueError, match="strides is a whole number above 0"):
        conv2d(X, W, strides=2.0)  # type: ignore[arg-type]


def test_the_largest_tile_tells_16_bit_operands_to_be_converted() -> None:
    narrow = (X.astype("bfloat16"), W.astype("bfloat16"))
    for precision in (None, "highest"):
        with pytest.raises(ImplementationRefused, match="bfloat16 ones are to be converted"):
            conv2d(*narrow, implementation="xla_winograd6", precision=precision)


@pytest.mark.parametrize("passes", [1, 2])
def test_the_passes_change_the_program_and_not_the_result(passes: int) -> None:
    config = WinogradConfig(passes=passes)
    call = functools.partial(conv2d, implementation="xla_winograd2", config=config)
    assert ("optimization_barrier" in str(jax.make_jaxpr(call)(X, W))) == (passes == 2)
    assert _error(call(X, W), EXACT) <= winograd_error_bound(2, "float32", 24)


@pytest.mark.quick
@pytest.mark.parametrize("product", PRODUCTS)
def test_the_products_lower_for_cuda(product: str) -> None:
    call = functools.partial(
        conv2d, implementation="xla_winograd4", config=WinogradConfig(product), precision="highest"
    )
    with target("gpu"):
        text = jax.export.export(jax.jit(call), platforms=["cuda"])(*SHAPES).mlir_module()
    assert ("algorithm" in text) == (product != "plain")


def test_a_gpu_multiplies_float32_by_its_matrix_units() -> None:
    with target("gpu"):
        (exact,) = explain(conv2d, *SHAPES, tile_size=4, precision="highest").selections
        (loose,) = explain(conv2d, *SHAPES, tile_size=4).selections
    assert exact.config.product == "tf32x3"
    assert loose.config.product == "plain"


@pytest.mark.quick
def test_the_gradient_keeps_to_winograd() -> None:
    """The inputs' gradient is a 3x3 convolution again, on the same tile."""
    told = explain(jax.grad(lambda x, w: conv2d(x, w, tile_size=4).sum()), *SHAPES)
    assert {s.implementation for s in told.selections} == {"xla_winograd4"}
    assert len(told.selections) > 1


@pytest.mark.quick
@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: conv2d(X, W, tile_size=3), "2, 4, 6"),
        (lambda: conv2d(X, W, tile_size=4, implementation="xla"), "leave one of them out"),
        (lambda: conv2d(X, W, tile_size=4.0), "2, 4, 6"),
        (lambda: conv2d(X, W, tile_size=[4]), "2, 4, 6"),
        (lambda: conv2d(X, W, strides=True), "strides is a whole number above 0"),
        (lambda: conv2d(X, W, strides=1.0), "strides is a whole number above 0"),
        (lambda: conv2d(X, W, strides=np.array([2.0, 2.0])), "strides and dilation are Python numbers"),
        (lambda: conv2d(X, W, dilation=(True, 1)), "dilation is a whole number"),
        (lambda: conv2d(X, W, groups=True), "groups divides"),
        (lambda: conv2d(X, W, groups=1.0), "groups divides"),
        (lambda: conv2d(X, W, padding=(("a", 1), (1, 1))), "none below 0"),
        (lambda: conv2d(X, W, padding=((True, 1), (1, 1))), "none below 0"),
        (lambda: conv2d(X, W, padding=np.array([1, 1])), "none below 0"),
        (lambda: conv2d(X, W, strides=0), "strides is a whole number above 0"),
        (lambda: conv2d(X, W, dilation=(1, 1, 1)), "dilation is a whole number"),
        (lambda: conv2d(X, W, padding="same_lower"), "padding"),
        (lambda: conv2d(X, W, padding=((0, -1), (0, 0))), "none below 0"),
        (lambda: conv2d(X, W, padding=1), "padding is 'SAME'"),
        (lambda: conv2d(X, W, groups=5), "groups divides"),
        (lambda: conv2d(X, W[:, :, :5]), "channels of a group"),
        (lambda: conv2d(X, W.astype("bfloat16")), "one type"),
        (lambda: conv2d(X[0], W), "four axes"),
        (lambda: conv2d(X.astype("int32"), W), "conv2d takes"),
        (lambda: conv2d(X[:, :2], W, padding="VALID"), "as large as the dilated filter"),
        (lambda: conv2d(X, W, precision="exact"), "matrix precision"),
        (lambda: conv2d(None, W), "takes arrays"),
        (lambda: WinogradConfig(product="fp8"), "product"),
        (lambda: WinogradConfig(passes=3), "1 or 2"),
        (lambda: winograd_error_bound(5, "float32", 8), "2, 4, 6"),
    ],
)  # fmt: skip
def test_mistakes_are_named(call: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        call()


@pytest.mark.quick
@pytest.mark.parametrize(
    ("image", "window", "padding"),
    [((2, 28, 30, 3), (14, 14), "VALID"), ((2, 27, 30, 3), (4, 7), "SAME"), ((1, 9, 9, 3), (3, 3), ((2, 0), (1, 4)))],
)
def test_windows_side_by_side_are_one_product(image: Any, window: Any, padding: Any) -> None:
    x, w = (jax.random.normal(jax.random.key(n), s) for n, s in enumerate((image, (*window, image[3], 5))))

    def both(name: str) -> list[jax.Array]:
        made, pull = jax.vjp(
            lambda x, w: conv2d(x, w, strides=window, padding=padding, implementation=name, precision="highest"), x, w
        )
        return [made, *pull(made)]

    for one, other in zip(both("xla_patches"), both("reference"), strict=True):
        # Sums of up to 588 products in float32, in another order.
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * float(jnp.abs(other).max()))


@pytest.mark.quick
def test_a_patch_embedding_is_a_product_on_a_gpu() -> None:
    def taken(channels: int, platform: str, **changes: Any) -> str:
        x, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((8, 64, 64, channels), (16, 16, channels, 32)))
        given = {"strides": (16, 16), "padding": "VALID", **changes}
        with target(platform, "NVIDIA H200" if platform == "gpu" else None):
            return str(select(CONV2D.call(x, w, **given)).implementation)

    assert taken(3, "gpu") == "xla_patches"
    assert taken(3, "cpu") == "xla"
    assert taken(256, "gpu") == "xla"
    assert taken(3, "gpu", strides=(8, 8)) == "xla"
    with pytest.raises(ValueError, match="side by side"):
        conv2d(jnp.ones((1, 8, 8, 3)), jnp.ones((4, 4, 3, 2)), implementation="xla_patches")
