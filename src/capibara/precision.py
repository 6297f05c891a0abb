"""Dtype policies: which dtype parameters, products, sums and results have.

Four policies by name: "bfloat16", "float32", "mixed" and "fp8" (experimental). Dtypes are names, so that a
policy is light, hashes and can be a static argument; jax is imported when something is computed.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from capibara.errors import rule_error, say_once, unknown_name

if TYPE_CHECKING:
    import jax

__all__ = [
    "FP8_LARGEST",
    "POLICIES",
    "Fp8Settings",
    "Policy",
    "PrecisionConfig",
    "QuantizedFp8",
    "fp8_scale",
    "policy",
    "quantize_fp8",
    "round_fp8",
]

FP8_LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
"""The largest finite value of each format that products take: the one for values, and the one for gradients."""
# The exponents a float32 scale, and one over it, may have without going subnormal, which accelerators flush to zero.
_SCALE_EXPONENTS = (-126, 126)
SCALINGS = ("current", "delayed")
SCALES = ("tensor", "block")
_HISTORY = 16


@dataclass(frozen=True)
class Fp8Settings:
    """How the operands of fp8 products in training are scaled to fp8's range.

    >>> Fp8Settings(scaling="delayed").steps
    16
    """

    scaling: str = "current"
    """ "current": by the largest magnitude of the tensor itself, which is read once more for it. "delayed": what enters
    a product, and the gradient of what leaves it, by the largest of the last steps, and no pass is spent; what grew
    beyond is cut off at fp8's largest. Weights are scaled by their own magnitude either way."""
    scales: str = "tensor"
    """ "tensor": one scale a tensor, by the matrix units for fp8 where a chip has them. "block": one for 128 numbers
    along the sum, and one for 128x128 of a weight; emulated in bfloat16 on every chip."""
    history: int = 0
    """Steps whose largest magnitudes "delayed" keeps; 16 when 0."""

    def __post_init__(self) -> None:
        if self.scaling not in SCALINGS:
            raise unknown_name("fp8.scaling", self.scaling, SCALINGS)
        if self.scales not in SCALES:
            raise unknown_name("fp8.scales", self.scales, SCALES)
        if isinstance(self.history, bool) or not isinstance(self.history, int) or self.history < 0:
            raise rule_error("fp8.history is a whole number from 0 up", repr(self.history), "use history = 16")
        if self.history and self.scaling == "current":
            raise rule_error(
                'fp8.history is kept for scaling = "delayed"',
                f'history = {self.history} and scaling = "current"',
                "leave history out",
            )
        if self.scaling == "delayed" and self.scales == "block":
            raise rule_error(
                "Scales of blocks are those of the tensor itself",
                'scaling = "delayed" and scales = "block"',
                'use scaling = "current", or scales = "tensor"',
            )

    @property
    def steps(self) -> int:
        """That a history has: 0 where none is kept."""
        return (self.history or _HISTORY) if self.scaling == "delayed" else 0


@dataclass(frozen=True)
class Policy:
    """What dtype each part of a computation has."""

    name: str
    param_dtype: str
    compute_dtype: str
    """What the operands of a product are held in."""
    output_dtype: str
    accumulate_dtype: str
    """What sums are kept in: `preferred_element_type` of every dot, softmax, norm and scan state."""
    matmul_precision: str
    """jax's name for how many passes a product of float32 operands takes: "default", "high", "highest"."""
    rounds_to_fp8: bool = False
    """Whether the operands of a product are rounded to fp8 values first (`round_fp8`)."""

    @property
    def lax_precision(self) -> jax.lax.Precision:
        return _lax_precision(self.matmul_precision)

    def cast_to_param(self, tree: Any) -> Any:
        """The floating arrays of a pytree as parameters are stored."""
        return _cast(tree, self.param_dtype)

    def cast_to_compute(self, tree: Any) -> Any:
        """The floating arrays of a pytree as operands of a product, rounded to fp8 values where asked."""
        return _cast(tree, self.compute_dtype, round_fp8 if self.rounds_to_fp8 else None)

    def cast_to_output(self, tree: Any) -> Any:
        """The floating arrays of a pytree as results are returned."""
        return _cast(tree, self.output_dtype)


POLICIES: dict[str, Policy] = {
    one.name: one
    for one in (
        Policy(
            name="bfloat16",
            param_dtype="bfloat16",
            compute_dtype="bfloat16",
            output_dtype="bfloat16",
            accumulate_dtype="float32",
            matmul_precision="default",
        ),
        Policy(
            name="float32",
            param_dtype="float32",
            compute_dtype="float32",
            output_dtype="float32",
            accumulate_dtype="float32",
            # By default a TPU and a GPU multiply float32 in fewer bits; who asks for float32 means it.
            matmul_precision="highest",
        ),
        Policy(
            name="mixed",
            param_dtype="float32",
            compute_dtype="bfloat16",
            output_dtype="float32",
            accumulate_dtype="float32",
            matmul_precision="default",
        ),
        Policy(
            name="fp8",
            param_dtype="float32",
            compute_dtype="bfloat16",
            output_dtype="bfloat16",
            accumulate_dtype="float32",
            matmul_precision="default",
            rounds_to_fp8=True,
        ),
    )
}


