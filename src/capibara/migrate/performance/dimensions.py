"""CAP307: matrices whose sides are no multiples of 128, the side of the matrix units of a TPU."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from capibara.migrate.findings import Finding
from capibara.migrate.module import Module

__all__ = ["check_dimensions"]

SIDE = 128

# Which argument is a shape, whose last two sides are a matrix's.
_SHAPES: dict[str, tuple[int, str]] = {
    **dict.fromkeys(("jax.numpy.zeros", "jax.numpy.ones", "jax.numpy.empty", "jax.numpy.full"), (0, "shape")),
    **dict.fromkeys(
        ("jax.random.normal", "jax.random.uniform", "jax.random.truncated_normal", "jax.random.orthogonal"),
        (1, "shape"),
    ),
    "jax.ShapeDtypeStruct": (0, "shape"),
}
# Layers by how many inputs and outputs they have.
_LAYERS: dict[str, tuple[tuple[int, str], tuple[int, str]]] = {
    "flax.nnx.Linear": ((0, "in_features"), (1, "out_features")),
    "flax.nnx.Embed": ((0, "num_embeddings"), (1, "features")),
    "flax.linen.Embed": ((0, "num_embeddings"), (1, "features")),
    "equinox.nn.Linear": ((0, "in_features"), (1, "out_features")),
    "equinox.nn.Embedding": ((0, "num_embeddings"), (1, "embedding_size")),
    "haiku.Embed": ((0, "vocab_size"), (1, "embed_dim")),
}


def check_dimensions(module: Module) -> Iterator[Finding]:
    """Both sides written as numbers, both over 128, and not both multiples of it."""
    for call in module.calls:
        path = module.resolve(call.func) or ""
        if path in _SHAPES:
            shape = _argument(call, *_SHAPES[path])
            sides = shape.elts[-2:] if isinstance(shape, ast.Tuple | ast.List) and len(shape.elts) >= 2 else []
        elif path in _LAYERS:
            sides = [one for one in (_argument(call, *place) for place in _LAYERS[path]) if one is not None]
        else:
            continue
        numbers = [one.value for one in sides if isinstance(one, ast.Constant) and type(one.value) is int]
        if len(numbers) != 2 or min(numbers) <= SIDE or all(number % SIDE == 0 for number in numbers):
            continue
        padded = [-(-number // SIDE) * SIDE for number in numbers]
        waste = 1 - numbers[0] * numbers[1] / (padded[0] * padded[1])
        message = (
            f"a matrix of {numbers[0]} x {numbers[1]}: a TPU computes it as {padded[0]} x {padded[1]}, "
            f"{waste:.1%} of it padding"
        )
        fix = f"use multiples of {SIDE}, such as {padded[0]} x {padded[1]}, where the numbers are yours to choose"
        yield module.finding(sides[0], "CAP307", message, fix)


def _argument(call: ast.Call, place: int, name: str) -> ast.expr | None:
    for one in call.keywords:
        if one.arg == name:
            return one.value
    return call.args[place] if place < len(call.args) else None
