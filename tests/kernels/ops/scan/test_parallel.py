"""parallel_scan is lax.scan: values, types, gradients and transformations, on each of its paths."""

from __future__ import annotations

import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from capibara.kernels import explain_scan, parallel_scan

RNG = np.random.default_rng(0)
T = 23  # prime: no number of segments divides it


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


# Of norm below one half, so that nothing grows and rounding neither.
W = normal(4, 4) / 8
XS = {"a": normal(T, 3, 4), "g": jax.nn.sigmoid(normal(T, 4))}
H = normal(3, 4)


def gated(w: Any) -> Any:
    def step(carry: Any, x: Any) -> Any:
        h, i = carry
        new = jnp.where(x["g"] > 0.3, x["g"] * h + x["a"] @ w, (h - x["a"]) / 2)
        return (new, i + 1), (new @ w, jnp.sin(i) * h, x["g"])

    return step, (H, 0)


def chained(w: Any) -> Any:
    """One leaf drives the next, by its old value and its new one, through what is not linear."""

    def step(carry: Any, x: Any) -> Any:
        p = 0.9 * carry["p"] + x["a"] @ w
        q = jnp.tanh(p) * carry["q"] + carry["p"] * carry["last"]
        return {"p": p, "q": q, "last": x["a"]}, q.sum()

    return step, {"p": H, "q": H + 1, "last": 2 * H}


def mixed(w: Any) -> Any:
    """A matrix transition that changes with time, beside a counter."""

    def step(carry: Any, x: Any) -> Any:
        i, h = carry
        h = jnp.swapaxes((w * x["g"]) @ h.T, 0, 1) + x["a"] / (1 + i)
        return (i + 1, h), h[0]

    return step, (0, H)


def recurrent(w: Any) -> Any:
    def step(h: Any, x: Any) -> Any:
        h = jnp.tanh(h @ w + x["a"])
        return h, {"h": h}

    return step, H


STEPS = {"gated": gated, "chained": chained, "mixed": mixed, "recurrent": recurrent}
CALLS = {
    "gated": ("gated", "diagonal", {}),
    "gated, in segments": ("gated", "diagonal", {"num_segments": 4, "reverse": True}),
    "chained": ("chained", "diagonal", {"use_checkpointing": False}),
    "mixed": ("mixed", "matrix", {"num_segments": 4, "reverse": True}),
    "recurrent": ("recurrent", "sequential", {"reverse": True}),
}


# Also where a CPU would rather run one loop.
at_once = functools.partial(parallel_scan, path="diagonal")


def agree(got: Any, want: Any, scale: float = 1.0) -> None:
    """To rounding: each side rounds a few times a step, and what an early step was off by is carried on."""
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        assert np.linalg.norm(one - other) <= scale * 8 * T * 2.0**-24 * max(1.0, float(np.linalg.norm(other)))


@pytest.mark.quick
@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients_are_lax_scans(name: str) -> None:
    made, path, options = CALLS[name]
    plain = {"reverse": options.get("reverse", False)}
    step, init = STEPS[made](W)
    assert explain_scan(step, init, XS, **options).path == path

    def run(scan: Any, options: Any) -> Any:
        def loss(w: Any, floats: Any, xs: Any) -> Any:
            step, init = STEPS[made](w)
            init = jax.tree.map(lambda x: floats if jnp.ndim(x) else x, init)
            out = scan(step, init, xs, **options)
            flat = [leaf for leaf in jax.tree.leaves(out) if jnp.issubdtype(leaf.dtype, jnp.floating)]
            return sum(jnp.sin(leaf).sum() for leaf in flat), out

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(W, H, XS)

    ((_, got), slopes), ((_, want), want_slopes) = run(parallel_scan, options), run(jax.lax.scan, plain)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    agree(got, want)
    agree(slopes, want_slopes, scale=8)  # sums of as many terms again, in the backward pass


