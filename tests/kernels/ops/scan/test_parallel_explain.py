"""explain_scan: which path a step takes, why, and the line that kept it sequential."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.kernels import ScanPlan, explain, explain_scan, parallel_scan
from capibara.kernels.core import context
from capibara.kernels.ops.scan.parallel import affine
from capibara.kernels.ops.scan.parallel import plan as planning

T = 64
H = jax.ShapeDtypeStruct((4,), "float32")
XS = jax.ShapeDtypeStruct((T, 4), "float32")
W = jnp.eye(4)


@jax.custom_jvp
def doubled(x: Any) -> Any:
    return 2 * x


doubled.defjvp(lambda primals, tangents: (2 * primals[0], tangents[0]))

SEQUENTIAL = {
    "not affine": (lambda h, x: jnp.exp(h) * x, "exp", "not affine"),
    "a square": (lambda h, x: h * h + x, "mul", "by itself"),
    "a quotient": (lambda h, x: x / h, "div", "divides by the carry"),
    "a choice": (lambda h, x: jnp.where(h > 0, h, x), "gt", "not affine"),
    "a narrow cast": (lambda h, x: (0.5 * h + x).astype(jnp.bfloat16).astype(jnp.float32), "convert", "rounds"),
    "no gradient": (lambda h, x: 0.5 * jax.lax.stop_gradient(h) + x, "stop_gradient", "derivative of its own"),
    "its own gradient": (lambda h, x: doubled(h) + x, "custom_jvp_call", "derivative of its own"),
}


@pytest.mark.quick
@pytest.mark.parametrize("name", SEQUENTIAL)
def test_what_keeps_a_scan_sequential(name: str) -> None:
    made, primitive, said = SEQUENTIAL[name]
    plan = explain_scan(lambda h, x: (made(h, x), h), H, XS)
    assert (plan.path, plan.segments) == ("sequential", 8)
    assert plan.primitive is not None
    assert plan.line is not None
    assert plan.primitive.startswith(primitive)
    assert said in plan.why
    # The line is the user's, where the operation is written.
    assert "test_parallel_explain.py" in plan.line
    assert plan.line in str(plan)


DIAGONAL = {
    "a decay": lambda h, x: 0.9 * h + x,
    "a constant": lambda h, x: h,
    "the last x": lambda h, x: x,
    "a gate by a jitted function": lambda h, x: jax.jit(lambda h, g: (1 - g) * h + g)(h, jax.nn.sigmoid(x)),
    "recomputed": lambda h, x: jax.checkpoint(lambda h: h * x - h / 3)(h),
    "chosen by x": lambda h, x: jnp.where(x > 0, h + 1, x),
    "one scale for all": lambda h, x: -h * x.sum() + jnp.exp(x),
}


@pytest.mark.quick
@pytest.mark.parametrize("name", DIAGONAL)
def test_what_is_diagonal(name: str) -> None:
    def step(h: Any, x: Any) -> Any:
        return DIAGONAL[name](h, x), jnp.tanh(h)

    plan = explain_scan(step, H, XS, path="diagonal")
    assert explain_scan(step, H, XS).path == "diagonal"
    assert (plan.path, plan.segments, plan.primitive, plan.line) == ("diagonal", 1, None, None)
    assert plan.rounds == ((0,),)


@pytest.mark.quick
def test_the_words_and_the_data() -> None:
    def step(h: Any, x: Any) -> Any:
        return 0.9 * h + x, h

    plan = explain_scan(step, H, XS, num_segments=3)
    assert plan.segments == 3
    assert [one.implementation for one in plan.recurrences] == ["xla", "xla"]  # of 22 steps, and of the last 20
    assert str(plan).startswith(f"parallel_scan of {T} steps on cpu: diagonal, 3 segments, with checkpoints\n  because")
    assert "linear_recurrence(" in str(plan)
    data = plan.as_dict()
    assert (data["op"], data["path"], data["recurrences"][0]["op"]) == (
        "parallel_scan",
        "diagonal",
        "linear_recurrence",
    )
    asked = explain_scan(step, H, XS, implementation="reference")
    assert [one.implementation for one in asked.recurrences] == ["reference"]
    # The library's own explain tells the same, in the order in which it is decided.
    told = explain(parallel_scan, step, H, XS, path="diagonal")
    assert [one.implementation for one in told.selections] == ["diagonal", "xla"]
    assert explain(parallel_scan, lambda h, x: (jnp.tanh(h), x), H, XS).implementation == "sequential"
    assert "parallel_scan of 64 steps" in str(told)


def test_a_cpu_runs_cheap_steps_in_one_loop() -> None:
    def cheap(h: Any, x: Any) -> Any:
        return 0.9 * h + x, h

    def with_a_product(h: Any, x: Any) -> Any:
        return 0.9 * h + jax.jit(jnp.matmul)(x, W), h

    plan = explain_scan(cheap, H, XS)
    assert (plan.path, plan.one_loop, plan.segments, plan.recurrences) == ("diagonal", True, 1, ())
    assert "diagonal in one loop" in str(plan)
    ours, jaxs = (jax.jit(lambda s=s: s(cheap, jnp.ones(4), jnp.ones((T, 4))))() for s in (parallel_scan, jax.lax.scan))
    jax.tree.map(np.testing.assert_array_equal, ours, jaxs)  # the same loop
    assert "linear_recurrence" not in str(explain(parallel_scan, cheap, H, XS))
    for options in ({"path": "diagonal"}, {"num_segments": 2}, {"implementation": "xla"}):
        assert not explain_scan(cheap, H, XS, **options).one_loop
    assert not explain_scan(with_a_product, H, XS).one_loop
    with context.target("tpu"):
        assert not explain_scan(cheap, H, XS).one_loop
    assert explain_scan(lambda _, x: (None, x), None, XS).why.startswith("there is no carry")


def test_the_cost_rule_of_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(h: Any, x: Any) -> Any:
        return h @ jnp.eye(h.shape[-1], dtype=h.dtype) + x, h

    def plan(size: int, **options: Any) -> ScanPlan:
        shapes = jax.ShapeDtypeStruct((size,), "float32"), jax.ShapeDtypeStruct((4096, size), "float32")
        return explain_scan(step, *shapes, **options)

    assert plan(2).path == "sequential"  # a CPU's loop costs next to nothing
    # A chip whose loops cost more.
    monkeypatch.setitem(planning.LOOPS, "cpu", planning.LoopCost(step=1e-5, beside=1e-5, rate=1e12))
    small, large = plan(2), plan(256)
    assert (small.path, small.segments) == ("matrix", 64)
    assert (large.path, large.primitive) == ("sequential", "dot_general")
    assert "256^3 to multiply against 256^2 to apply" in large.why
    assert plan(256, num_segments=16).path == "matrix"
    assert plan(2, path="sequential").why == "it was asked for by name"
    half = explain_scan(step, jax.ShapeDtypeStruct((2,), "bfloat16"), jax.ShapeDtypeStruct((64, 2), "bfloat16"), 4)
    assert (half.path, "would round" in half.why) == ("sequential", True)
    with context.target("tpu"):
        assert "not timed on tpu" in plan(2).why


def test_effects_keep_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    def step(h: Any, x: Any) -> Any:
        jax.debug.print("{}", x, ordered=True)
        return 0.5 * h + x, h

    plan = explain_scan(step, jnp.float32(0), jnp.arange(4.0))
    assert (plan.path, plan.use_checkpointing) == ("sequential", False)
    assert "side effects" in plan.why
    capsys.readouterr()
    parallel_scan(step, jnp.float32(0), jnp.arange(4.0))
    jax.effects_barrier()
    assert capsys.readouterr().out.split() == ["0.0", "1.0", "2.0", "3.0"]


def test_no_steps() -> None:
    plan = explain_scan(lambda h, x: (h, x), H, jax.ShapeDtypeStruct((0, 4), "float32"))
    assert (plan.path, plan.length, plan.why) == ("sequential", 0, "there are no steps")


@pytest.mark.parametrize("every", [False, True])
def test_many_leaves_are_inspected_once_each(every: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each leaf hangs on the one before it, or on all of them; also through a call of a jitted function."""
    count = 40
    seen: list[int] = []
    split = affine.split

    def counted(step: Any, leaf: int, *rest: Any) -> Any:
        seen.append(leaf)
        return split(step, leaf, *rest)

    monkeypatch.setattr(affine, "split", counted)

    @jax.jit
    def advance(carry: Any, x: Any) -> Any:
        made = [0.5 * carry[0] + x]
        for i in range(1, count):
            made.append(0.5 * carry[i] + (sum(carry[:i]) if every else carry[i - 1]))
        return tuple(made)

    init = (H,) * count
    plan = explain_scan(lambda h, x: (advance(h, x), h[-1]), init, XS)
    assert plan.rounds == tuple((i,) for i in range(count))
    assert sorted(seen) == list(range(count))
    # A ring has no first one.
    seen.clear()
    plan = explain_scan(lambda h, x: ((*(h[i - 1] + x for i in range(count)),), None), init, XS)
    assert (plan.path, plan.rounds) == ("sequential", ())
    assert "another leaf that is not known before it" in plan.why
    assert sorted(seen) == list(range(count))
