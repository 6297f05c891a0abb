"""A context that a coroutine holds over an await: all that its task runs and traces is inside, and no other task."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import textwrap
import types
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

from capibara.mesh import context
from capibara.mesh.context import active, current, tpu_v4_optimization_context
from capibara.mesh.mesh import MeshConfig
from capibara.mesh.rules import with_sharding_constraint


def seen() -> tuple[bool, Any, Any]:
    """All that a context changes, as this code sees it."""
    return active(), jax.config.jax_default_matmul_precision, dict(jax.sharding.get_mesh().shape)


OUTSIDE = (False, None, {})
INSIDE = (True, "bfloat16", {})
Traced = tuple[Callable[[float], jax.Array], list[bool]]

quiet = pytest.mark.filterwarnings("ignore:tpu_v4_optimization_context was entered in a coroutine:RuntimeWarning")


def by_hand(coroutine: Any) -> Any:
    """What a coroutine returns that nothing of asyncio runs."""
    while True:
        try:
            coroutine.send(None)
        except StopIteration as done:
            return done.value


@pytest.mark.quick
def test_tasks_that_interleave_do_not_see_each_other() -> None:
    order: list[tuple[str, bool, str | None]] = []

    def note(name: str) -> None:
        state = current()
        order.append((name, active(), state.precision if state else None))
        assert jax.config.jax_default_matmul_precision == (state.precision if state else None)
        assert jax.sharding.get_mesh().empty == (state is None)

    async def with_context(name: str, precision: str, steps: int) -> None:
        with tpu_v4_optimization_context(precision=precision, mesh=MeshConfig((4, 8))):
            for _ in range(steps):
                await asyncio.sleep(0)
                note(name)
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
@pytest.mark.parametrize("drive", [asyncio.run, by_hand])
def test_a_coroutine_dispatches_eager_calls_with_the_states_on(drive: Callable[[Any], Any]) -> None:
    @types.coroutine
    def pause() -> Any:
        yield

    async def main() -> Any:
        with tpu_v4_optimization_context(mesh=MeshConfig((4, 8))) as one:
            await pause()
            during = context.call(seen)
            ran = one.run(seen)
        return during, ran

    assert drive(main()) == ((True, "bfloat16", {"data": 4, "model": 8}),) * 2
    assert seen() == OUTSIDE


@pytest.mark.quick
def test_a_jit_in_a_coroutine_is_traced_inside_and_never_reused_outside(traced: Traced) -> None:
    """Also a function that was traced on the other side first, and with both sides taking turns on one thread."""
    function, traces = traced
    found: dict[str, list[float]] = {"inside": [], "outside": []}

    async def inside() -> None:
        with tpu_v4_optimization_context():
            for _ in range(3):
                found["inside"].append(float(function(1.0)))
                await asyncio.sleep(0)
        assert function(1.0) == 1.0

    async def outside() -> None:
        for _ in range(3):
            found["outside"].append(float(function(1.0)))
            await asyncio.sleep(0)

    async def main(*order: Any) -> None:
        await asyncio.gather(*(one() for one in order))
        assert seen() == OUTSIDE

    asyncio.run(main(outside, inside))
    asyncio.run(main(inside, outside))
    assert found == {"inside": [2.0] * 6, "outside": [1.0] * 6}
    with tpu_v4_optimization_context():
        assert function(1.0) == 2.0
    assert traces == [False, True]  # one trace a side


def test_nothing_is_left_behind_by_a_task_that_never_ends(traced: Traced) -> None:
    """Held by a task that is suspended when its loop stops, and by one that is cancelled."""
    function, _ = traced

    async def forever() -> None:
        with tpu_v4_optimization_context():
            assert function(1.0) == 2.0
            await asyncio.Event().wait()

    async def main() -> list[asyncio.Task[None]]:
        tasks = [asyncio.create_task(forever()) for _ in range(2)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert function(1.0) == 1.0
        tasks[0].cancel()
        return tasks

    loop = asyncio.new_event_loop()
    tasks = loop.run_until_complete(main())
    assert (seen(), float(function(1.0))) == (OUTSIDE, 1.0)
    loop.run_until_complete(asyncio.sleep(0))
    assert tasks[0].cancelled()
    assert seen() == OUTSIDE
    tasks[1].cancel()
    loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.close()
    assert seen() == OUTSIDE


@pytest.mark.quick
def test_the_first_context_of_a_process_is_followed_as_the_others() -> None:
    """asyncio's method is wrapped by the first of them, while it runs; the step that it began in is ended too."""
    code = """
        import asyncio, jax
        from capibara.mesh.context import active, tpu_v4_optimization_context

        plain = asyncio.Handle._run
        traces = []

        @jax.jit
        def function(x):
            traces.append(active())
            return x

        async def inside(started):
            with tpu_v4_optimization_context():
                function(1.0)
                started.set()
                await asyncio.sleep(0.01)
                function(1.0)

        async def outside(started):
            await started.wait()
            assert jax.config.jax_default_matmul_precision is None
            function(1.0)

        async def main():
            assert asyncio.Handle._run is plain
            started = asyncio.Event()
            await asyncio.gather(inside(started), outside(started))

        asyncio.run(main())
        assert traces == [True, False], traces
        assert jax.config.jax_default_matmul_precision is None
    """
    subprocess.run([sys.executable, "-W", "error", "-c", textwrap.dedent(code)], check=True)


@quiet
def test_a_task_started_eagerly_leaves_nothing_to_the_one_that_starts_it() -> None:
    if sys.version_info < (3, 12):
        pytest.skip("asyncio starts tasks eagerly from Python 3.12 on")

    async def child() -> tuple[Any, Any]:
        with tpu_v4_optimization_context():
            first = context.call(seen)
            await asyncio.sleep(0)
            return first, seen()

    async def main() -> Any:
        asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)
        task = asyncio.create_task(child())
        started = seen()
        return started, await task, seen()

    assert asyncio.run(main()) == (OUTSIDE, (INSIDE, INSIDE), OUTSIDE)


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


@pytest.mark.usefixtures("nothing_said_yet")
def test_a_coroutine_that_cannot_be_followed_is_said_once(traced: Traced) -> None:
    function, _ = traced

    async def main() -> tuple[bool, float, float]:
        with tpu_v4_optimization_context() as one:
            return active(), float(function(1.0)), float(one.run(function, 1.0))

    with pytest.warns(RuntimeWarning, match="entered in a coroutine that cannot be followed") as caught:
        assert [by_hand(main()) for _ in range(2)] == [(True, 1.0, 2.0)] * 2
    assert len(caught) == 1


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