@pytest.mark.quick
def test_short_scans_and_what_they_start_from() -> None:
    step, init = gated(W)
    for steps in (0, 1, 2):
        xs = jax.tree.map(lambda x, n=steps: x[:n], XS)
        got, want = (jax.jit(lambda xs, s=s: s(step, init, xs))(xs) for s in (parallel_scan, jax.lax.scan))
        assert jax.tree.structure(got) == jax.tree.structure(want)
        agree(got, want)
    # No xs: a number of steps; and Python numbers keep their weak types.
    for first in (0.5, 1, jnp.bfloat16(1.0)):
        got, want = (
            jax.jit(lambda s=s, first=first: s(lambda h, _: (h * 2, h), first, None, length=5))()
            for s in (at_once, jax.lax.scan)
        )
        agree(got, want)
        assert got[0].weak_type == want[0].weak_type
    # A whole-number carry that wraps around is exact on the diagonal path.
    odd = jnp.asarray([3, 5, 7], jnp.int32)

    def scrambled(n: Any, x: Any) -> Any:
        return n * odd + x, n

    numbers = jnp.arange(60, dtype=jnp.int32).reshape(20, 3) ** 4
    assert explain_scan(scrambled, odd, numbers).path == "diagonal"
    for reverse in (False, True):
        got, want = (
            jax.jit(lambda s=s, r=reverse: s(scrambled, odd, numbers, reverse=r))() for s in (at_once, jax.lax.scan)
        )
        jax.tree.map(np.testing.assert_array_equal, got, want)


def test_views_of_the_carry() -> None:
    """Elements may move on the way if they are back in place at the end."""

    def there_and_back(h: Any, x: Any) -> Any:
        turned = (h.T * 0.5).reshape(2, 6) + x.T.reshape(2, 6)
        return turned.reshape(4, 3).T, h

    def turned(h: Any, x: Any) -> Any:
        return h[::-1] * 0.5 + x, h

    for step, path in ((there_and_back, "diagonal"), (turned, "sequential")):
        assert explain_scan(step, H, XS["a"]).path == path
        ours = at_once if path == "diagonal" else parallel_scan
        got, want = (jax.jit(lambda s=s: s(step, H, XS["a"]))() for s in (ours, jax.lax.scan))  # noqa: B023
        agree(got, want)


@pytest.mark.quick
def test_bfloat16_carries_have_a_float32_state() -> None:
    def step(h: Any, x: Any) -> Any:
        return jnp.bfloat16(0.75) * h + x, h

    xs = XS["a"].astype(jnp.bfloat16)
    first = H.astype(jnp.bfloat16)
    exact = jax.lax.scan(lambda h, x: (0.75 * h + x, h), first.astype(jnp.float32), xs.astype(jnp.float32))[1]
    got, want = (scan(step, first, xs)[1] for scan in (at_once, jax.lax.scan))
    assert got.dtype == want.dtype == jnp.bfloat16
    off = [float(jnp.linalg.norm(one.astype(jnp.float32) - exact) / jnp.linalg.norm(exact)) for one in (got, want)]
    # One rounding against one a step, of which a decay of 3/4 remembers four.
    assert off[0] < 2**-9 < off[1] < 8 * 2**-9


def test_vmap_of_a_scan() -> None:
    firsts = jnp.stack([H, 2 * H])
    step, _ = chained(W)

    def run(scan: Any) -> Any:
        return jax.jit(jax.vmap(lambda h: scan(step, {"p": h, "q": h, "last": h}, XS)))(firsts)

    agree(run(parallel_scan), run(jax.lax.scan), scale=2)
    step, _ = mixed(W)
    got, want = (
        jax.jit(jax.vmap(lambda a, s=scan, o=o: s(step, (0, H), {**XS, "a": a}, **o)))(jnp.stack([XS["a"], -XS["a"]]))
        for scan, o in ((parallel_scan, {"num_segments": 3}), (jax.lax.scan, {}))
    )
    agree(got, want, scale=2)


@pytest.mark.quick
def test_inside_shard_map() -> None:
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("data",))
    xs = normal(T, 2, 3, 4)

    def loss(scan: Any, w: Any, xs: Any) -> Any:
        def step(h: Any, x: Any) -> Any:
            h = jax.nn.sigmoid(x) * h + x @ w
            return h, jnp.sin(h)

        return scan(step, jnp.zeros_like(xs[0]), xs)[1]

    spec = PartitionSpec(None, "data")

    def total(w: Any) -> Any:
        split = jax.shard_map(
            lambda w, xs: loss(parallel_scan, w, xs), mesh=mesh, in_specs=(PartitionSpec(), spec), out_specs=spec
        )
        return split(w, xs).sum()

    got = jax.jit(jax.value_and_grad(total))(W)
    want = jax.jit(jax.value_and_grad(lambda w: loss(jax.lax.scan, w, xs).sum()))(W)
    agree(got, want, scale=8)


