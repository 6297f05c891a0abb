"""What a kernel computes, as a name that is the same in every process: for caches of compiled programs on disk.

To XLA a kernel that its partitioner splits is a call of a Python object at an address. With the address in its key a
program is found in no other process; and without it, two kernels of the same shapes have one key. So such a call gets
the name of what stands behind it as an attribute, which is in the key, and the address can be left out of it
(`capibara.compile.persistent.stable_key`).

The name is a digest of all that the call on a device's shards hangs on: the package's source, the op, its parameters
and what runs it, the settings that dispatch goes by, the user's tables, and the kernel as it was traced for the whole.
An op or an implementation of somebody else's has code that no digest here knows: once there is one, nothing is named.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable
from typing import Any

import jax

from capibara.distribution import source_digest
from capibara.kernels.core import context, tables, trusting
from capibara.kernels.core.spec import Call, Preference

__all__ = ["ATTRIBUTE", "from_outside", "program_name", "wanted"]

ATTRIBUTE = "capibara_program"
"""Of a call of the partitioner's hook: what it computes."""

_ADDRESS = re.compile(r"\b0x[0-9a-f]+")
_foreign = False


def from_outside(fn: Callable[..., Any]) -> None:
    """Take note of an op's code: nothing is named after one that is not this package's."""
    global _foreign
    while isinstance(fn, functools.partial):
        fn = fn.func
    if str(getattr(fn, "__module__", "")).partition(".")[0] != __name__.partition(".")[0]:
        _foreign = True


def wanted() -> bool:
    """Whether names are made: where a cache on disk would look at them, and all code is this package's.

    On one device the partitioner has nothing to split, and a program no call of its hook; a name would cost a second
    trace of every kernel. Programs for devices that are not attached are in no cache of jax's.
    """
    return bool(_cache_folder()) and not _foreign and jax.device_count() > 1


def _cache_folder() -> str | None:
    return jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]


def program_name(fn: Callable[..., Any], call: Call, prefer: Preference) -> str | None:
    """The name of `fn` of the call's present operands, and of what the partitioner's hook makes of it on shards.

    None where something of it is known by an address alone.
    """
    settings = repr((
        call.op.name, call.args, tuple((name, type(value).__name__, value) for name, value in call.params.items()),
        call.target, prefer, context.current_interpret(), context.matmul_precision(), trusting.trusted(),
    ))  # fmt: skip
    if _ADDRESS.search(settings):
        return None
    traced = jax.make_jaxpr(fn)(*(x for x in call.args if x is not None))
    parts = (source_digest(), _own_tables(tables.generation()), settings, _ADDRESS.sub("", str(traced)))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


@functools.lru_cache(maxsize=1)
def _own_tables(generation: int) -> str:
    """A digest of the tables that the user tuned, by which shards may run on another choice."""
    del generation  # of the key alone: it grows where tables are read anew
    digest = hashlib.sha256()
    for path in sorted(tables.cache_directory().rglob("*.json")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
