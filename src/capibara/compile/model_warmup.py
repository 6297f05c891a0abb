"""A model made ready for the shapes it will see, before the first one waits: compiled, kept on disk, and run.

`warmup_model` calls the model as its user will, so that what jax keeps for those calls is there afterwards; and with
jax's cache on disk (`persistent.py`) the next process only reads it. On a terminal a bar shows how far it is.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from capibara.compile.events import count_compilations
from capibara.compile.persistent import PersistentCache, persistent_cache
from capibara.errors import rule_error

__all__ = ["ModelWarmup", "TpuWarmupManager", "WarmedShape"]


@dataclass(frozen=True)
class WarmedShape:
    """What one shape took."""

    shape: tuple[int, ...]
    dtype: str
    compiled: int
    """Programs that were compiled: misses of the cache on disk."""
    from_disk: int
    """Programs that the cache on disk had: hits."""
    seconds: float
    """The first call, with all of that."""
    run_seconds: float
    """A call after it, the median of `warmup_steps`; nan without any."""


@dataclass(frozen=True)
class ModelWarmup:
    """What a warm-up did, shape by shape, in the order in which it was done."""

    shapes: tuple[WarmedShape, ...]
    seconds: float
    cache: PersistentCache

    @property
    def compiled(self) -> int:
        return sum(row.compiled for row in self.shapes)

    @property
    def from_disk(self) -> int:
        return sum(row.from_disk for row in self.shapes)

    def __str__(self) -> str:
        rows = [
            f"{row.dtype}{list(row.shape)}: {row.compiled} compiled, {row.from_disk} from disk, "
            f"{row.seconds:.2f} s, then {row.run_seconds * 1e3:.2f} ms a call"
            for row in self.shapes
        ]
        where = self.cache.why if self.cache.folder is None else f"programs are in {self.cache.folder}"
        return "\n".join([*rows, f"{self.seconds:.1f} s in all; {where}"])


class TpuWarmupManager:
    """Makes models ready.

    Args:
      compilation_cache_size_gb: what the cache on disk holds at most; the programs unused for longest go first.
      warmup_steps: calls of each shape after the first, timed.
      progressive_warmup: the smallest shape first, so that most are ready early; else in the order given.
    """

    def __init__(
        self,
        compilation_cache_size_gb: float = 2.0,
        warmup_steps: int = 10,
        progressive_warmup: bool = True,
    ) -> None:
        if not compilation_cache_size_gb > 0 or math.isinf(compilation_cache_size_gb):
            raise rule_error("compilation_cache_size_gb is above 0", compilation_cache_size_gb, "use 2.0")
        if warmup_steps < 0:
            raise rule_error("warmup_steps is 0 or more", warmup_steps, "use 10")
        self.compilation_cache_size_gb = compilation_cache_size_gb
        self.warmup_steps = warmup_steps
        self.progressive_warmup = progressive_warmup

    def warmup_model(
        self,
        model: Callable[..., Any],
        input_shapes: Sequence[Any],
        batch_sizes: Sequence[int | Sequence[int]] | Mapping[tuple[int, ...], Sequence[int]] | None = None,
    ) -> ModelWarmup:
        """Compile and run a model of one array for each shape, none twice.

        >>> import jax
        >>> manager = TpuWarmupManager(compilation_cache_size_gb=0.1, warmup_steps=1)
        >>> done = manager.warmup_model(jax.jit(lambda x: x * 2), [(4, 8), (2, 8)], batch_sizes=[[4, 1], 2])
        >>> [row.shape for row in done.shapes]
        [(1, 8), (2, 8), (4, 8)]

        Args:
          model: called with zeros. A function that is not jitted is jitted here; what that compiles is kept on disk.
          input_shapes: tuples of sizes, the first of which is the batch: of float32, or of int32 where the model has
            a vocabulary (`model.config.vocab`) and the shape is [batch, length]; a `jax.ShapeDtypeStruct` says its own.
          batch_sizes: other batches than a shape's own: one for each shape, in order, a number or several; or a mapping
            from shapes.
        """
        shapes = _with_batches([_described(shape, model) for shape in input_shapes], batch_sizes)
        if self.progressive_warmup:
            shapes = sorted(shapes, key=lambda shape: math.prod(shape.shape) * shape.dtype.itemsize)
        cache = persistent_cache(max_bytes=round(self.compilation_cache_size_gb * 1e9))
        call = _callable(model)
        start = time.perf_counter()
        rows = []
        with _progress(len(shapes)) as advance:
            for shape in shapes:
                rows.append(self._warm(call, shape))
                advance(shape)
        return ModelWarmup(tuple(rows), time.perf_counter() - start, cache)

    def _warm(self, call: Callable[..., Any], shape: Any) -> WarmedShape:
        import jax
        import numpy as np

        # Zeros are tokens, embeddings and masks alike; from the host, as a caller's are.
        inputs = jax.device_put(np.zeros(shape.shape, shape.dtype), shape.sharding)
        with count_compilations() as counts:
            start = time.perf_counter()
            jax.block_until_ready(call(inputs))
            seconds = time.perf_counter() - start
        times = []
        for _ in range(self.warmup_steps):
            start = time.perf_counter()
            jax.block_until_ready(call(inputs))
            times.append(time.perf_counter() - start)
        return WarmedShape(
            tuple(shape.shape),
            str(shape.dtype),
            counts.compiled,
            counts.from_disk,
            seconds,
            statistics.median(times) if times else math.nan,
        )


def _callable(model: Any) -> Callable[..., Any]:
    """The model as it is called: what is jitted, or jits itself, as it is."""
    import types

    import jax

    if not callable(model):
        raise rule_error("A model is called with an array", type(model).__name__, "give a function, or a model")
    # A plain function would run operation by operation; the __call__ of an object is its own affair.
    return jax.jit(model) if isinstance(model, types.FunctionType | types.MethodType) else model


def _described(shape: Any, model: Any) -> Any:
    import jax
    import jax.numpy as jnp

    if hasattr(shape, "dtype") and hasattr(shape, "shape"):
        described = jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=getattr(shape, "sharding", None))
    elif isinstance(shape, (tuple, list)) and all(isinstance(size, int) and size > 0 for size in shape):
        tokens = len(shape) == 2 and hasattr(getattr(model, "config", None), "vocab")
        described = jax.ShapeDtypeStruct(tuple(shape), jnp.int32 if tokens else jnp.float32)
    else:
        raise rule_error(
            "A shape is a tuple of sizes or a jax.ShapeDtypeStruct", repr(shape), "use (8, 256, 768), batch first"
        )
    if not described.shape:
        raise rule_error("A shape begins with the batch", "a scalar's, ()", "use (batch, ...)")
    return described


def _with_batches(shapes: list[Any], batch_sizes: Any) -> list[Any]:
    """Every shape with every batch it is named with, each once."""
    import jax

    if batch_sizes is None:
        batches: list[Any] = [shape.shape[0] for shape in shapes]
    elif isinstance(batch_sizes, Mapping):
        unknown = [key for key in batch_sizes if tuple(key) not in {shape.shape for shape in shapes}]
        if unknown:
            raise rule_error("batch_sizes maps shapes of input_shapes", unknown[0], "use a shape that is listed")
        batches = [batch_sizes.get(shape.shape, shape.shape[0]) for shape in shapes]
    elif len(batch_sizes) == len(shapes):
        batches = list(batch_sizes)
    else:
        raise rule_error(
            "batch_sizes has an entry, a number or several, for each of input_shapes",
            f"{len(batch_sizes)} for {len(shapes)} shapes",
            "give as many, or a mapping from shapes, or leave it out",
        )
    found = {}
    for shape, named in zip(shapes, batches, strict=True):
        for batch in (named,) if isinstance(named, int) else named:
            if not isinstance(batch, int) or batch < 1:
                raise rule_error("A batch size is a whole number of 1 or more", repr(batch), "use 8")
            whole = jax.ShapeDtypeStruct((batch, *shape.shape[1:]), shape.dtype, sharding=shape.sharding)
            found[whole.shape, whole.dtype, whole.sharding] = whole
    return list(found.values())


@contextmanager
def _progress(total: int) -> Iterator[Callable[[Any], None]]:
    """A bar on a terminal, nothing elsewhere."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda shape: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("[progress.description]{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task("warming up", total=total)
        yield lambda shape: bar.update(task, advance=1, description=f"warmed up {shape.dtype}{list(shape.shape)}")