def test_a_checkpoint_a_segment_bounds_the_memory() -> None:
    weights = normal(32, 32) / 8

    def memory(steps: int, **options: Any) -> int:
        def loss(h: Any, xs: Any) -> Any:
            return parallel_scan(lambda h, x: (jnp.tanh(h @ weights + x), None), h, xs, **options)[0].sum()

        shapes = jax.ShapeDtypeStruct((32,), "float32"), jax.ShapeDtypeStruct((steps, 32), "float32")
        return int(jax.jit(jax.grad(loss)).lower(*shapes).compile().memory_analysis().temp_size_in_bytes)

    short, long = memory(256), memory(4096)
    # Sixteen times the steps are four times the segments of four times the length.
    assert long < 5 * short
    assert memory(4096, use_checkpointing=False) > 8 * long
    assert memory(4096, num_segments=2) > 4 * long  # half the steps are kept for the backward pass of a segment


def test_mistakes(caplog: pytest.LogCaptureFixture) -> None:
    for call, said in (
        (
            lambda: parallel_scan(lambda h, x: (h[:2], x), H, XS["a"]),
            r"with the type that it was given.*\[3,4\].*\[2,4\]",
        ),
        (lambda: parallel_scan(lambda h, x: ((h, h), x), H, XS["a"]), "same pytree structure"),
        (lambda: parallel_scan(lambda h, x: h, H, XS["a"]), r"returns \(carry, y\).*must be a pair"),
        (
            lambda: parallel_scan(gated(W)[0], (H, 0), {"a": XS["a"], "g": XS["g"][:5]}),
            r"xs\['a'\] of 23, xs\['g'\] of 5",
        ),
        (lambda: parallel_scan(gated(W)[0], (H, 0), XS, length=5), "length=5 and 23 steps"),
        (lambda: parallel_scan(gated(W)[0], (H, 0)), "neither xs nor length"),
        (lambda: parallel_scan(lambda h, x: (h, x), H, 1.0), "time as its first axis"),
        (lambda: parallel_scan(lambda h, x: (h, x), H, length=-1), "length is zero or more"),
        (lambda: parallel_scan(gated(W)[0], (H, 0), XS, 0), "whole number above zero. Got 0"),
        (lambda: parallel_scan(gated(W)[0], (H, 0), XS, 2.5), "whole number above zero. Got 2.5"),
        (lambda: parallel_scan(gated(W)[0], (H, 0), XS, path="fast"), "Unknown path of parallel_scan 'fast'"),
        (lambda: parallel_scan(recurrent(W)[0], H, XS, path="matrix"), "cannot run this step: tanh at .*test_parallel"),
        (lambda: parallel_scan(mixed(W)[0], (0, H), XS, path="diagonal"), "'diagonal' was asked for.*dot_general"),
        (lambda: parallel_scan(recurrent(W)[0], H, XS, implementation="xla"), "implementation='xla' for a sequential"),
        (lambda: parallel_scan(gated(W)[0], (H, 0), XS, implementation="no"), "Unknown implementation"),
        (lambda: parallel_scan(gated(W)[0], (H, 0), XS, reverse="no"), "reverse is True or False"),
        (lambda: parallel_scan(gated(W)[0], (H, 0), XS, use_checkpointing="no"), "use_checkpointing is True or False"),
        (lambda: parallel_scan("f", H, XS), "The step is a function"),
        (lambda: parallel_scan(lambda h, x: (h, x), {"a": "a"}, XS), r"init\['a'\] of type str"),
        (lambda: explain_scan(lambda h, x: (h, x), "a", XS), "init of type str"),
        (lambda: parallel_scan(lambda h, x: (h, x), H, "a"), "xs of type str"),
        (
            lambda: jax.jit(lambda n: parallel_scan(gated(W)[0], (H, 0), XS, n))(3),
            "num_segments is a whole number above zero",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            call()
    # An error of the step's own is not dressed up.
    with pytest.raises(TypeError, match="mine"):
        parallel_scan(lambda h, x: (_ for _ in ()).throw(TypeError("mine")), H, XS["a"])
    with caplog.at_level(logging.WARNING, "capibara.kernels"):
        for _ in range(2):
            assert explain_scan(recurrent(W)[0], H, XS, 99).segments == T
    assert [r.getMessage() for r in caplog.records] == [
        "parallel_scan: num_segments=99 of 23 steps is 23 segments of one step (said once)"
    ]


def test_an_implementation_runs_or_is_refused() -> None:
    """Also where linear_recurrence has nothing to do."""

    def add(h: Any, x: Any) -> Any:
        return h + x, h

    counts = jnp.arange(5)
    for scan in (parallel_scan, explain_scan):
        for xs in (counts, counts[:0], normal(1)):
            with pytest.raises(ValueError, match="Unknown implementation of linear_recurrence 'bogus'"):
                scan(add, jnp.zeros((), xs.dtype), xs, implementation="bogus")
        with pytest.raises(ValueError, match="scan of int32, which run without it"):
            scan(add, jnp.int32(0), counts, implementation="reference")
    with jax.enable_x64(True), pytest.raises(ValueError, match="scan of float64, which run without it"):
        parallel_scan(add, jnp.zeros((), "float64"), jnp.ones(5, "float64"), implementation="reference")
    # Beside a counter a float leaf runs on it, and so does one step alone.
    xs = normal(1, 3)

    def both(carry: Any, x: Any) -> Any:
        return (0.5 * carry[0] + x, carry[1] + 1), carry[0]

    final, _ = parallel_scan(both, (jnp.ones(3), 0), xs, implementation="reference")
    np.testing.assert_array_equal(final[0], 0.5 + xs[0])
    plan = explain_scan(both, (jnp.ones(3), 0), xs, implementation="reference")
    assert (plan.path, plan.recurrences[0].implementation) == ("diagonal", "reference")
    # No steps: nothing runs, whichever was asked for.
    final, _ = parallel_scan(both, (jnp.ones(3), 0), xs[:0], implementation="reference")
    np.testing.assert_array_equal(final[0], 1)


RESETS = {
    # A step, and whether its form is told to be the step's for finite numbers alone.
    "takes x instead": (lambda h, x, a: jnp.where(x > 1, x, a * h + x), True),
    "clears the carry": (lambda h, x, a: a * jnp.where(x > 1, 0.0, h) + x, True),
    "by a mask, which does not": (lambda h, x, a: a * (h * (x < 1)) + x, True),
    "chooses a gate": (lambda h, x, a: jnp.where(x > 1, a * h, h + x), False),
    "multiplies and adds": (lambda h, x, a: a * h - x, False),
    "overflows on the way": (lambda h, x, a: (h + x) * 1e38 * a * 1e-38, True),
}


@pytest.mark.spread(5)
@pytest.mark.quick
@pytest.mark.parametrize("path", ["diagonal", "matrix"])
@pytest.mark.parametrize("name", RESETS)
def test_what_is_not_finite_is_lax_scans(name: str, path: str) -> None:
    """Values and gradients, for a NaN and an infinity that a reset clears and for a carry that overflows."""
    made, checked = RESETS[name]
    gates = jnp.linspace(0.5, 1.25, 6)

    def step(h: Any, x: Any, a: Any) -> Any:
        new = made(h, x, a)
        return new, 2 * new

    xs = np.asarray(np.random.default_rng(1).normal(size=(24, 6)), np.float32)
    xs[7, 1], xs[9, 2], xs[5, 3] = np.nan, np.inf, 3e38
    xs[15] = 2.0
    options = {"path": path, "num_segments": 5}
    plan = explain_scan(functools.partial(step, a=gates), jnp.ones(6), xs, **options)
    assert plan.checked == (checked or path == "matrix")
    assert ("one by one" in plan.why) == plan.checked

    def run(scan: Any, options: Any) -> Any:
        def loss(a: Any, h: Any, xs: Any) -> Any:
            final, ys = scan(functools.partial(step, a=a), h, xs, **options)
            return jnp.where(jnp.isfinite(ys), ys, 0).sum(), (final, ys)

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))

    ours, jaxs = run(parallel_scan, options), run(jax.lax.scan, {})
    for given in (xs, np.nan_to_num(xs, posinf=1.0) % 3):  # the other is finite throughout
        for one, other in zip(
            jax.tree.leaves(ours(gates, jnp.ones(6), given)),
            jax.tree.leaves(jaxs(gates, jnp.ones(6), given)),
            strict=True,
        ):
            # To rounding, as `agree` has it, column by column of such different sizes.
            np.testing.assert_allclose(one, other, rtol=8 * 24 * 2.0**-24, atol=1e-5)


