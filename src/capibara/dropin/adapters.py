"""Stand-ins for names that jax removed without leaving one that takes the same call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

NINF = -np.inf
PZERO = 0.0
NZERO = -0.0
not_mapped = None


def pjit(fun: Callable[..., Any] | None = None, **options: Any) -> Any:
    """`jax.jit` by the names pjit had for its shardings; with no function, a decorator."""
    for old, new in (("in_axis_resources", "in_shardings"), ("out_axis_resources", "out_shardings")):
        if old in options:
            if new in options:
                raise TypeError(f"pjit takes {new} or its old name {old}, not both")
            options[new] = options.pop(old)
    return functools.partial(jax.jit, **options) if fun is None else jax.jit(fun, **options)


def shard_map(
    f: Callable[..., Any], mesh: Any, in_specs: Any, out_specs: Any, check_rep: bool = True, **options: Any
) -> Any:
    return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_rep, **options)


def curry(f: Callable[..., Any]) -> Callable[..., Any]:
    return functools.partial(functools.partial, f)


def xla_computation(fun: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    def computation(*args: Any, **kwargs: Any) -> Any:
        return jax.jit(fun, **options).lower(*args, **kwargs).compiler_ir("hlo")

    return computation


def device_put_replicated(x: Any, devices: Sequence[Any]) -> Any:
    """A copy a device, along a new leading axis."""
    return device_put_sharded([x] * len(devices), devices)


def device_put_sharded(shards: Sequence[Any], devices: Sequence[Any]) -> Any:
    """One shard a device, along a new leading axis."""
    if len(shards) != len(devices):
        raise ValueError(f"device_put_sharded takes a shard a device. Got {len(shards)} and {len(devices)}.")
    sharding = NamedSharding(Mesh(np.asarray(devices), ("device",)), PartitionSpec("device"))
    stack = lambda *leaves: jnp.stack([jnp.asarray(leaf) for leaf in leaves])  # noqa: E731
    return jax.tree.map(lambda *leaves: jax.device_put(stack(*leaves), sharding), *shards)


def device_memory_allocated() -> int | None:
    """Bytes in use on this process's devices; None where the platform does not say."""
    return _memory("bytes_in_use")


def device_memory_peak() -> int | None:
    """The most bytes that were in use on this process's devices; None where the platform does not say."""
    return _memory("peak_bytes_in_use")


def _memory(key: str) -> int | None:
    found = [(device.memory_stats() or {}).get(key) for device in jax.local_devices()]
    known = [value for value in found if value is not None]
    return sum(known) if known else None


def cloud_tpu_init() -> None:
    """Nothing: jax initialises Cloud TPUs by itself."""


def in1d(ar1: Any, ar2: Any, assume_unique: bool = False, invert: bool = False) -> jax.Array:
    return jnp.isin(jnp.ravel(ar1), ar2, assume_unique=assume_unique, invert=invert)


def issubsctype(arg1: Any, arg2: Any) -> bool:
    return jnp.issubdtype(_dtype_of(arg1), _dtype_of(arg2))


def _dtype_of(x: Any) -> Any:
    return x if isinstance(x, type) else getattr(x, "dtype", x)


def msort(a: Any) -> jax.Array:
    return jnp.sort(a, axis=0)


def raise_to_shaped(aval: Any, weak_type: bool | None = None) -> Any:
    """The aval: every one has a shape and no value by now."""
    return aval if weak_type is None else aval.update(weak_type=weak_type)


def threefry2x32_key(seed: Any) -> jax.Array:
    return jax.random.PRNGKey(seed, impl="threefry2x32")


def rbg_key(seed: Any) -> jax.Array:
    return jax.random.PRNGKey(seed, impl="rbg")


def unsafe_rbg_key(seed: Any) -> jax.Array:
    return jax.random.PRNGKey(seed, impl="unsafe_rbg")


def shuffle(key: Any, x: Any, axis: int = 0) -> jax.Array:
    return jax.random.permutation(key, x, axis, independent=True)


def tie_in(x: Any, y: Any) -> Any:
    return y


def pvary(x: Any, axis_name: Any) -> Any:
    return jax.lax.pcast(x, axis_name, to="varying")


class _Index:
    """`index[...]` is what stands in the brackets."""

    def __getitem__(self, item: Any) -> Any:
        return item


index = _Index()


def _at(method: str) -> Callable[..., jax.Array]:
    def update(
        x: Any,
        idx: Any,
        y: Any,
        indices_are_sorted: bool = False,
        unique_indices: bool = False,
    ) -> jax.Array:
        place = jnp.asarray(x).at[idx]
        return getattr(place, method)(y, indices_are_sorted=indices_are_sorted, unique_indices=unique_indices)

    return update


index_update = _at("set")
index_add = _at("add")
index_mul = _at("multiply")
index_min = _at("min")
index_max = _at("max")


def sph_harm(m: Any, n: Any, theta: Any, phi: Any, n_max: int | None = None) -> jax.Array:
    """Here theta is the azimuth and phi the polar angle; the new function has both the other way round."""
    return jax.scipy.special.sph_harm_y(n, m, phi, theta, n_max=n_max)


def to_dlpack(x: Any, *unused: Any, **kwargs: Any) -> Any:
    return x.__dlpack__(**kwargs)


def disable_x64() -> Any:
    return jax.enable_x64(False)


def call(callback_func: Callable[[Any], Any], arg: Any, *, result_shape: Any = None) -> Any:
    """The host's answer, ordered as host_callback's was not promised to be."""
    return jax.experimental.io_callback(callback_func, result_shape, arg)


def id_print(arg: Any, *, result: Any = None, what: str | None = None, **unused: Any) -> Any:
    jax.debug.print("{}" if what is None else what + ": {}", arg)
    return arg if result is None else result


def id_tap(tap_func: Callable[..., Any], arg: Any, *, result: Any = None, **kwargs: Any) -> Any:
    jax.debug.callback(lambda value: tap_func(value, (), **kwargs), arg)
    return arg if result is None else result


def exported_call(exported: Any) -> Callable[..., Any]:
    """The function that an `Exported` holds; its method by now."""
    call: Callable[..., Any] = exported.call
    return call


def exported_serialize(exported: Any, vjp_order: int = 0) -> bytearray:
    """An `Exported` as bytes, with its derivatives up to an order; its method by now."""
    written: bytearray = exported.serialize(vjp_order)
    return written


def barrier_wait(logging_name: str | None = None) -> None:
    """Wait until what was tapped or printed has reached the host; the name was for a log."""
    jax.effects_barrier()


def build_tree(treedef: Any, xs: Any) -> Any:
    """The tree of this structure from iterables that are nested as it is."""
    return treedef.from_iterable_tree(xs)


def _without_mask(name: str, options: dict[str, Any]) -> None:
    given = [key for key, value in options.items() if value is not None and value is not False]
    if given:
        raise TypeError(
            f"pl.{name} has no {', '.join(given)} any more. Use {name} of jax.experimental.pallas.triton or "
            "jax.experimental.pallas.tpu, which take a view, ref.at[idx]."
        )


def load(ref: Any, idx: Any, **options: Any) -> Any:
    """`pl.load` of what is not masked."""
    _without_mask("load", options)
    return ref[idx]


def store(ref: Any, idx: Any, val: Any, **options: Any) -> None:
    """`pl.store` of what is not masked."""
    _without_mask("store", options)
    ref[idx] = val


def swap(ref: Any, idx: Any, val: Any, **options: Any) -> Any:
    """`pl.swap` of what is not masked: what was there."""
    _without_mask("swap", options)
    before = ref[idx]
    ref[idx] = val
    return before
