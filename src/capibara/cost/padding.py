"""What an array takes of a chip's memory, beside its numbers."""

from __future__ import annotations

import functools
import itertools
import math

from capibara.program.chip import Buffer

__all__ = ["padded_bytes", "padded_rows"]

_LANES = 128
_SUBLANES = 8
_GPU_ALIGNMENT = 256


def _up(size: int, to: int) -> int:
    return -(-size // to) * to


@functools.lru_cache(maxsize=65536)
def _padded(shape: tuple[int, ...]) -> float:
    """Numbers that a TPU stores for an array: the two minor dimensions fill tiles of 8 x 128.

    A second-minor dimension under eight has smaller tiles, down to one row.
    """
    if not shape:
        return 1.0
    if 0 in shape:
        return 0.0
    total = math.prod(shape)
    if len(shape) == 1:
        return float(_up(total, _LANES))

    def stored(second: int, minor: int) -> float:
        rows = min(_SUBLANES, 1 << (shape[second] - 1).bit_length())
        return total / (shape[second] * shape[minor]) * _up(shape[second], rows) * _up(shape[minor], _LANES)

    return min(stored(second, minor) for second, minor in itertools.permutations(range(len(shape)), 2))


def padded_bytes(buffer: Buffer, platform: str) -> float:
    """Bytes that a buffer takes on the chip; nothing when it lies in the host's memory."""
    if buffer.host:
        return 0.0
    if platform == "tpu":
        numbers = math.prod(buffer.shape)
        return buffer.bytes if not numbers else buffer.bytes / numbers * _padded(buffer.shape)
    if platform == "gpu":
        return float(_up(math.ceil(buffer.bytes), _GPU_ALIGNMENT))
    return buffer.bytes


def padded_rows(moved: Buffer, indices: Buffer) -> float:
    """Bytes of a TPU's second copy of what is looked up by so many indices, each row padded to a tile's lanes.

    Nothing for single numbers, and for rows of which the padding is no more than the rest: they stay as they are.
    """
    rows, numbers = math.prod(indices.shape[:-1]), math.prod(moved.shape)
    if not rows or numbers <= rows:
        return 0.0
    padded = rows * _up(numbers // rows, _LANES)
    return moved.bytes / numbers * padded if padded >= 2 * numbers else 0.0
