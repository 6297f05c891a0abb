"""What a call of gated_products or of its gradient may be, its cost, and how far from exact it may come."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from capibara.errors import rule_error, unknown_name
from capibara.kernels.core.spec import FLOATS, Call, Cost, Partition, describe, nbytes, unit_roundoff
from capibara.kernels.ops.layers.activation.formulas import KINDS
from capibara.kernels.ops.layers.gated_mlp.pairs import WIDTH


class Sizes(NamedTuple):
    rows: int
    depth: int
    """Numbers that a product sums over."""
    columns: int
    """Of the activation: half of those of the products."""


def sizes(call: Call) -> Sizes:
    (rows, depth), held = (call.need(name).shape for name in call.op.operands[:2])
    return Sizes(rows, depth, held[0] if call.op.name.endswith("grad") else held[1] // 2)


def _dtype(call: Call) -> np.dtype[Any]:
    """Of all operands."""
    return np.dtype(call.need(call.op.operands[0]).dtype)


def check(call: Call) -> None:
    """Refuse a call that has no meaning, saying the rule, what arrived and the fix."""
    names = ", ".join(f"{name} [{axes}]" for name, axes in _axes(call).items())
    if any(a is None or len(a.shape) != 2 for a in call.args):
        raise rule_error(f"{call.op.name} takes {names}", call.signature, "reshape them")
    given = {name: call.need(name) for name in call.op.operands}
    for name, a in given.items():
        if np.dtype(a.dtype).name not in FLOATS or a.dtype != _dtype(call):
            raise rule_error(
                f"Operands of {call.op.name} have one type of {', '.join(FLOATS)}",
                f"{name} of {describe(a)} ({call.signature})",
                f"convert {name} with .astype()",
            )
    if call.params["kind"] not in KINDS:
        raise unknown_name(f"kind of {call.op.name}", str(call.params["kind"]), KINDS)
    known: dict[str, int] = {}
    for name, axes in _axes(call).items():
        for axis, length in zip(axes.split(", "), given[name].shape, strict=True):
            times, axis = (2, axis.removeprefix("2·")) if axis.startswith("2·") else (1, axis)
            if length % times or known.setdefault(axis, length // times) != length // times:
                raise rule_error(f"{call.op.name} takes {names}", call.signature, "check which array is which")
    if known["columns"] % WIDTH:
        raise rule_error(
            f"Pairs are of {WIDTH} columns of each kind: columns are a multiple of {WIDTH}",
            f"{known['columns']} ({call.signature})",
            "use gated_mlp, which takes any number",
        )


def _axes(call: Call) -> dict[str, str]:
    if call.op.name.endswith("grad"):
        return {"d_out": "rows, outputs", "down": "columns, outputs", "products": "rows, 2·columns"}
    return {"x": "rows, K", "pairs": "K, 2·columns"}


def cost(call: Call) -> Cost:
    """Every operand read once, every result written once."""
    n, dtype = sizes(call), _dtype(call)
    grad = call.op.name.endswith("grad")
    wide = n.columns if grad else 2 * n.columns
    written = 2 * n.columns if grad else n.columns * (3 if call.params["keep"] else 1)
    return Cost(
        matrix_flops=2.0 * n.rows * n.depth * wide,
        bytes=float(sum(map(nbytes, call.args)) + n.rows * written * dtype.itemsize),
        dtype=dtype.name,
    )


def tolerance(call: Call) -> float:
    """The relative error, in norm and at the worst element against the largest, that a right result stays under.

    One unit of the result's type for it, and one for each of two factors that an implementation may round before they
    are multiplied. A kernel's tanh is within 2^-11, an eighth of bfloat16's unit. Sums in float32 grow as the root of
    their length, four of them for an unlucky draw.
    """
    dtype = _dtype(call)
    wide = unit_roundoff(jnp.promote_types(jnp.float32, dtype))
    return 3.25 * unit_roundoff(dtype) + 4 * wide * max(sizes(call).depth, 1) ** 0.5


def _partition(rule: str) -> Partition:
    """Rows and pairs go to any device, pairs (b) as the whole blocks of columns that they are made of."""
    return Partition(
        lambda call: rule if call.params.get("keep", True) else rule.rsplit(",", 1)[0],
        replicated=lambda call: ("d", "p", "c"),
        sizes=lambda call: {"b": sizes(call).columns // WIDTH, "p": 2 * WIDTH, "c": WIDTH},
        logical={"m": "batch", "b": "mlp"},
    )


PARTITION = _partition("m d, d (b p) -> m (b c), m (b p)")
PARTITION_GRAD = _partition("m d, (b c) d, m (b p) -> m (b p)")
