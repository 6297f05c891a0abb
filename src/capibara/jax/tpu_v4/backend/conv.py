"""Convolutions by their documented names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxtyping import Array, Float

from capibara.kernels.ops import conv
from capibara.surface.in_precision import in_precision

Pads = str | Sequence[Sequence[int]]


class TpuV4ConvOps:
    """Convolutions of images (NHWC with HWIO filters) and of sequences [batch, time, channels].

    `precision`, as in the other objects, is "bfloat16", "float32", "mixed" or "fp8": what the operands are rounded to
    and the result's type. It is None here by default, which keeps the operands' own. Sums are float32.
    """

    def winograd_conv2d(
        self,
        inputs: Float[Array, "N H W C"],
        filters: Float[Array, "R S C O"],
        strides: int | Sequence[int] = 1,
        padding: Pads = "SAME",
        tile_size: int | Sequence[int] | None = None,
        precision: str | None = None,
        **extra: Any,
    ) -> Float[Array, "N Y X O"]:
        """The convolution by Winograd's transforms, F(tile x tile, 3x3), where it is one they are for.

        Args:
          inputs, filters: NHWC and HWIO, of one type.
          strides, padding: as in `conv2d`.
          tile_size: the output tile, as its side or the pair of both, which are alike: 2 is F(2x2, 3x3), 4 F(4x4, 3x3)
            and 6, float32 only, F(6x6, 3x3). A larger tile multiplies less and rounds more: see
            `capibara.kernels.winograd_error_bound`. None takes 4 for float32, and 2 for 16-bit types.
          extra: conv2d's other arguments: dilation, groups, implementation, config.

        A filter that is not 3x3, a stride or dilation that is not 1, or groups go to the direct convolution;
        `capibara.kernels.explain` shows it, and the log says it once.

        >>> import jax.numpy as jnp
        >>> x = jnp.ones((1, 8, 8, 3)); w = jnp.ones((3, 3, 3, 4))
        >>> TpuV4ConvOps().winograd_conv2d(x, w, strides=1, padding="VALID", tile_size=(2, 2)).shape
        (1, 6, 6, 4)
        """
        given: dict[str, Any] = {"strides": strides, "padding": padding, "tile_size": tile_size}
        return in_precision(conv.winograd_conv2d, precision, (inputs, filters), rounds=(0, 1), **given, **extra)

    def conv2d(
        self,
        inputs: Float[Array, "N H W C"],
        filters: Float[Array, "R S Cg O"],
        strides: int | Sequence[int] = 1,
        padding: Pads = "SAME",
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        precision: str | None = None,
        **extra: Any,
    ) -> Float[Array, "N Y X O"]:
        """The convolution by the fastest implementation that takes it. `extra`: tile_size, implementation, config."""
        given: dict[str, Any] = {"strides": strides, "padding": padding, "dilation": dilation, "groups": groups}
        return in_precision(conv.conv2d, precision, (inputs, filters), rounds=(0, 1), **given, **extra)

    def causal_conv1d(
        self,
        x: Float[Array, "B T C"],
        w: Float[Array, "width C"],
        bias: Float[Array, " C"] | None = None,
        activation: str | None = None,
        precision: str | None = None,
        **extra: Any,
    ) -> Any:
        """Each channel with its own short filter over the past.

        `extra`: initial_state, return_state, implementation, config: see `capibara.kernels.causal_conv1d`.
        """
        arrays = (x, w, bias)
        return in_precision(conv.causal_conv1d, precision, arrays, rounds=(0, 1), activation=activation, **extra)

    def causal_conv1d_step(
        self,
        state: Float[Array, "B before C"],
        x: Float[Array, "B C"],
        w: Float[Array, "width C"],
        bias: Float[Array, " C"] | None = None,
        activation: str | None = None,
    ) -> tuple[Float[Array, "B C"], Float[Array, "B before C"]]:
        """(y, next state): one step of `causal_conv1d`, for generation."""
        return conv.causal_conv1d_step(state, x, w, bias, activation=activation)

    def long_conv(
        self,
        x: Float[Array, "B T C"],
        h: Float[Array, "L C"],
        **extra: Any,
    ) -> Float[Array, "B T C"]:
        """Each channel with its own filter, as long as the sequence. `extra`: precision ("float32", or "bfloat16" for
        the products inside), implementation: see `capibara.kernels.long_conv`."""
        return conv.long_conv(x, h, **extra)
