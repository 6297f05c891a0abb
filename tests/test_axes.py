"""Which table of rules is in force: nesting, threads, coroutines, and jit's cache."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from capibara.axes import RULES, current_rules, use_rules
from capibara.mesh.mesh import MeshConfig
from capibara.mesh.rules import partition_spec, with_sharding_constraint

MESH = MeshConfig((4, 8))
X = np.ones((32, 64), np.float32)


@jax.jit
def constrained(x: jax.Array) -> jax.Array:
    return with_sharding_constraint(x, ("batch", "hidden")) * 2


@pytest.mark.quick
def test_a_constraint_follows_the_table_in_force_also_when_it_was_traced_before() -> None:
    with jax.set_mesh(MESH.build()):
        # One jitted function, the same arguments: only the table differs, and each one gets its own trace.
        assert constrained(X).sharding.spec == P("data", "model")
        with use_rules({"batch": "model", "hidden": "data"}):
            assert constrained(X).sharding.spec == P("model", "data")
            assert with_sharding_constraint(X, ("batch", "hidden")).sharding.spec == P("model", "data")
            assert partition_spec(("batch",), {"data": 4, "model": 8}) == P("model")
        assert constrained(X).sharding.spec == P("data", "model")


@pytest.mark.quick
def test_a_function_may_set_the_table_for_a_part_of_itself() -> None:
    @jax.jit
    def both(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        with use_rules({"batch": "model", "hidden": "data"}):
            turned = constrained(x)
        return turned, constrained(x)

    with jax.set_mesh(MESH.build()):
        turned, plain = both(X)
    assert (turned.sharding.spec, plain.sharding.spec) == (P("model", "data"), P("data", "model"))


@pytest.mark.quick
def test_tables_nest_and_come_back() -> None:
    assert current_rules() is RULES
    with use_rules({"vocab": None, "rows": "data"}) as outer:
        assert (outer["vocab"], outer["rows"], outer["mlp"]) == (None, "data", "model")
        with use_rules({"rows": ("data", "model")}) as inner:
            assert inner == {**RULES, "vocab": None, "rows": ("data", "model")}
            with use_rules({"rows": "data"}, replace=True):
                assert current_rules() == {"rows": "data"}
                with pytest.raises(ValueError, match=r"logical axis 'batch'.*'rows'"):
                    with_sharding_constraint(X, ("batch",))
            assert current_rules() == inner
        assert current_rules() == outer
    assert current_rules() is RULES


def test_an_error_inside_brings_the_table_back() -> None:
    with pytest.raises(KeyError), use_rules({"batch": None}):
        raise KeyError
    assert current_rules() is RULES


def test_rules_given_with_the_call_win() -> None:
    with use_rules({"batch": "model"}):
        assert partition_spec(("batch",), {"data": 4, "model": 8}, rules={"batch": "data"}) == P("data")


def test_another_thread_has_its_own_table() -> None:
    seen: list[Any] = []
    with use_rules({"batch": None}):
        worker = threading.Thread(target=lambda: seen.append(current_rules()["batch"]))
        worker.start()
        worker.join()
    assert seen == ["data"]


def test_tasks_do_not_see_each_others_table() -> None:
    async def one(value: str | None, order: list[Any]) -> None:
        with use_rules({"batch": value}):
            for _ in range(3):
                order.append((value, current_rules()["batch"]))
                await asyncio.sleep(0)

    async def main() -> list[Any]:
        order: list[Any] = []
        await asyncio.gather(one("model", order), one(None, order))
        order.append(("after", current_rules()["batch"]))
        return order

    order = asyncio.run(main())
    assert set(order) == {("model", "model"), (None, None), ("after", "data")}
    assert order[0][0] != order[1][0], "the tasks took turns"


def test_a_jit_in_a_coroutine_follows_its_table_and_never_poisons_the_cache() -> None:
    async def main() -> tuple[P, P, P]:
        before = asyncio.create_task(later())
        with use_rules({"batch": "model", "hidden": "data"}):
            eager = partition_spec(("batch",), {"data": 4, "model": 8})
            await asyncio.sleep(0)
            inside = constrained(X).sharding.spec
            return eager, inside, await before

    async def later() -> P:
        return constrained(X).sharding.spec

    with jax.set_mesh(MESH.build()):
        assert asyncio.run(main()) == (P("model"), P("model", "data"), P("data", "model"))
        assert constrained(X).sharding.spec == P("data", "model")


@pytest.mark.usefixtures("nothing_said_yet")
def test_a_coroutine_driven_by_hand_is_told_once_what_it_gets() -> None:
    async def main() -> tuple[Any, P]:
        with use_rules({"batch": "model", "hidden": "data"}):
            return current_rules()["batch"], constrained(X).sharding.spec

    def twice() -> None:
        for _ in range(2):
            with pytest.raises(StopIteration) as done:
                main().send(None)
            assert done.value.value == ("model", P("data", "model"))

    with jax.set_mesh(MESH.build()), pytest.warns(RuntimeWarning, match="use_rules was entered in a coro") as caught:
        twice()
    assert len(caught) == 1


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"batch": 3}, "3 for 'batch'"),
        ({"batch": ("data", "data")}, "tuple of different mesh axes"),
        ({"batch": ("data", None)}, "for 'batch'"),
        ({"batch": ""}, "'' for 'batch'"),
        ({3: "data"}, "A logical axis is a word. Got 3"),
        (["batch"], "Rules are a mapping"),
    ],
)
def test_a_table_that_is_none_is_refused(rules: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words), use_rules(rules):
        pass
    with pytest.raises(ValueError, match=words):
        with_sharding_constraint(X, ("batch",), rules=rules)
