"""A few shapes in place of many: arguments are padded up to sizes that were compiled already, and results cut back.

A function that is called with every length from 1 to 2048 compiles 2048 programs; with lengths rounded up to powers of
two it compiles 12. What is padded is declared by name, dimension by dimension, and nothing else is; results are cut in
the dimensions that are declared for them. The padding's value is the caller's choice, and so is what the function makes
of it: a softmax or a sum over a padded dimension needs a mask, which is an argument like any other (padded with
`fill`), or the true size, which `true_sizes=` hands over as a whole number.

An array of a device is padded, and a result cut, by a small program for each size, milliseconds to compile. Arrays of
the host are padded there, and with `on_host=True` results are cut there: then nothing is compiled but the buckets.
"""

from __future__ import annotations

import functools
import inspect
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from capibara.errors import rule_error

__all__ = ["BucketedFunction", "bucket_of", "bucketed", "power_of_two_buckets"]

Dims = Mapping[str, Mapping[int, str]]


def power_of_two_buckets(smallest: int, largest: int) -> tuple[int, ...]:
    """Powers of two from the first at or above `smallest` to the first at or above `largest`.

    >>> power_of_two_buckets(16, 100)
    (16, 32, 64, 128)
    """
    if not 1 <= smallest <= largest:
        raise rule_error(
            "Buckets go from 1 or more up", f"{smallest} to {largest}", "use power_of_two_buckets(16, 2048)"
        )
    first, last = (smallest - 1).bit_length(), (largest - 1).bit_length()
    return tuple(1 << power for power in range(first, last + 1))


def bucket_of(size: int, buckets: Sequence[int]) -> int:
    """The least bucket that holds so many.

    >>> bucket_of(17, (16, 32))
    32
    """
    at = bisect_left(buckets, size)
    if at == len(buckets):
        raise rule_error(f"A size is at most the largest bucket, {buckets[-1]}", size, "add a larger bucket")
    return buckets[at]


def bucketed(
    buckets: Mapping[str, Sequence[int]],
    *,
    pad: Dims,
    cut: Mapping[int, str] | Sequence[Mapping[int, str]] = (),
    fill: Mapping[str, float] | None = None,
    true_sizes: Mapping[str, str] | None = None,
    on_host: bool = False,
) -> Callable[[Callable[..., Any]], BucketedFunction]:
    """A decorator: the function jitted, its declared dimensions padded to buckets, its results cut back.

    >>> import jax.numpy as jnp
    >>> @bucketed({"length": (4, 8)}, pad={"x": {0: "length"}}, cut={0: "length"})
    ... def doubled(x):
    ...     return 2 * x
    >>> [doubled(jnp.ones(n)).shape[0] for n in (2, 3, 4, 7)], doubled.sizes_seen
    ([2, 3, 4, 7], 2)

    Args:
      buckets: by the name of a size, the sizes that are compiled.
      pad: by the name of an argument, which of its dimensions is which size. All arrays of an argument that is a tree.
      cut: which dimension of the result is which size; a sequence of these where there are several results.
      fill: by the name of an argument, what it is padded with: 0 by default, False of a mask.
      true_sizes: by the name of an argument, the size whose true value it gets, as an int32 array.
      on_host: give results as numpy arrays, cut on the host.
    """
    for name, sizes in buckets.items():
        if not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
            raise rule_error(f"The buckets of {name} are whole numbers that grow", list(sizes), "use (16, 32, 64)")
    named = {size for dims in pad.values() for size in dims.values()}
    results = [cut] if isinstance(cut, Mapping) else list(cut)
    for size in (*named, *(size for dims in results for size in dims.values()), *(true_sizes or {}).values()):
        if size not in buckets:
            raise rule_error("A dimension is a size that has buckets", repr(size), f"use one of {sorted(buckets)}")
    for size in {size for dims in results for size in dims.values()} - named:
        raise rule_error("A result is cut to the size of an argument", repr(size), "pad an argument of that size")
    return functools.partial(
        BucketedFunction,
        buckets=buckets,
        pad=pad,
        cut=cut,
        fill=dict(fill or {}),
        true_sizes=dict(true_sizes or {}),
        on_host=on_host,
    )


