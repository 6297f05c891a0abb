"""Patterns written into a share of each device's free memory, and read back and compared on the device.

All blocks are written before any is read, so that they lie at addresses of their own; writing and reading are two
programs, so that no compiler can take one for the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil

from capibara.errors import rule_error
from capibara.hardware.facts import MiB
from capibara.observe.health.report import Finding, NoAnswer, device_name, within

__all__ = ["PATTERNS", "Fill", "check_memory", "fill", "free_bytes"]

Fill = Callable[[Any, str, int, int], Any]
"""Device, pattern, number of the block, words -> the block, written."""

_WORD = 4
_BLOCK = 256 * MiB
# Of a CPU this tests the machine's memory through virtual devices that share it: enough to see that it works.
_MOST_OF_A_CPU = 4 * MiB

PATTERNS: Mapping[str, Callable[[Any], Any]] = {
    # Each bit beside its opposite, in the word and from word to word.
    "alternating": lambda word: jnp.where(word % 2 == 0, jnp.uint32(0x55555555), jnp.uint32(0xAAAAAAAA)),
    "walking one": lambda word: jnp.uint32(1) << (word % 32),
    "walking zero": lambda word: ~(jnp.uint32(1) << (word % 32)),
    # Another value in every word: an address line that is stuck makes two words one.
    "address": lambda word: word * jnp.uint32(2654435761),
}
"""Name -> the word at a place."""


def _words(place: Any, words: int) -> Any:
    """Words of a block, from where it begins and the number of its pattern: one program for all patterns."""
    begin, pattern = place
    return jax.lax.switch(pattern, list(PATTERNS.values()), begin + jnp.arange(words, dtype=jnp.uint32))


_written = jax.jit(_words, static_argnums=1)


@jax.jit
def _differences(block: Any, place: Any) -> tuple[Any, Any, Any]:
    """How many words differ, the first of them, and the bits that do in any."""
    bits = block ^ _words(place, block.size)
    wrong = bits != 0
    return wrong.sum(), jnp.argmax(wrong), jax.lax.reduce(bits, np.uint32(0), jax.lax.bitwise_or, (0,))


def _place(device: Any, pattern: str, block: int) -> Any:
    # The blocks differ: one that lies over another is found too.
    begin = np.uint32(block * 0x01000193 % 2**32)
    return jax.device_put((begin, np.int32(list(PATTERNS).index(pattern))), device)


def fill(device: Any, pattern: str, block: int, words: int) -> Any:
    """Write a block on the device."""
    return _written(_place(device, pattern, block), words)


def free_bytes(device: Any) -> int:
    """What a program could allocate now; of a CPU, the host's memory shared among its devices."""
    if device.platform == "cpu":
        return int(psutil.virtual_memory().available) // len(jax.local_devices(backend="cpu"))
    told = device.memory_stats() or {}
    return max(int(told.get("bytes_limit", 0)) - int(told.get("bytes_in_use", 0)), 0)


def check_memory(
    devices: Sequence[Any], share: float = 0.25, write: Fill = fill, deadline_s: float = 120.0
) -> tuple[list[Finding], dict[str, int]]:
    """Devices whose memory does not keep what is written; and the bytes that were tested of each.

    Args:
      devices: of this process.
      share: of the memory that is free on each; of a CPU a few MiB at most.
      write: what writes a block.
      deadline_s: seconds that one device gets.
    """
    if not 0 < share <= 0.9:
        raise rule_error("memory_share is above 0 and at most 0.9", repr(share), "leave it out for 0.25")
    found: list[Finding] = []
    tested: dict[str, int] = {}
    for device in devices:
        name = f"device {device.id}"
        size = int(share * free_bytes(device))
        size = min(size, _MOST_OF_A_CPU) if device.platform == "cpu" else size
        try:
            finding = within(deadline_s, functools.partial(_check, device, size, write))
        except NoAnswer as silent:
            finding = _failed(device, f"gave {silent} to a test of {size:,} bytes of its memory")
        except Exception as error:  # noqa: BLE001  # whatever a device raises, its memory could not be used
            text = " ".join(str(error).split())[:300]
            finding = _failed(device, f"failed at a test of {size:,} bytes of its memory: {text}")
        tested[name] = size
        if finding is not None:
            found.append(finding)
    return found, tested


def _failed(device: Any, what: str) -> Finding:
    return Finding(
        "memory",
        f"device {device.id}",
        f"{device_name(device)} {what}",
        "end other processes that use its memory; if that changes nothing, restart or replace its host",
    )


def _check(device: Any, size: int, write: Fill) -> Finding | None:
    words = max(min(size, _BLOCK) // _WORD, 1)
    count = max(size // (words * _WORD), 1)
    for pattern in PATTERNS:
        blocks = [write(device, pattern, number, words) for number in range(count)]
        for number, block in enumerate(blocks):
            wrong, first, bits = _differences(block, _place(device, pattern, number))
            if int(wrong):
                return Finding(
                    "memory",
                    f"device {device.id}",
                    f"{device_name(device)} does not keep its memory: {int(wrong):,} of {words:,} words of block "
                    f"{number} read back otherwise than written ({pattern}), first word {int(first)}, bits "
                    f"{int(bits):#010x}",
                    "leave this chip out, and have its host replaced",
                    evidence={"pattern": pattern, "words": int(wrong), "bits": int(bits), "block": number},
                )
        del blocks
    return None
