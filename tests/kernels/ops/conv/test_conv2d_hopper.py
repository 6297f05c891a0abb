"""F(4x4, 3x3) for Hopper, emulated: what its two kernels compute, and what they do not take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.kernels import explain, target, winograd_error_bound
from capibara.kernels.ops.conv import conv2d
from capibara.kernels.ops.conv.conv2d.hopper.forward import WalkConfig, conv2d_hopper
from capibara.kernels.ops.conv.conv2d.reference import reference

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("images", "dtype", "outputs", "tiles"),
    [
        # Columns that one tile hands to the next; one and two channels to a thread.
        ((1, 4, 8, 128), "float32", 256, 8),
        # Two images, rows and columns that end inside a tile, a program a tile; two and one channels to a thread.
        ((2, 5, 3, 256), "bfloat16", 128, 1),
    ],
)
def test_emulated(
    emulated_hopper: Callable[..., Any], images: tuple[int, ...], dtype: str, outputs: int, tiles: int
) -> None:
    """The result, with uneven padding."""
    channels = images[3]
    draw = np.random.default_rng(0).standard_normal
    x = jnp.asarray(draw(images), dtype)
    w = jnp.asarray(draw((3, 3, channels, outputs)), dtype)
    params: dict[str, Any] = {"strides": (1, 1), "padding": ((1, 1), (0, 2)), "dilation": (1, 1), "groups": 1}
    got = emulated_hopper(conv2d_hopper, x, w, config=WalkConfig(tiles=tiles), precision=None, **params)
    want = np.asarray(reference(x.astype("float32"), w.astype("float32"), **params))
    assert got.dtype == dtype
    assert got.shape == want.shape
    error = np.abs(np.asarray(got.astype("float32")) - want).max() / np.abs(want).max()
    assert error <= winograd_error_bound(4, dtype, channels)


def test_what_it_takes() -> None:
    def told(x: tuple[int, ...], w: tuple[int, ...], **options: Any) -> str:
        shapes = (jax.ShapeDtypeStruct(s, options.pop("dtype", "float32")) for s in (x, w))
        return str(explain(conv2d, *shapes, precision="highest", **options))

    with target("gpu"):
        assert "not hopper: it accepts" in told((2, 8, 8, 128), (3, 3, 128, 128))
        assert "a multiple of 128, not 96 to 128" in told((2, 8, 8, 96), (3, 3, 96, 128))
        assert "up to 2 zeros" in told((2, 8, 8, 128), (3, 3, 128, 128), padding=((3, 0), (0, 0)))
        assert "2**31" in told((4096, 56, 56, 256), (3, 3, 256, 256))
        assert "not hopper: it is for 3x3" in told((2, 8, 8, 128), (1, 1, 128, 128))
    with target("gpu", "NVIDIA A100"):
        assert "written for Hopper" in told((2, 8, 8, 128), (3, 3, 128, 128))


@pytest.mark.parametrize("mistake", [{"tiles": 0}, {"product": "fp8"}])
def test_a_wrong_config_is_named(mistake: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"a tile or more|product"):
        WalkConfig(**mistake)