def test_a_transition_that_grows_leaves_a_carry_of_zero_alone() -> None:
    """The hundredth power of 3 is not a float32; zero times it is zero one step after another."""
    w = 3 * jnp.eye(4)
    xs = jnp.zeros((200, 4)).at[-2:].set(1.0)
    want = jax.lax.scan(lambda h, x: (h @ w + x, h), jnp.zeros(4), xs)
    got = parallel_scan(lambda h, x: (h @ w + x, h), jnp.zeros(4), xs, num_segments=2)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    double = jax.vmap(lambda xs: parallel_scan(lambda h, x: (h @ w + x, h), jnp.zeros(4), xs, num_segments=2))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[1], b), double(jnp.stack([xs / 2, xs])), want)


def test_forward_mode_of_a_checked_scan() -> None:
    def step(h: Any, x: Any) -> Any:
        return jnp.where(x > 1, x, 0.5 * h * x), h

    xs = normal(T)
    for given in (xs, xs.at[2].set(jnp.inf)):
        got, want = (
            jax.jvp(lambda xs, s=s, o=o: s(step, jnp.ones(()), xs, **o), (given,), (xs,))
            for s, o in ((parallel_scan, {"path": "diagonal", "implementation": "reference"}), (jax.lax.scan, {}))
        )
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5)
    # And a second derivative, in reverse mode.
    got, want = (
        jax.grad(lambda xs, s=s, o=o: jax.grad(lambda xs: s(step, 1.0, xs, **o)[0])(xs).sum())(xs)
        for s, o in ((parallel_scan, {"path": "diagonal"}), (jax.lax.scan, {}))
    )
    agree(got, want)