class BucketedFunction:
    """A jitted function of padded arguments. `sizes_seen` counts the programs' sizes, at most the buckets' product."""

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        buckets: Mapping[str, Sequence[int]],
        pad: Dims,
        cut: Mapping[int, str] | Sequence[Mapping[int, str]],
        fill: Mapping[str, float],
        true_sizes: Mapping[str, str],
        on_host: bool = False,
    ) -> None:
        import jax

        functools.update_wrapper(self, fn)
        self.buckets = {name: tuple(sizes) for name, sizes in buckets.items()}
        self.pad, self.cut, self.fill, self.true_sizes = pad, cut, fill, true_sizes
        self.on_host = on_host
        self.signature = inspect.signature(fn)
        for name in (*pad, *fill, *true_sizes):
            if name not in self.signature.parameters:
                raise rule_error(
                    f"What is padded is an argument of {self.signature}", repr(name), "name one of its arguments"
                )
        # What already is jitted keeps its options.
        self.jitted = fn if hasattr(fn, "lower") else jax.jit(fn)
        self._seen: set[tuple[int, ...]] = set()

    @property
    def sizes_seen(self) -> int:
        return len(self._seen)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        import jax
        import numpy as np

        missing = {name: None for name in self.true_sizes if name not in kwargs}
        bound = self.signature.bind(*args, **{**missing, **kwargs})
        bound.apply_defaults()
        sizes = self._sizes(bound.arguments)
        targets = {name: bucket_of(size, self.buckets[name]) for name, size in sizes.items()}
        self._seen.add(tuple(targets[name] for name in sorted(targets)))  # of finitely many buckets
        for name, dims in self.pad.items():
            bound.arguments[name] = self._padded(name, bound.arguments[name], dims, targets)
        for name, size in self.true_sizes.items():
            bound.arguments[name] = np.int32(sizes[size])
        result = self.jitted(*bound.args, **bound.kwargs)
        return self._cut(jax.device_get(result) if self.on_host else result, sizes)

    def _sizes(self, arguments: Mapping[str, Any]) -> dict[str, int]:
        """The true sizes, which every argument that has them must agree on."""
        import jax
        import numpy as np

        sizes: dict[str, int] = {}
        for name, dims in self.pad.items():
            for leaf in jax.tree.leaves(arguments[name]):
                for dim, size in dims.items():
                    shape = np.shape(leaf)
                    if not -len(shape) <= dim < len(shape):
                        raise rule_error(f"{name} has a dimension {dim}", f"shape {shape}", "declare one that it has")
                    if sizes.setdefault(size, shape[dim]) != shape[dim]:
                        raise rule_error(
                            f"Every dimension that is {size} has one size in a call",
                            f"{shape[dim]} in {name}, {sizes[size]} before",
                            "give arguments that agree",
                        )
        return sizes

    def _padded(self, name: str, argument: Any, dims: Mapping[int, str], targets: Mapping[str, int]) -> Any:
        import jax
        import jax.numpy as jnp
        import numpy as np

        def padded(leaf: Any) -> Any:
            # On the host where it is there: padding an array of the device compiles a small program for each size.
            module: Any = jnp if isinstance(leaf, jax.Array) else np
            widths = [(0, 0)] * np.ndim(leaf)
            for dim, size in dims.items():
                widths[dim] = (0, targets[size] - np.shape(leaf)[dim])
            if not any(after for _, after in widths):
                return leaf
            return module.pad(leaf, widths, constant_values=self.fill.get(name, 0))

        return jax.tree.map(padded, argument)

    def _cut(self, result: Any, sizes: Mapping[str, int]) -> Any:
        import jax

        def cut(leaf: Any, dims: Mapping[int, str]) -> Any:
            index = [slice(None)] * leaf.ndim
            for dim, size in dims.items():
                index[dim] = slice(0, sizes[size])
            return leaf[tuple(index)]

        if isinstance(self.cut, Mapping):
            dims = self.cut
            return jax.tree.map(lambda leaf: cut(leaf, dims), result) if dims else result
        if not self.cut:
            return result
        return type(result)(
            jax.tree.map(lambda leaf, dims=dims: cut(leaf, dims), part) if dims else part
            for part, dims in zip(result, self.cut, strict=True)
        )
