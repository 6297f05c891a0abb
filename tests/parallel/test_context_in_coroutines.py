"""A context that a coroutine holds over an await: no other task sees it, nothing of the thread changes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

from capibara.parallel import context
from capibara.parallel.context import active, current, tpu_v4_optimization_context
from capibara.parallel.mesh import MeshConfig
from capibara.parallel.rules import with_sharding_constraint


def seen() -> tuple[bool, Any, Any]:
    """All that a context changes, as this code sees it."""
    return active(), jax.config.jax_default_matmul_precision, dict(jax.sharding.get_mesh().shape)


OUTSIDE = (False, None, {})
INSIDE = (True, "bfloat16", {})
Traced = tuple[Callable[[float], jax.Array], list[bool]]

quiet = pytest.mark.filterwarnings("ignore:tpu_v4_optimization_context was entered in a coroutine:RuntimeWarning")


@quiet
@pytest.mark.newest
def test_tasks_that_interleave_do_not_see_each_other() -> None:
    order: list[tuple[str, bool, str | None]] = []

    def note(name: str) -> None:
        state = current()
        order.append((name, active(), state.precision if state else None))
        assert jax.config.jax_default_matmul_precision is None  # the thread's own state

    async def with_context(name: str, precision: str, steps: int) -> None:
        with tpu_v4_optimization_context(precision=precision, mesh=MeshConfig((4, 8))):
            for _ in range(steps):
                await asyncio.sleep(0)
                note(name)
                assert jax.sharding.get_mesh().empty
        note(f"after {name}")

    async def without() -> None:
        for _ in range(5):
            note("without")
            await asyncio.sleep(0)

    async def main() -> None:
        # The first to enter is the first to leave: the order that breaks states restored one by one.
        await asyncio.gather(with_context("a", "bfloat16", 2), with_context("b", "float32", 4), without())

    asyncio.run(main())
    assert {one for one in order if one[0] == "a"} == {("a", True, "bfloat16")}
    assert {one for one in order if one[0] == "b"} == {("b", True, "float32")}
    assert {one for one in order if one[0].startswith(("without", "after"))} == {
        ("without", False, None),
        ("after a", False, None),
        ("after b", False, None),
    }


@quiet
def test_a_coroutine_dispatches_eager_calls_with_the_states_on_for_just_the_call() -> None:
    async def main() -> Any:
        with tpu_v4_optimization_context(mesh=MeshConfig((4, 8))) as one:
            await asyncio.sleep(0)
            during = context.call(seen)
            ran = one.run(seen)
        return during, ran

    assert asyncio.run(main()) == ((True, "bfloat16", {"data": 4, "model": 8}),) * 2


@quiet
@pytest.mark.newest
def test_a_jit_in_a_coroutine_never_poisons_the_cache(traced: Traced) -> None:
    function, traces = traced

    async def main() -> None:
        with tpu_v4_optimization_context() as one:
            assert function(1.0) == 1.0  # called directly: as outside, by trace and by key
            assert one.run(function, 1.0) == 2.0

    asyncio.run(main())
    assert function(1.0) == 1.0
    with tpu_v4_optimization_context():
        assert function(1.0) == 2.0
    assert traces == [False, True]


@quiet
def test_constraint_in_a_coroutine_uses_the_mesh_it_holds() -> None:
    async def main() -> jax.Array:
        with tpu_v4_optimization_context(mesh=MeshConfig((4, 8))):
            await asyncio.sleep(0)
            return with_sharding_constraint(np.ones((8, 16)), ("batch", "hidden"))

    assert dict(asyncio.run(main()).sharding.mesh.shape) == {"data": 4, "model": 8}


def test_a_plain_function_called_by_a_coroutine_gets_everything() -> None:
    def step() -> Any:
        with tpu_v4_optimization_context():
            return seen()

    async def main() -> Any:
        return step(), seen()

    assert asyncio.run(main()) == (INSIDE, OUTSIDE)


def test_entering_in_a_coroutine_is_said_once() -> None:
    context._say_what_a_coroutine_gets.cache_clear()

    async def main() -> None:
        for _ in range(2):
            with tpu_v4_optimization_context():
                await asyncio.sleep(0)

    with pytest.warns(RuntimeWarning, match="entered in a coroutine") as caught:
        asyncio.run(main())
    assert len(caught) == 1


@quiet
@pytest.mark.parametrize("form", ["contextmanager", "asynccontextmanager", "ExitStack", "AsyncExitStack"])
def test_a_coroutine_is_seen_through_what_enters_for_it(form: str) -> None:
    @contextlib.contextmanager
    def plain() -> Iterator[None]:
        with tpu_v4_optimization_context():
            yield

    @contextlib.asynccontextmanager
    async def asynchronous() -> AsyncIterator[None]:
        with tpu_v4_optimization_context():
            yield

    async def hold() -> None:
        async with contextlib.AsyncExitStack() as both:
            stack = both.enter_context(contextlib.ExitStack())
            if form == "contextmanager":
                stack.enter_context(plain())
            elif form == "asynccontextmanager":
                await both.enter_async_context(asynchronous())
            elif form == "ExitStack":
                stack.enter_context(tpu_v4_optimization_context())
            else:
                both.enter_context(tpu_v4_optimization_context())
            await asyncio.sleep(0)
            assert active()
            await asyncio.sleep(0)

    async def other() -> list[Any]:
        return [(await asyncio.sleep(0), seen())[1] for _ in range(3)]

    async def main() -> list[Any]:
        return (await asyncio.gather(hold(), other()))[1]

    assert asyncio.run(main()) == [OUTSIDE] * 3


def test_a_loop_run_inside_a_context_is_inside() -> None:
    async def main() -> Any:
        return seen(), await asyncio.to_thread(seen)

    with tpu_v4_optimization_context():
        assert asyncio.run(main()) == (INSIDE, OUTSIDE)  # another thread is another thread


@quiet
def test_innermost_wins_whichever_kind_it_is() -> None:
    def plain() -> str:
        with tpu_v4_optimization_context(precision="float32"):
            return current().precision

    async def inner() -> str:
        with tpu_v4_optimization_context(precision="mixed"):
            assert plain() == "float32"
            return current().precision

    with tpu_v4_optimization_context():
        assert asyncio.run(inner()) == "mixed"
        assert current().precision == "bfloat16"
