"""How well a matrix product fills a chip's units."""

from __future__ import annotations

from capibara.hardware.facts import Chip

__all__ = ["fill"]

# The shortest part that a reduction is split into, where there are few tiles.
_SPLIT = 512
# Tiles of a GPU's product: rows, columns, and how near the best of them it runs when all units are busy. Hopper's; the
# others' are taken for the same.
_TILES = ((128, 256, 1.0), (128, 128, 0.95), (64, 128, 0.8), (64, 64, 0.6))


def _up(size: int, to: int) -> int:
    return -(-size // to) * to


def fill(chip: Chip, sizes: tuple[int, ...]) -> float:
    """The share of the matrix units' work that is not padding, for a product of (batch, m, n, k)."""
    if len(sizes) != 4 or min(sizes) < 1:
        return 1.0
    batch, m, n, k = sizes
    if chip.platform == "gpu":
        return _fill_gpu(chip.cores_per_chip, batch, m, n, k)
    if chip.platform != "tpu":
        return 1.0
    unit = (chip.mxu_shape or (128, 128))[0]
    # The unit holds a block of k by n and streams rows through it; the compiler may swap the operands.
    rows_m = _up(m, 8) * _up(n, unit)
    rows_n = _up(n, 8) * _up(m, unit)
    return (m * n * k) / (min(rows_m, rows_n) * _up(k, unit))


def _fill_gpu(units: int, batch: int, m: int, n: int, k: int) -> float:
    best = 0.0
    useful = float(batch * m * n * k)
    for rows, columns, speed in _TILES:
        tiles = batch * -(-m // rows) * -(-n // columns)
        # Few tiles: the reduction is split so that every unit has some of it.
        splits = max(1, min(units // tiles, -(-k // _SPLIT)))
        depth = max(_up(-(-k // splits), 64), min(_SPLIT, _up(k, 64)))
        waves = -(-tiles * splits // units)
        work = waves * units * rows * columns * depth
        best = max(best, min(1.0, speed * useful / work))
    return best
