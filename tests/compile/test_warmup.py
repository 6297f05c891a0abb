"""Programs made before they are needed: in order, told of, and from disk the second time."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from capibara.compile.cache import ExecutableCache
from capibara.compile.warmup import Program, warm_up


def programs(count: int) -> list[Program]:
    return [
        Program(
            name=f"times {number}",
            what=f"times {number}",
            build=lambda number=number: lambda x: x * number,
            args=(jax.ShapeDtypeStruct((2,), jnp.float32),),
        )
        for number in range(count)
    ]


@pytest.mark.quick
def test_every_program_is_made_once(tmp_path: Path) -> None:
    told: list[tuple[int, int, str]] = []
    made, report = warm_up(programs(3), ExecutableCache(tmp_path), progress=lambda *args: told.append(args), workers=2)
    assert (report.programs, report.compiled, report.from_disk) == (3, 3, 0)
    assert [done for done, _, _ in told] == [1, 2, 3]
    assert {name for _, _, name in told} == {"times 0", "times 1", "times 2"}
    made, report = warm_up(programs(3), ExecutableCache(tmp_path))
    assert (report.compiled, report.from_disk) == (0, 3)
    assert [run(jnp.ones(2)).tolist() for run in made] == [[0, 0], [1, 1], [2, 2]]
    _, report = warm_up(programs(1))
    assert report.compiled == 1  # nothing is kept


def test_shapes_are_part_of_what_a_program_is(tmp_path: Path) -> None:
    (small,) = programs(1)
    large = Program(small.name, small.what, small.build, (jax.ShapeDtypeStruct((3,), jnp.float32),))
    _, report = warm_up([small, large], ExecutableCache(tmp_path))
    assert report.compiled == 2
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.quick
def test_the_compilers_options_are_part_of_what_a_program_is(tmp_path: Path) -> None:
    (plain,) = programs(1)
    optioned = dataclasses.replace(plain, options={"xla_gpu_graph_min_graph_size": 1 << 30})
    _, report = warm_up([plain, optioned], ExecutableCache(tmp_path))
    assert report.compiled == 2
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        warm_up([dataclasses.replace(plain, options={"xla_no_such_option": 1})])  # it reaches the compiler
