"""Every run of a compiled program is counted, however jax runs it; and afterwards jax is as it was."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import api, util

from capibara.observe.profiler import profile
from capibara.observe.profiler.executions import Executions

X, Y = jnp.ones((16, 16)), jnp.ones((8, 8))


def counted(run: Callable[[], object]) -> tuple[Counter[str], Executions]:
    executions = Executions()
    executions.start()
    try:
        run()
    finally:
        executions.stop()
        executions.wait()
    assert not executions.problems
    runs: Counter[str] = Counter()
    for program in executions.programs():
        runs[program.name] += program.runs
    return runs, executions


def calls(function: Callable[..., object], times: int, *args: object) -> Callable[[], None]:
    def run() -> None:
        for _ in range(times):
            function(*args)

    return run


@jax.jit
def squared(x: jax.Array) -> jax.Array:
    return x @ x


@pytest.mark.quick
def test_a_function_that_ran_before_counts_each_of_its_calls() -> None:
    squared(X), squared(X)  # from now on jax runs it in C++, and Python sees nothing of it
    runs, executions = counted(calls(squared, 7, X))
    assert runs == {"jit_squared": 7}
    (program,) = executions.programs()
    assert program.work.flops == 2 * 16**3
    assert not executions.compilations


def test_a_first_call_counts_too() -> None:
    def fresh(x: jax.Array) -> jax.Array:
        return x + 1

    runs, executions = counted(calls(jax.jit(fresh), 3, X))
    assert runs == {"jit_fresh": 3}
    ((name, compilations),) = executions.compilations.items()
    assert name.startswith("fresh at ")
    assert compilations == 1


@pytest.mark.quick
def test_signatures_are_told_apart() -> None:
    def both() -> None:
        for x in (X, Y, X, np.ones((8, 8), np.float32), X):
            squared(x)

    both()
    _, executions = counted(both)
    assert {program.work.flops: program.runs for program in executions.programs()} == {2 * 16**3: 3, 2 * 8**3: 2}
    assert executions.host_arguments == 1


def test_static_and_donated_arguments() -> None:
    added = jax.jit(lambda x, n: x + n, static_argnums=1, donate_argnums=0)

    def run() -> None:
        x = Y.copy()
        for n in (1, 2, 1, 1):
            x = added(x, n)

    run()
    _, executions = counted(run)
    runs = sorted(program.runs for program in executions.programs() if program.name == "jit__lambda")
    assert runs == [1, 3]


def test_shardings_that_the_user_gives_are_told_apart() -> None:
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    split, whole = (jax.NamedSharding(mesh, jax.P(axis)) for axis in ("x", None))
    function = jax.jit(lambda x: x * 2, out_shardings=whole)
    arrays = [jax.device_put(X, split), jax.device_put(X, whole)]

    def run() -> None:
        for array in (arrays[0], arrays[1], arrays[0]):
            function(array)

    run()
    _, executions = counted(run)
    assert sorted(program.runs for program in executions.programs()) == [1, 2]
    assert {program.devices for program in executions.programs()} == {2}


def test_compiled_ahead_of_time() -> None:
    compiled = squared.lower(X).compile()
    assert counted(calls(compiled, 3, X))[0] == {"jit_squared": 3}  # the first of them in Python
    assert counted(calls(compiled, 3, X))[0] == {"jit_squared": 3}


def test_programs_with_side_effects_run_in_python_each_time() -> None:
    seen = []

    @jax.jit
    def calling_back(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda total: seen.append(total), x.sum())
        return x * 2

    runs, _ = counted(calls(calling_back, 4, X))
    jax.effects_barrier()
    assert runs == {"jit_calling_back": 4}
    assert len(seen) == 4


def test_inside_of_a_transformation() -> None:
    tripled = jax.jit(lambda x: x * 3)
    differentiate = jax.grad(lambda x: tripled(x).sum())
    differentiate(X)
    before = counted(calls(differentiate, 1, X))[0]
    assert counted(calls(differentiate, 4, X))[0] == {name: 4 * runs for name, runs in before.items()}
    assert before["jit__lambda"] == 2  # forward and backward


def test_other_threads_count() -> None:
    import threading

    squared(X)

    def run() -> None:
        threads = [threading.Thread(target=calls(squared, 5, X)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert counted(run)[0] == {"jit_squared": 15}


@pytest.mark.quick
def test_jax_is_as_it_was_afterwards_also_after_an_error() -> None:
    hook, listener = api._post_hook_state.get_global(), util.test_event_listener

    def fails() -> None:
        with profile():
            squared(X)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert api._post_hook_state.get_global() is hook
    assert util.test_event_listener is listener
    with profile() as recording:  # and the next one works
        squared(X)
    assert recording.profile is not None
    assert recording.profile.runs == 1


def test_jax_still_looks_for_nans() -> None:
    divided = jax.jit(lambda x: x / x)
    divided(X), divided(X)

    def profiled() -> None:
        with profile():
            divided(jnp.zeros((16, 16)))

    jax.config.update("jax_debug_nans", True)
    try:
        # In a thread without a hook of its own: jax does not look where there is one.
        with ThreadPoolExecutor(1) as thread, pytest.raises(FloatingPointError):
            thread.submit(profiled).result()
    finally:
        jax.config.update("jax_debug_nans", False)


def test_a_thread_that_has_a_hook_of_its_own_counts() -> None:
    squared(X)
    with jax.debug_nans(True):
        squared(X)
    own = api._post_hook_state.get_local()
    assert counted(calls(squared, 3, X))[0] == {"jit_squared": 3}
    assert api._post_hook_state.get_local() is own


def test_tracing_that_takes_the_hook_away() -> None:
    def traced_once(x: jax.Array, n: float) -> jax.Array:
        with jax.debug_nans(False):  # as jax's own softmax does: the thread then has a hook of its own, which is none
            return x * n

    def in_a_fresh_thread() -> Counter[str]:
        return counted(calls(jax.jit(traced_once), 5, X, 2.0))[0]

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(in_a_fresh_thread).result() == {"jit_traced_once": 5}
    with ThreadPoolExecutor(1) as thread:  # and of a thread that traces while another profiles
        again = calls(jax.jit(traced_once), 5, Y, 3.0)
        assert counted(lambda: thread.submit(again).result())[0] == {"jit_traced_once": 5}
        thread.submit(again).result()  # what was left there goes at the next call
        assert thread.submit(api._post_hook_state.get_local).result() is None


def test_functions_of_jaxs_own_that_take_the_hook_away_each_time() -> None:
    jax.scipy.special.logsumexp(X), squared(X)

    def run() -> None:
        for _ in range(3):
            jax.scipy.special.logsumexp(X)
            with jax.debug_nans(True):
                squared(X)
            squared(X)

    assert counted(run)[0]["jit_squared"] == 6
    with profile() as recording:
        jax.config.update("jax_debug_nans", True)
        squared(X)
        jax.config.update("jax_debug_nans", False)
        squared(X)
    assert recording.profile is not None
    assert recording.profile.runs == 2
    assert api._post_hook_state.get_global() is None


def test_more_programs_than_are_held() -> None:
    def run() -> None:
        for n in range(1, 6):
            squared(jnp.ones((n, n)))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("capibara.observe.profiler.executions._HELD", 2)
        runs, _ = counted(lambda: (run(), run()))
    assert runs["jit_squared"] == 10


@pytest.mark.quick
def test_nested_profilers_say_so_and_the_program_goes_on() -> None:
    with profile("outer") as outer:
        with pytest.warns(RuntimeWarning, match="do not nest: 'inner'"), profile("inner") as inner:
            result = squared(X)
        squared(X)
    assert inner.profile is None
    assert inner.nested
    assert outer.profile is not None
    assert outer.profile.runs == 2
    assert result.shape == (16, 16)


def test_a_trace_of_jaxs_own_that_runs_already(tmp_path: object) -> None:
    warned = pytest.warns(RuntimeWarning, match="tracing already")
    with jax.profiler.trace(str(tmp_path)), warned, profile(mode="tracing") as recording:
        squared(X)
    assert recording.profile is not None
    assert recording.profile.mode == "counting"
    assert "tracing already" in recording.profile.notes[0]


def test_no_warning_where_nothing_is_wrong() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with profile(mode="tracing"):
            squared(X)
