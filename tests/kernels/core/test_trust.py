"""`trust` as a setting and as a `with`: in threads, in coroutines, entered again, left out of order."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import pytest

from capibara.errors import say_again
from capibara.kernels import explain, rms_norm, target, trust
from capibara.kernels.core import trusting
from capibara.kernels.core.trusting import trusted

ROWS = jax.ShapeDtypeStruct((8192, 4096), "bfloat16")


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    assert trusted() == "measured", "a test left its trust behind"
    assert trusting._explicit.get_global() is None


def test_a_setting_made_meanwhile_stays() -> None:
    """Another thread may set one between the two steps of a `with`: making and entering."""
    made = trust("predicted")
    other = trust("predicted")
    trust("measured")
    with made, other:
        assert trusted() == "predicted"
    assert trusting._explicit.get_global() == "measured"
    trust(None)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_with_takes_back_its_own_setting_and_no_other(order: tuple[int, ...]) -> None:
    made = [trust(level) for level in ("predicted", "measured", "predicted")]
    for one in order:
        with made[one] as inside:
            assert trusted() == inside.level


def test_many_threads_leave_nothing_behind() -> None:
    def worker() -> None:
        for _ in range(200):
            with trust("predicted"):
                assert trusted() == "predicted"

    threads = [threading.Thread(target=worker) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_one_object_is_entered_again_and_inside_of_itself() -> None:
    with trust("predicted") as once:
        with once, trust("measured"), once:
            assert trusted() == "predicted"
        assert trusted() == "predicted"
    assert trusted() == "measured"
    with once:
        assert trusted() == "predicted"


def test_none_inside_of_a_with_is_what_holds_by_itself() -> None:
    with trust("predicted"), trust(None):
        assert trusted() == "measured"


def test_generators_may_leave_out_of_order() -> None:
    @contextmanager
    def held(level: str) -> Iterator[None]:
        with trust(level):
            yield

    first, second = held("predicted"), held("measured")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert trusted() == "measured"
    assert trusting._explicit.value == "measured"
    second.__exit__(None, None, None)
    assert trusting._explicit.value is None


def test_a_coroutine_keeps_its_trust_to_itself() -> None:
    seen: list[tuple[str, str]] = []

    async def one(level: str | None) -> None:
        for _ in range(3):
            with trust(level):
                await asyncio.sleep(0)
                jitted = jax.jit(lambda x: (seen.append(("jit", trusted())), x)[1])
                jitted(1.0)
                seen.append((str(level), trusted()))
                assert seen[-2][1] == seen[-1][1]
                await asyncio.sleep(0)

    async def without() -> None:
        for _ in range(8):
            seen.append(("without", trusted()))
            await asyncio.sleep(0)

    async def main() -> None:
        await asyncio.gather(one("predicted"), one("measured"), one(None), without())
        seen.append(("without", trusted()))

    asyncio.run(main())
    wanted = {"predicted": "predicted", "measured": "measured", "None": "measured", "without": "measured"}
    assert {pair for pair in seen if pair[0] != "jit"} == set(wanted.items())


def test_a_task_and_a_thread_that_start_inside_keep_it() -> None:
    async def main() -> tuple[str, str]:
        async def later() -> str:
            await asyncio.sleep(0)
            return trusted()

        with trust("predicted"):
            task = asyncio.create_task(later())
            in_a_thread = await asyncio.to_thread(trusted)
        return await task, in_a_thread

    assert asyncio.run(main()) == ("predicted", "predicted")


def test_a_coroutine_that_asyncio_does_not_run_goes_by_it_in_ops_and_says_so() -> None:
    say_again()

    async def alone() -> str:
        with trust("predicted"):
            return trusted()

    coroutine = alone()
    with pytest.warns(RuntimeWarning, match="Put the `with` in a plain function"), pytest.raises(StopIteration) as done:
        coroutine.send(None)
    assert done.value.value == "predicted"


def test_it_may_stand_inside_of_jit() -> None:
    chosen = []

    @jax.jit
    def norm(x: jax.Array) -> jax.Array:
        with trust("predicted"):
            chosen.append(trusted())
        chosen.append(trusted())
        return x

    norm(1.0)
    norm(1.0)
    assert chosen == ["predicted", "measured"]
    with target("tpu", "TPU v4"):

        def inside(x: jax.Array) -> jax.Array:
            with trust("predicted"):
                return rms_norm(x)

        assert explain(jax.jit(inside), ROWS).implementation == "pallas_tpu"
