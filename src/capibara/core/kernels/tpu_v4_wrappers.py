"""Kernels with their choices made once, at construction."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from jaxtyping import Array, Float

from capibara.axes import current_rules, mesh_axes_of
from capibara.surface import attention as by_level
from capibara.surface import products as levels
from capibara.surface.draws import Draws
from capibara.surface.figures import LastKernel
from capibara.surface.kernel_figures import Figures
from capibara.surface.kernel_layers import LayerKernels

__all__ = ["TPUv4Kernels"]


class TPUv4Kernels(LayerKernels, Figures):
    """Kernels that share a precision, an optimisation level and two switches.

    Args:
      precision: "bfloat16", "float32", "mixed" or "fp8": what operands are rounded to, and the results' type.
      optimization_level: "none" runs the specification, operation by operation; "basic" runs plain XLA;
        "balanced" what dispatch picks; "aggressive" tunes a shape at its first sight, then as "balanced". Tuning times
        what there is to choose from, which takes seconds where there is a choice, and writes the answer to the user's
        cache ($CAPIBARA_CACHE_DIR); the log says so. The other levels neither time nor write anything.
      enable_xla_fusion: True makes rounding, product and epilogue one program; False keeps XLA from fusing
        anything across a kernel's boundary.
      memory_layout_optimization: True reads transposed operands in place; False copies them into row-major
        order first.
      seed: what dropout's keys come from where a call is given none: a new key each call, the same ones for the
        same seed.
    """

    def __init__(
        self,
        precision: str = "bfloat16",
        optimization_level: str = "balanced",
        enable_xla_fusion: bool = True,
        memory_layout_optimization: bool = True,
        seed: int = 0,
    ) -> None:
        self.draws = Draws(seed)
        self.last = LastKernel()
        self.settings = levels.Settings(precision, optimization_level, enable_xla_fusion, memory_layout_optimization)

    def __repr__(self) -> str:
        inner = repr(self.settings).partition("(")[2]
        return f"TPUv4Kernels({inner}"

    def flash_attention(
        self,
        query: Float[Array, "B H T D"],
        key: Float[Array, "B Hkv S D"],
        value: Float[Array, "B Hkv S D"],
        attention_mask: Any = None,
        dropout_rate: float = 0.0,
        causal: bool = False,
        sequence_parallel: bool | str = False,
        **extra: Any,
    ) -> Any:
        """softmax(q kᵀ / sqrt(head_dim)) v in memory linear in the length.

        Args:
          query, key, value: [batch, heads, length, head_dim]; the query's heads are a multiple of the key's.
          attention_mask: [batch, keys] for padding, [queries, keys], [batch, queries, keys], or four axes of which
            the first three may be 1. True, or an integer that is not 0, lets a query see a key; floats are added to
            the scores, and minus infinity hides.
          dropout_rate: of the probabilities; above 0 it draws the object's next key, or from `rng`.
          causal: a query sees keys up to its own position.
          sequence_parallel: split the sequence over a mesh axis, named, or True for where the rules in force
            (`capibara.mesh.use_rules`) put a "sequence"; "batch" and "heads" stay where they put them. Without
            such an axis, and with what a split sequence does not take (a mask, dropout, keys of another
            length), it is plain attention on the same mesh, which is said once. A name that the mesh lacks is an
            error.
          extra: rng, precision for another than the object's, layout ("bhtd" or "bthd"), segment_ids,
            key_segment_ids, window, scale, softcap, query_offset, return_lse.
        """
        rules = current_rules()
        axes = by_level.MeshAxes(*(mesh_axes_of(rules.get(name)) for name in ("sequence", "batch", "heads")))
        return self.last.run(
            functools.partial(by_level.attend, self.settings, self.draws, axes),
            keys=("rng",),
            counted_as={"sequence_parallel": False},
            query=query,
            key=key,
            value=value,
            attention_mask=attention_mask,
            dropout_rate=dropout_rate,
            causal=causal,
            sequence_parallel=sequence_parallel,
            **extra,
        )

    def optimized_matmul(
        self,
        a: Float[Array, "*#B rows_a columns_a"],
        b: Float[Array, "*#B rows_b columns_b"],
        transpose_a: bool = False,
        transpose_b: bool = False,
        precision: str | None = None,
        algorithm: str = "tpu_optimized",
        **epilogue: Any,
    ) -> Float[Array, "*#B M N"]:
        """`a @ b`, of which `transpose_a` and `transpose_b` take the last two axes the other way round.

        Args:
          precision: another than the object's.
          algorithm: "tpu_optimized" is what the optimisation level says; "xla", "pallas" (an error where this
            platform has no such kernel) and "reference" are that one.
          epilogue: bias, residual, activation ("gelu", "silu"): `activation(a @ b + bias) + residual`.
        """
        return self.last.run(
            functools.partial(levels.matmul, self.settings),
            a=a,
            b=b,
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
        return self.last.run(
            functools.partial(levels.einsum, self.settings),
            counted_as={"memory_efficient": False, "memory_limit_bytes": None},
            equation=equation,
            operands=list(operands),
            optimize=optimize,
            memory_efficient=memory_efficient,
            **limit,
        )

    def __getattr__(self, name: str) -> Any:
        names = (n for one in TPUv4Kernels.__mro__ for n in vars(one) if not n.startswith("_"))
        has = ", ".join(names)
        raise AttributeError(f"TPUv4Kernels has no {name!r} in this version; it has {has}")