def test_matrices_and_resets_inside_shard_map() -> None:
    """With its check of what varies over the mesh, also where a device alone has what is not finite."""
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("data",))
    spec = PartitionSpec(None, "data")

    def by_matrix(w: Any) -> Any:
        return lambda h, x: (h @ w + x, jnp.sin(h))

    def by_choice(w: Any) -> Any:
        return lambda h, x: (jnp.where(x > 1, x, w[0] * h + x), h)

    xs = normal(T, 2, 3, 4)
    xs = xs.at[3, 1].set(jnp.inf).at[5, 1].set(2.0)
    for made, given in ((by_matrix, normal(T, 2, 3, 4)), (by_choice, xs)):

        def total(scan: Any, w: Any, xs: Any, made: Any = made, **options: Any) -> Any:
            final, ys = scan(made(w), jnp.zeros_like(xs[0]), xs, **options)
            return jnp.where(jnp.isfinite(ys), ys, 0) + final

        def split(w: Any, xs: Any, total: Any = total) -> Any:
            one = functools.partial(total, parallel_scan, num_segments=4)
            return jax.shard_map(one, mesh=mesh, in_specs=(PartitionSpec(), spec), out_specs=spec)(w, xs).sum()

        got = jax.jit(jax.value_and_grad(split, (0, 1)))(W, given)
        want = jax.jit(jax.value_and_grad(lambda w, xs, t=total: t(jax.lax.scan, w, xs).sum(), (0, 1)))(W, given)
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(one, other, rtol=8 * 8 * T * 2.0**-24, atol=1e-4)


def test_leaves_that_vary_differently_run_one_by_one() -> None:
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("data",))
    told: list[str] = []

    def step(carry: Any, x: Any) -> Any:
        return (carry[0] @ W + carry[1] @ W + x, carry[1] @ W), carry[0]

    def both(xs: Any) -> Any:
        init = (jnp.zeros_like(xs[0]), jnp.ones((3, 4)))
        told.append(explain_scan(step, init, xs, num_segments=3).why)
        return parallel_scan(step, init, xs, num_segments=3)[1]

    spec = PartitionSpec(None, "data")
    jax.eval_shape(jax.shard_map(both, mesh=mesh, in_specs=spec, out_specs=spec), normal(6, 6, 4))
    assert "vary over different axes" in told[0]