class PrecisionConfig(enum.Enum):
    """How exact a kernel is, from fast to exact; FP8 is experimental."""

    DEFAULT = "default"
    HIGH = "high"
    HIGHEST = "highest"
    FP8 = "fp8"

    @property
    def policy(self) -> Policy:
        """DEFAULT: all bfloat16. HIGH: mixed. HIGHEST: all float32. FP8: fp8 values."""
        return policy(_CONFIG_POLICIES[self])

    @property
    def lax_precision(self) -> jax.lax.Precision:
        """jax's precision of the same name, which float32 operands heed; FP8 has jax's default."""
        return _lax_precision("default" if self is PrecisionConfig.FP8 else self.value)


_CONFIG_POLICIES = {
    PrecisionConfig.DEFAULT: "bfloat16",
    PrecisionConfig.HIGH: "mixed",
    PrecisionConfig.HIGHEST: "float32",
    PrecisionConfig.FP8: "fp8",
}


def policy(name: str | Policy | PrecisionConfig) -> Policy:
    """The policy of this name; the first "fp8" of a process warns that it is experimental.

    Examples:
        >>> policy("mixed").compute_dtype
        'bfloat16'
    """
    if isinstance(name, Policy):
        return name
    if isinstance(name, PrecisionConfig):
        return name.policy
    if not isinstance(name, str) or name not in POLICIES:
        raise unknown_name("precision", name, POLICIES)
    if name == "fp8":
        say_once(
            UserWarning,
            name,
            "precision='fp8' is experimental: operands are rounded to float8_e4m3fn values with one scale a tensor. A "
            "plain gemm is one of fp8 where a GPU has matrix units for it; all else multiplies by the bfloat16 units, "
            "which emulates fp8 and is no faster than bfloat16.",
            stacklevel=2,
        )
    return POLICIES[name]


def _lax_precision(name: str) -> jax.lax.Precision:
    import jax

    return jax.lax.Precision(name)


def _cast(tree: Any, dtype: str, then: Callable[[Any], Any] | None = None) -> Any:
    import jax
    import jax.numpy as jnp

    def one(leaf: Any) -> Any:
        # Token ids, masks and keys keep their dtype.
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            return leaf
        rounded = leaf if then is None else then(jnp.asarray(leaf))
        return jnp.asarray(rounded, dtype)

    return jax.tree.map(one, tree)


class QuantizedFp8(NamedTuple):
    """A tensor as fp8 values and one scale: `values * scale`."""

    values: jax.Array
    """float8_e4m3fn, the tensor's shape."""
    scale: jax.Array
    """float32 scalar, a power of two."""

    def dequantize(self, dtype: Any = "bfloat16") -> jax.Array:
        """The tensor again; exact in bfloat16 and wider, where 4 significant bits fit with room to spare."""
        import jax.numpy as jnp

        return (self.values.astype(jnp.float32) * self.scale).astype(dtype)


def quantize_fp8(x: Any) -> QuantizedFp8:
    """Round a tensor to float8_e4m3fn values with one scale for all of it.

    The scale is the smallest power of two that brings the largest magnitude within e4m3's 448. A power of
    two costs no precision, since a floating format's spacing scales with it, and makes `dequantize` exact.
    A value of at least scale/64 comes back within 1/16 of itself; a smaller one, below e4m3's normal
    numbers, within scale/1024. e4m3fn has no infinity: an infinite or NaN entry becomes NaN.
    """
    import jax.numpy as jnp

    wide = jnp.asarray(x, jnp.float32)
    scale = fp8_scale(jnp.max(jnp.abs(wide), initial=0.0, where=jnp.isfinite(wide)))
    scaled = jnp.where(jnp.isfinite(wide), wide / scale, jnp.nan)
    return QuantizedFp8(scaled.astype(jnp.float8_e4m3fn), scale)


def fp8_scale(largest: Any, dtype: str = "float8_e4m3fn") -> jax.Array:
    """The smallest power of two that brings these magnitudes within the format's largest; 1 of nothing but zeros, and
    NaN of what is not finite."""
    import jax.numpy as jnp

    largest = jnp.asarray(largest, jnp.float32)
    mantissa, exponent = jnp.frexp(largest / FP8_LARGEST[dtype])
    # frexp gives mantissa * 2**exponent with mantissa in [0.5, 1): at exactly 0.5 one power less is enough.
    exponent = jnp.clip(exponent - (mantissa == 0.5), *_SCALE_EXPONENTS)
    scale = jnp.where(largest > 0, jnp.ldexp(jnp.float32(1), exponent), 1.0)
    return jnp.where(jnp.isfinite(largest), scale, jnp.nan).astype(jnp.float32)


def round_fp8(x: Any) -> jax.Array:
    """The tensor rounded to fp8 values, in its own dtype; its gradient is that of the identity.

    Rounding has a derivative of zero almost everywhere, which would stop training: the gradient passes
    straight through instead.
    """
    return _round_fp8()(x)


@functools.cache
def _round_fp8() -> Callable[[Any], jax.Array]:
    import jax
    import jax.numpy as jnp

    @jax.custom_jvp
    def rounded(x: Any) -> jax.Array:
        return quantize_fp8(x).dequantize(jnp.result_type(x))

    @rounded.defjvp
    def _(primals: tuple[Any], tangents: tuple[Any]) -> tuple[jax.Array, Any]:
        return rounded(primals[0]), tangents[0]

    return rounded
