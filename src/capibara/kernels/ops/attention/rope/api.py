"""rope: the public function and the op behind it, and how attention turns its queries and keys."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer

from capibara.errors import rule_error
from capibara.kernels.core.dispatch import run
from capibara.kernels.core.op import Op, register
from capibara.kernels.core.operands import as_array
from capibara.kernels.core.spec import Gradient, Implementation, describe
from capibara.kernels.ops.attention.rope import gradient, hopper, rules, xla
from capibara.kernels.ops.attention.rope.angles import (
    BASE,
    RopeTables,
    Scaling,
    angles,
    check_known_positions,
    hashable,
)
from capibara.kernels.ops.attention.rope.cases import CASES
from capibara.kernels.ops.attention.rope.reference import reference
from capibara.kernels.ops.attention.rope.scaling import scaling_numbers

ROPE: Op = Op(
    "rope",
    family="attention",
    reference=reference,
    operands=("x", "cos", "sin"),
    params={"style": "half", "layout": "bthd", "fixed_angles": False},
    hints=("fixed_angles",),
    check=rules.check,
    cost=rules.cost,
    tolerance=rules.tolerance,
    gradient=Gradient(gradient.forward, lambda *args: gradient.backward(ROPE, *args)),
    batch=rules.batch,
    partition=rules.PARTITION,
    cases=CASES,
)
ROPE.implement(xla.IMPLEMENTATION, hopper.IMPLEMENTATION, Implementation("reference", reference))


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["tables", "query_positions", "key_positions"],
    meta_fields=["base", "style", "scaling", "rotary_dim"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class Rope:
    """How `attention(..., rope=...)` turns queries and keys: `rope`'s arguments, with positions for both.

    A pytree: tables and positions are its arrays, so it may be an argument of a jitted function.

    Args:
      base, style, scaling, rotary_dim, tables: as in `rope`.
      query_positions: [queries] or [batch, queries]; by default attention's query_offset, query_offset + 1, …
      key_positions: [keys] or [batch, keys]; by default 0, 1, 2, …

    >>> Rope(base=500_000.0).style
    'half'
    """

    base: float = BASE
    style: str = "half"
    scaling: Any = None
    rotary_dim: int | None = None
    tables: RopeTables | None = None
    query_positions: Any = None
    key_positions: Any = None

    def __post_init__(self) -> None:
        # JAX builds these too, with anything in place of the arrays: only what is static is looked at.
        _check_static(self.style, self.base, self.scaling, self.tables)
        object.__setattr__(self, "scaling", hashable(self.scaling))
        for name in ("query_positions", "key_positions"):
            if isinstance(getattr(self, name), list):  # to JAX a list is a tree of numbers, not an array
                object.__setattr__(self, name, np.asarray(getattr(self, name)))


def rope(
    x: Float[Array, "B T H D"],
    positions: Integer[Array, " _"] | Integer[Array, "B _"] | None = None,
    *,
    base: float = BASE,
    style: str = "half",
    scaling: Mapping[str, Any] | None = None,
    layout: str = "bthd",
    tables: RopeTables | None = None,
    rotary_dim: int | None = None,
    implementation: str | None = None,
    config: Any = None,
) -> Float[Array, "B T H D"]:
    """Rotate queries or keys by their positions.

    Args:
      x: [batch, length, heads, head_dim], or with layout="bhtd" [batch, heads, length, head_dim].
      positions: [length] or [batch, length]; 0, 1, 2, … by default.
      base: the slowest pair turns once in about 2π · base positions.
      style: "half" pairs number i with i + rotary_dim / 2 (Llama, NeoX), "interleaved" 2i with 2i + 1 (GPT-J, and the
        original Llama weights).
      scaling: for contexts longer than the model was trained on: {"type": "linear" | "ntk" | "yarn" | "llama3",
        "factor": ..., ...}; yarn and llama3 also need "original_length".
      tables: from `rope_tables`, longer than the largest position; they stand in for base and scaling. A position
        that is known on the host (numpy, a list) and is not in them is an error, one on a device gives NaN. Without
        tables and with positions, angles are put together from those of the position's digits, exactly enough
        for positions below 2^24, and NaN beyond.
      rotary_dim: turn the first so many numbers of each head and leave the others; all of them by default.
      implementation: force one by name ("xla", "hopper", "reference"); a refusal is an error.
      config: that implementation's tuning choices; by default from the tuned table or a rule.

    >>> rope(jnp.ones((1, 10, 2, 64))).shape
    (1, 10, 2, 64)
    """
    _check_static(style, base, scaling, tables)
    check_known_positions("positions", positions, tables)
    return _rotated(
        as_array("rope", "x", x), positions, 0, base, style, hashable(scaling), layout, tables, rotary_dim,
        _are_fixed(tables), implementation, config,
    )  # fmt: skip


def rotate_both(query: jax.Array, key: jax.Array, given: Rope, layout: str, query_offset: int) -> tuple[Any, Any]:
    """The queries and the keys of attention, turned. Outside of jit this is one program; inside, it is inlined."""
    if not isinstance(given, Rope):
        raise rule_error(
            "attention's rope is a Rope", f"a {type(given).__name__}", "pass rope=Rope(...), tables as Rope(tables=...)"
        )
    for name in ("query_positions", "key_positions"):
        check_known_positions(name, getattr(given, name), given.tables)
    fixed = _are_fixed(given.tables)
    return _rotate_both(query, key, given, layout=layout, query_offset=query_offset, fixed=fixed)


@functools.partial(jax.jit, static_argnames=("layout", "query_offset", "fixed"), inline=True)
def _rotate_both(
    query: jax.Array, key: jax.Array, given: Rope, *, layout: str, query_offset: int, fixed: bool
) -> tuple[Any, Any]:
    common = (given.base, given.style, given.scaling, layout, given.tables, given.rotary_dim, fixed)
    return (
        _rotated(query, given.query_positions, query_offset, *common),
        _rotated(key, given.key_positions, 0, *common),
    )


def _check_static(style: str, base: float, scaling: Any, tables: Any) -> None:
    rules.check_style(style)
    if scaling is not None:
        scaling_numbers(dict(scaling))
    if tables is not None and (base != BASE or scaling is not None):
        raise rule_error(
            "Angles come from tables or from base and scaling",
            f"tables with base={base}, scaling={scaling}",
            "pass base and scaling to rope_tables alone",
        )


def _are_fixed(tables: RopeTables | None) -> bool:
    """Whether nobody can ask for the gradient of the angles: positions are whole numbers, and a host's tables given."""
    return tables is None or all(isinstance(table, np.ndarray) for table in tables)


def _rotated(
    x: jax.Array, positions: Any, start: int, base: float, style: str, scaling: Scaling, layout: str,
    tables: RopeTables | None, rotary_dim: int | None, fixed: bool, implementation: str | None = None,
    config: Any = None,
) -> jax.Array:  # fmt: skip
    rules.check_x(x, layout)
    length, depth = x.shape[layout.index("t")], x.shape[-1]
    dim = depth if rotary_dim is None else rotary_dim
    if dim > depth:
        raise rule_error("rotary_dim is at most head_dim", f"{dim} of {depth}", "check both")
    if positions is not None:
        positions = jnp.asarray(positions)
        if positions.shape not in ((length,), (x.shape[0], length)) or not jnp.issubdtype(positions.dtype, jnp.integer):
            raise rule_error(
                f"positions is [length] or [batch, length], here [{length}] or [{x.shape[0]}, {length}], of integers",
                describe(positions),
                "check its shape and type",
            )
    cos, sin = angles(dim, start, length, positions, base, scaling, tables)
    params = {"style": style, "layout": layout} | ({"fixed_angles": True} if fixed else {})
    return run(ROPE, (x, cos, sin), params, implementation=implementation, config=config)


ROPE.public = rope
register(ROPE)
