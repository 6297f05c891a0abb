"""The Hopper kernel of cross_entropy's rows: its arithmetic and its ring emulated, its cuts, what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capibara.kernels import cross_entropy, explain, target
from capibara.kernels.ops.layers.cross_entropy import hopper, in_forward

pytestmark = pytest.mark.quick

PROGRAMS = 2  # so that each has several rows
SMOOTH = {"label_smoothing": 0.1, "z_loss": 1e-2}
# columns, slots of the ring in pieces of 512 numbers, whether it then holds a row, and the loss's options
CUTS = [
    pytest.param(1536, 5, True, {}, id="row-at-hand"),
    pytest.param(1600, 5, True, SMOOTH, id="row-at-hand-overlapping"),
    pytest.param(512, 2, True, {}, id="one-piece"),
    pytest.param(576, 5, True, SMOOTH, id="nearly-all-overlapping"),
    pytest.param(2560, 2, False, {}, id="long"),
    pytest.param(2560, 5, False, {}, id="as-long-as-the-ring"),
    pytest.param(2944, 4, False, SMOOTH, id="long-overlapping"),
]


@pytest.mark.parametrize(("columns", "slots", "holds", "options"), CUTS)
def test_emulated(
    emulated_hopper: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, columns: int, slots: int, holds: bool,
    options: dict[str, float],
) -> None:  # fmt: skip
    monkeypatch.setattr(hopper, "multiprocessors", lambda kind: PROGRAMS)
    monkeypatch.setattr(hopper, "PIECE", 512)
    ring = hopper.ring_of(columns)
    assert ring is not None
    monkeypatch.setattr(hopper, "RING_BYTES", slots * 4 * ring.depth * ring.width)
    ring = hopper.ring_of(columns)
    assert ring is not None
    assert (ring.slots, ring.holds_a_row) == (slots, holds)

    rows, generator = 5, np.random.default_rng(columns)
    # A maximum in the first line, in the last and in what two pieces have: each decides a row.
    logits = generator.standard_normal((rows, columns)).astype(np.float32)
    for row, place in enumerate((0, columns - 1, columns // 2, ring.depth * ring.width - 1)):
        logits[row, place] = 30.0 + row
    if not options:
        logits[4] -= 300.0  # a maximum far below 0; a sum of so many would say less of the others
    labels = np.array([columns - 1, 0, -100, columns, 5], np.int32)  # two of them are no word
    weights = np.array([1.0, 0.5, 0.0, np.nan, 2.0], np.float32)
    how = in_forward.Chunk(
        columns, jnp.arange(columns, dtype=jnp.int32), None, (), None, options.get("label_smoothing", 0.0),
        options.get("z_loss", 0.0), jnp.dtype("bfloat16"),
    )  # fmt: skip
    wanted = in_forward._rows_by_xla(logits, jnp.asarray(labels), jnp.asarray(weights), how)
    begun = _counted(monkeypatch, "copy_gmem_to_smem"), _counted(monkeypatch, "barrier_wait")
    made = emulated_hopper(in_forward._rows_by_kernel, logits, jnp.asarray(labels), jnp.asarray(weights), how)
    assert len(made) == len(wanted) == (4 if options else 3)
    # Sums of thousands of float32 numbers in another order, of which those of the logits cancel each other; and a
    # gradient that one of them rounds up in bfloat16 and the other down.
    tolerances = [(1e-5, 0.0), (0.0, 0.0), *([(0.0, 1e-6 * columns)] if options else []), (2.0**-7, 4e-6)]
    for one, other, (relative, absolute) in zip(made, wanted, tolerances, strict=True):
        one, other = (np.asarray(x, np.float64) for x in (one, other))
        np.testing.assert_allclose(one, other, rtol=relative, atol=absolute)
    jax.effects_barrier()
    copies, waits = map(len, begun)
    # No copy of a row that is not there is still on its way when a program ends.
    assert copies == waits >= rows * ring.pieces


def _counted(monkeypatch: pytest.MonkeyPatch, name: str) -> list[None]:
    """Has an entry for each time that a program does it."""
    done: list[None] = []
    own = getattr(hopper.plgpu, name)

    def counted(*args: Any) -> None:
        jax.debug.callback(lambda: done.append(None))
        own(*args)

    monkeypatch.setattr(hopper.plgpu, name, counted)
    return done


@given(st.integers(1, 300000) | st.integers(1, 200).map(lambda lines: 64 * lines))
def test_a_cut_has_every_column_and_fits(columns: int) -> None:
    ring = hopper.ring_of(columns)
    if ring is None:
        assert columns % hopper.WIDTHS[-1] or columns < hopper.THREADS * hopper.VECTOR
        return
    starts = [min(piece * ring.depth, ring.lines - ring.depth) for piece in range(ring.pieces)]
    covered = {line for start in starts for line in range(start, start + ring.depth)}
    assert covered == set(range(ring.lines))
    assert ring.lines * ring.width == columns
    # Only the last piece overlaps, and only the one before it.
    assert 0 <= ring.overlap < ring.depth or ring.pieces == 1
    assert ring.depth * ring.width % (hopper.THREADS * hopper.VECTOR) == 0
    assert 1 < ring.slots <= hopper.MOST_SLOTS
    assert 4 * ring.slots * ring.depth * ring.width <= hopper.RING_BYTES


@pytest.mark.parametrize(
    ("words", "options", "said"),
    [
        (50257, {}, "cut into lines of 64"),
        (32000, {"softcap": 30.0}, "it has no soft_cap"),
        (32000, {"gradient": "in_forward_narrow"}, "it has no narrow"),
    ],
)
def test_refusals(words: int, options: dict[str, Any], said: str) -> None:
    with target("gpu", "NVIDIA H200"):
        assert said in str(explain(_gradient(options), *_operands(words)))


def test_it_goes_first_where_it_can() -> None:
    with target("gpu", "NVIDIA H200"):
        for words in (32000, 128256, 151936):
            assert explain(_gradient({}), *_operands(words)).implementation == "hopper"
        # A chunk over a split vocabulary combines sums between devices, in the midst of a row's work.
        assert explain(_gradient({}), *_operands(32000, "float32")).implementation == "xla"


def _operands(words: int, dtype: str = "bfloat16") -> tuple[jax.ShapeDtypeStruct, ...]:
    shapes = ((16384, 2048), dtype), ((2048, words), dtype), ((16384,), "int32")
    return tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes)


def _gradient(options: dict[str, Any]) -> Callable[..., Any]:
    return jax.grad(lambda hidden, weights, labels: cross_entropy(hidden, weights, labels, **options), argnums=(0, 1))
