"""A process that lives long sees more shapes than anybody would keep: what dispatch remembers of them is bounded."""

from __future__ import annotations

import concurrent.futures
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.kernels.core import dispatch
from capibara.kernels.core.op import Op
from capibara.kernels.core.spec import Implementation

SHAPES = 20_000


@pytest.fixture
def op() -> Iterator[Op]:
    made = Op("doubled", family="mine", reference=lambda x: 2 * x, operands=("x",))
    made.implement(Implementation("xla", lambda x: x + x))
    yield made
    made.runners.clear()


def test_millions_of_shapes_take_bounded_room(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a call that was let go is decided again, and runs."""
    built: list[int] = []
    build = dispatch._build

    def counted(selection: Any, *rest: Any) -> Any:
        built.append(selection.call.args[0].shape[0])
        return build(selection, *rest)

    monkeypatch.setattr(dispatch, "_build", counted)

    def call(length: int) -> None:
        # Bookkeeping alone: shapes on the host, which nothing traces or compiles.
        dispatch.run(op, (jax.ShapeDtypeStruct((length,), jnp.float32),), {})

    monkeypatch.setattr(dispatch, "_Runner", _Undone)
    for length in range(1, SHAPES + 1):
        call(length)
        if length % 500 == 0:
            call(7)
            assert len(op.runners) <= op.runners.maxsize
    assert len(built) == SHAPES, "what is used again between others was decided once"
    call(SHAPES)
    assert len(built) == SHAPES, "the last ones are there"
    call(11)
    assert built[SHAPES:] == [11], "one that was let go is decided again"


class _Undone(dispatch._Runner):
    """A decided call that is not run."""

    def __init__(self, selection: Any, eager: Any, traced: Any) -> None:
        super().__init__(selection, lambda *arrays: None, traced)


@pytest.mark.parametrize("kernel", [False, True], ids=["plain", "kernel"])
def test_an_evicted_call_gives_the_same_and_leaves_nothing_behind(op: Op, kernel: bool) -> None:
    op.implement(Implementation("twice", lambda x: 2 * x, kernel=kernel, ahead_of=tuple(op.implementations)))
    op.runners.maxsize = 4
    x = np.arange(3, dtype=np.float32)
    with dispatch.recording() as decisions:
        first = op(jnp.asarray(x))
    gone = weakref.ref(decisions.pop())
    for length in range(4, 10):
        op(jnp.ones(length))
    assert len(op.runners) <= 4
    gc.collect()
    assert gone() is None, "its selection, and the program compiled for it, are free"
    np.testing.assert_array_equal(op(jnp.asarray(x)), first)


def test_threads_share_what_was_decided(op: Op) -> None:
    op.runners.maxsize = 8

    def work(seed: int) -> None:
        for step in range(200):
            length = 1 + (seed + step) % 24
            assert jax.eval_shape(op, jax.ShapeDtypeStruct((length,), jnp.float32)).shape == (length,)

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        for done in [pool.submit(work, 7 * number) for number in range(6)]:
            done.result()
    assert len(op.runners) <= 8
