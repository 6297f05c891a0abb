"""The optimisation context: what it sets, that it puts everything back, and who does not see it."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest

from capibara.mesh import context
from capibara.mesh.context import active, current, tpu_v4_optimization_context
from capibara.mesh.mesh import MeshConfig


def seen() -> tuple[bool, Any, Any]:
    """All that a context changes, as this code sees it."""
    return active(), jax.config.jax_default_matmul_precision, dict(jax.sharding.get_mesh().shape)


OUTSIDE = (False, None, {})
INSIDE = (True, "bfloat16", {})
Traced = tuple[Callable[[float], jax.Array], list[bool]]


@pytest.mark.quick
def test_sets_and_restores() -> None:
    with tpu_v4_optimization_context(mesh=MeshConfig((4, 8))):
        assert seen() == (True, "bfloat16", {"data": 4, "model": 8})
        assert current().precision == "bfloat16"


def test_restores_what_was_there() -> None:
    mesh = MeshConfig((2, 2)).build()
    with jax.default_matmul_precision("tensorfloat32"), jax.set_mesh(mesh):
        before = seen()
        with tpu_v4_optimization_context(mesh=MeshConfig((4, 8))):
            assert seen() != before
        assert seen() == before


def test_restores_on_exceptions() -> None:
    with pytest.raises(ZeroDivisionError), tpu_v4_optimization_context(mesh=MeshConfig((4, 8))):
        raise ZeroDivisionError


def test_nests() -> None:
    with tpu_v4_optimization_context(mesh=MeshConfig((4, 8))):
        with tpu_v4_optimization_context(precision="float32"):
            assert seen() == (True, "float32", {"data": 4, "model": 8})
            with tpu_v4_optimization_context(dispatch=False):
                assert seen() == (False, "bfloat16", {"data": 4, "model": 8})
            assert seen() == (True, "float32", {"data": 4, "model": 8})
        assert seen() == (True, "bfloat16", {"data": 4, "model": 8})


def test_one_object_enters_itself() -> None:
    one = tpu_v4_optimization_context()
    with one:
        with one:
            assert seen() == INSIDE
        assert seen() == INSIDE


@pytest.mark.parametrize(("name", "passes"), [("float32", "float32"), ("mixed", "bfloat16"), ("bfloat16", "bfloat16")])
def test_precisions(name: str, passes: str) -> None:
    with tpu_v4_optimization_context(precision=name):
        assert seen() == (True, passes, {})


def test_unknown_precision_and_mesh() -> None:
    with pytest.raises(ValueError, match=r"precision 'bf16'.*'bfloat16'"):
        tpu_v4_optimization_context(precision="bf16")
    with pytest.raises(ValueError, match=r"a jax Mesh or a MeshConfig. Got tuple"):
        tpu_v4_optimization_context(mesh=(4, 8))  # type: ignore[arg-type]


def test_decorator() -> None:
    @tpu_v4_optimization_context()
    def step(x: int) -> tuple[int, Any]:
        """Doc."""
        return x, seen()

    assert step(3) == (3, INSIDE)
    assert step.__doc__ == "Doc."


def test_decorator_refuses_what_runs_later() -> None:
    async def later() -> None: ...

    def generator() -> Iterator[int]:
        yield 1

    for function in (later, generator):
        with pytest.raises(ValueError, match="wraps plain functions"):
            tpu_v4_optimization_context()(function)


@pytest.mark.quick
@pytest.mark.parametrize("inside_first", [True, False])
def test_jit_keeps_inside_and_outside_apart(inside_first: bool, traced: Traced) -> None:
    function, traces = traced
    # At one precision: it is part of jit's key too, and must not be what tells the two apart.
    with jax.default_matmul_precision("bfloat16"):
        for round_ in range(4):
            if (round_ % 2 == 0) == inside_first:
                with tpu_v4_optimization_context():
                    assert function(1.0) == 2.0
            else:
                assert function(1.0) == 1.0
    assert sorted(traces) == [False, True]  # one trace each, then cache hits


def test_jit_keeps_precisions_apart(traced: Traced) -> None:
    function, traces = traced
    for precision in ("bfloat16", "mixed", "bfloat16", "mixed"):
        with tpu_v4_optimization_context(precision=precision):
            function(1.0)
    assert len(traces) == 2


def test_entered_inside_a_trace() -> None:
    @jax.jit
    def function(x: jax.Array) -> jax.Array:
        with tpu_v4_optimization_context():
            assert active()
        assert not active()
        return x

    function(1.0)


def test_a_mesh_inside_a_trace_is_refused_and_nothing_leaks() -> None:
    mesh = MeshConfig((4, 8)).build()

    @jax.jit
    def function(x: jax.Array) -> jax.Array:
        with tpu_v4_optimization_context(mesh=mesh):
            return x

    with pytest.raises(ValueError, match="set_mesh"):
        function(1.0)


@pytest.mark.quick
def test_threads_do_not_see_each_other() -> None:
    one = tpu_v4_optimization_context(mesh=MeshConfig((4, 8)))
    inside, leave = threading.Event(), threading.Event()
    answers: dict[str, Any] = {}

    def holder() -> None:
        with one:
            inside.set()
            leave.wait(60)
            answers["holder"] = seen()
        answers["after"] = seen()

    thread = threading.Thread(target=holder)
    thread.start()
    inside.wait(60)
    assert seen() == OUTSIDE
    with tpu_v4_optimization_context(precision="float32"):
        assert seen() == (True, "float32", {})
        leave.set()
        thread.join(10)
        assert seen() == (True, "float32", {})
    assert answers == {"holder": (True, "bfloat16", {"data": 4, "model": 8}), "after": OUTSIDE}


def test_left_in_another_thread_is_an_error() -> None:
    one = tpu_v4_optimization_context()
    one.__enter__()
    errors: list[BaseException] = []

    def leave() -> None:
        try:
            one.__exit__(None, None, None)
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join(10)
    assert "did not enter it" in str(errors[0])
    one.__exit__(None, None, None)


def test_generators_that_end_out_of_order() -> None:
    def hold(**options: Any) -> Iterator[None]:
        with tpu_v4_optimization_context(**options):
            yield

    first, second, third = hold(), hold(precision="float32"), hold(mesh=MeshConfig((4, 8)))
    for one in (first, second, third):
        next(one)
    assert seen() == (True, "bfloat16", {"data": 4, "model": 8})
    next(second, None)
    assert seen() == (True, "bfloat16", {"data": 4, "model": 8})
    next(third, None)
    assert seen() == INSIDE
    next(first, None)
    assert seen() == OUTSIDE


def test_exit_stack_and_contextmanager() -> None:
    @contextlib.contextmanager
    def mine() -> Iterator[None]:
        with tpu_v4_optimization_context():
            yield

    with contextlib.ExitStack() as stack:
        stack.enter_context(mine())
        assert seen() == INSIDE
        stack.enter_context(tpu_v4_optimization_context(precision="float32"))
        assert seen() == (True, "float32", {})


# The whole process.


@pytest.fixture
def restored_process() -> Iterator[None]:
    yield
    context.disable_everywhere()


@pytest.mark.quick
def test_everywhere_is_every_thread_and_reversible(restored_process: None, traced: Traced) -> None:
    function, traces = traced

    def in_a_thread() -> Any:
        answers: list[Any] = []
        thread = threading.Thread(target=lambda: answers.append((seen(), float(function(1.0)))))
        thread.start()
        thread.join(20)
        return answers[0]

    assert in_a_thread() == (OUTSIDE, 1.0)
    context.enable_everywhere()
    context.enable_everywhere()
    assert context.enabled_everywhere()
    assert seen() == INSIDE
    assert in_a_thread() == (INSIDE, 2.0)
    with tpu_v4_optimization_context(dispatch=False):
        assert not active()
    context.disable_everywhere()
    assert in_a_thread() == (OUTSIDE, 1.0)
    assert traces == [False, True]


def test_reading_it_is_cheap() -> None:
    """Every call of an op asks. A function called is a tenth of a microsecond; counted, for others use the machine."""

    def calls() -> list[str]:
        entered: list[str] = []
        sys.setprofile(lambda frame, event, what: entered.append(event))
        try:
            active()
        finally:
            sys.setprofile(None)
        return [event for event in entered if event in ("call", "c_call")][:-1]  # the last is setprofile's own

    outside = calls()
    with tpu_v4_optimization_context():
        inside = calls()
    assert 1 <= len(outside) <= len(inside) <= 8
