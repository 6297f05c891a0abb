"""Kernels with their choices made once, at construction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxtyping import Array, Float

from capibara.kernels.linalg import levels

__all__ = ["TPUv4Kernels"]


class TPUv4Kernels:
    """Kernels that share a precision, an optimisation level and two switches.

    Args:
      precision: "bfloat16", "float32", "mixed" or "fp8": what operands are rounded to, and the results' type.
      optimization_level: "none" runs the specification, operation by operation; "basic" runs XLA's product;
        "balanced" what dispatch picks; "aggressive" tunes a shape at its first sight, then as "balanced".
      enable_xla_fusion: True makes rounding, product and epilogue one program; False keeps XLA from fusing
        anything across a product's boundary.
      memory_layout_optimization: True reads transposed operands in place; False copies them into row-major
        order first.
    """

    def __init__(
        self,
        precision: str = "bfloat16",
        optimization_level: str = "balanced",
        enable_xla_fusion: bool = True,
        memory_layout_optimization: bool = True,
    ) -> None:
        self.settings = levels.Settings(precision, optimization_level, enable_xla_fusion, memory_layout_optimization)

    def __repr__(self) -> str:
        inner = repr(self.settings).partition("(")[2]
        return f"TPUv4Kernels({inner}"

    def optimized_matmul(
        self,
        a: Float[Array, "*B M K"],
        b: Float[Array, "*B K N"],
        transpose_a: bool = False,
        transpose_b: bool = False,
        precision: str | None = None,
        algorithm: str = "tpu_optimized",
        **epilogue: Any,
    ) -> Float[Array, "*B M N"]:
        """`a @ b`, of which `transpose_a` and `transpose_b` take the last two axes the other way round.

        Args:
          precision: another than the object's.
          algorithm: "tpu_optimized" is what the optimisation level says; "xla", "pallas" (an error where this
            platform has no such kernel) and "reference" are that one.
          epilogue: bias, residual, activation ("gelu", "silu"): `activation(a @ b + bias) + residual`.
        """
        return levels.matmul(
            self.settings,
            a,
            b,
            transpose_a=transpose_a,
            transpose_b=transpose_b,
            precision=precision,
            algorithm=algorithm,
            **epilogue,
        )

    def einsum_optimize(
        self,
        equation: str,
        operands: Sequence[Any],
        optimize: str | bool = "optimal",
        memory_efficient: bool = False,
        **limit: Any,
    ) -> Array:
        """An einsum in the cheapest order of contraction, its matrix products by the object's choices.

        Args:
          optimize: "optimal", "greedy", "auto", True ("optimal") or False (left to right).
          memory_efficient: loop over an index of the output where an intermediate is larger than
            `memory_limit_bytes` (by default a quarter of the device's memory).
          limit: memory_limit_bytes, and precision for another than the object's.
        """
        return levels.einsum(
            self.settings,
            equation,
            operands,
            optimize=optimize,
            memory_efficient=memory_efficient,
            **limit,
        )

    def __getattr__(self, name: str) -> Any:
        has = ", ".join(n for n in vars(TPUv4Kernels) if not n.startswith("_"))
        raise AttributeError(f"TPUv4Kernels has no {name!r} in this version; it has {has}")
