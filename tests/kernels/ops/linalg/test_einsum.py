"""contract is numpy's einsum in float64, by gemm where it can be, within the memory it is given."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from capibara.kernels import target
from capibara.kernels.core.dispatch import recording
from capibara.kernels.core.spec import unit_roundoff
from capibara.kernels.ops.linalg.einsum import contract, path_report

Shapes = list[tuple[int, ...]]


def draw(shapes: Shapes, dtype: str = "float32") -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def exact(equation: str, operands: list[jax.Array]) -> Any:
    return np.einsum(equation, *(np.asarray(x, np.float64) for x in operands))


def close(got: Any, want: Any, steps: int = 1, summed: int = 64) -> None:
    """Every step rounds to the result's type and adds up to `summed` numbers in float32; four times that."""
    unit = max(unit_roundoff(got.dtype), unit_roundoff(jnp.float32))
    tolerance = 4 * steps * (unit + unit_roundoff(jnp.float32) * summed**0.5)
    assert got.shape == np.shape(want)
    assert np.linalg.norm(np.asarray(got, np.float64) - want) <= tolerance * max(np.linalg.norm(want), 1e-30)


EQUATIONS: list[tuple[str, Shapes, int]] = [
    # equation, shapes, and how many gemms it takes
    ("ij,jk->ik", [(3, 4), (4, 5)], 1),
    ("ij,jk", [(3, 4), (4, 5)], 1),
    ("ij,j", [(3, 4), (4,)], 1),
    ("bhnd,bhkd->bhnk", [(2, 3, 4, 5), (2, 3, 6, 5)], 1),
    ("...ij,...jk", [(2, 1, 3, 4), (7, 4, 5)], 1),
    ("btd,df->btf", [(2, 3, 4), (4, 5)], 1),
    ("bthd,hde->bte", [(2, 3, 4, 5), (4, 5, 6)], 1),
    ("ji,jk->ki", [(4, 3), (4, 5)], 1),
    ("abij,cdjk->acibdk", [(2, 3, 4, 5), (2, 2, 5, 3)], 1),
    ("ij,jk->k", [(3, 4), (4, 5)], 1),
    ("abc,bd->ad", [(2, 3, 4), (3, 5)], 1),
    ("iij,jkk->ik", [(3, 3, 4), (4, 5, 5)], 1),
    ("ij,jk,kl->il", [(3, 4), (4, 5), (5, 6)], 2),
    ("ijk,kl,lm,mi->jl", [(2, 3, 4), (4, 5), (5, 6), (6, 2)], 2),
    ("aab,bcc,cd->d", [(2, 2, 3), (3, 4, 4), (4, 5)], 2),
    ("ij,jk->ik", [(3, 1), (5, 4)], 0),
    ("ij,kj->ki", [(0, 4), (3, 4)], 1),
    ("ij,jk->ik", [(3, 0), (0, 4)], 1),
    ("ii", [(4, 4)], 0),
    ("ii->i", [(4, 4)], 0),
    ("ij->ji", [(3, 4)], 0),
    ("ij->", [(3, 4)], 0),
    ("i,j->ij", [(3,), (4,)], 0),
    ("i,i", [(3,), (3,)], 0),
    ("bi,bi->b", [(2, 3), (2, 3)], 0),
    ("ij,->ij", [(3, 4), ()], 0),
    ("...,...", [(2, 3), (3,)], 0),
]


@pytest.mark.quick(cases=5)
@pytest.mark.parametrize(("equation", "shapes", "products"), EQUATIONS)
def test_an_equation_is_einsum(equation: str, shapes: Shapes, products: int) -> None:
    operands = draw(shapes)
    want = exact(equation, operands)
    with recording() as found:
        got = contract(equation, *operands)
    close(got, want, len(operands))
    assert len(found) == products


@pytest.mark.parametrize("equation", ["bhnd,bhkd->bhnk", "abij,cdjk->acibdk", "bthd,hde->bte", "ji,jk->ki"])
def test_on_one_device_axes_are_flattened(equation: str) -> None:
    """A trace on 32 devices maps over axes, which may be split; what is known to be on one is reshaped."""
    (shapes,) = (shapes for one, shapes, _ in EQUATIONS if one == equation)
    operands = draw(shapes)
    with jax.disable_jit(), recording() as found:
        got = contract(equation, *operands)
    close(got, exact(equation, operands))
    (selection,) = found
    a, b = selection.call.args[:2]
    # All of both operands is in the one gemm.
    assert a is not None
    assert b is not None
    assert {int(np.prod(x.shape)) for x in (a, b)} == {x.size for x in operands}


@st.composite
def equations(draw_from: Any) -> tuple[str, Shapes]:
    """Up to three operands with up to three of four indices each, repeats too, and any output of them."""
    sizes = dict(zip("abcd", draw_from(st.permutations([1, 2, 3, 4])), strict=True))
    index = st.sampled_from("abcd")
    terms = draw_from(st.lists(st.lists(index, max_size=3), min_size=1, max_size=3))
    used = sorted({x for term in terms for x in term})
    output = draw_from(st.permutations(used))[: draw_from(st.integers(0, len(used)))]
    equation = f"{','.join(map(''.join, terms))}->{''.join(output)}"
    # numpy has no diagonal of an axis of one element with a longer one; elsewhere such an axis is broadcast.
    narrow = draw_from(st.booleans())
    shapes = [
        tuple(1 if narrow and i == 0 and len(set(term)) == len(term) else sizes[x] for x in term)
        for i, term in enumerate(terms)
    ]
    return equation, shapes


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(equations())
def test_any_equation_is_einsum(case: tuple[str, Shapes]) -> None:
    equation, shapes = case
    operands = draw(shapes)
    close(contract(equation, *operands), exact(equation, operands), len(operands))


@pytest.mark.parametrize("optimize", ["optimal", "greedy", "auto", True, False])
def test_every_order_gives_the_same(optimize: str | bool) -> None:
    operands = draw([(3, 4), (4, 5), (5, 6), (6, 2)])
    got = contract("ij,jk,kl,lm->im", *operands, optimize=optimize)
    close(got, exact("ij,jk,kl,lm->im", operands), 3)


def test_the_order_changes_the_work() -> None:
    shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((100, 2), (2, 100), (100, 1))]
    best, in_turn = (path_report("ij,jk,kl->il", *shapes, optimize=o) for o in ("optimal", False))
    # (jk,kl) first: 2*2*100 + 2*100*2; (ij,jk) first: 2*100*2*100 + 2*100*100.
    assert (best.flops, in_turn.flops) == (800.0, 60_000.0)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("equation", "shapes", "flags"),
    [
        ("bhnd,bhkd->bhnk", [(2, 2, 4, 5), (2, 2, 6, 5)], "transpose_b=True"),
        ("ji,jk->ik", [(4, 3), (4, 5)], "transpose_a=True"),
        ("ij,jk->ki", [(3, 4), (4, 5)], "transpose_a=True transpose_b=True"),
        ("ij,jk->ik", [(3, 4), (4, 5)], ""),
    ],
)
def test_a_transposed_operand_is_read_in_place(equation: str, shapes: Shapes, flags: str) -> None:
    operands = draw(shapes)
    with recording() as found:
        text = str(jax.make_jaxpr(lambda *x: contract(equation, *x))(*operands))
    assert "transpose[" not in text
    (selection,) = found
    assert selection.call.signature.replace(" out_dtype=float32", "").endswith(flags)
    assert ("transpose" in selection.call.signature) == bool(flags)


def test_narrow_types_are_added_up_in_float32() -> None:
    """2048 ones in bfloat16: a sum kept in bfloat16 would stop at 256."""
    ones = jnp.ones((2048, 2), jnp.bfloat16)
    assert contract("ij->j", ones).tolist() == [2048, 2048]
    assert contract("ij,k->jk", ones, jnp.ones(2, jnp.bfloat16)).tolist() == [[2048, 2048]] * 2


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bfloat16", "bfloat16"), ("mixed", "float32"), ("float32", "float32")]
)
def test_a_policy_rounds_operands_and_sets_the_result(precision: str, dtype: str) -> None:
    operands = draw([(8, 16), (16, 8), (8, 4)])
    got = contract("ij,jk,kl->il", *operands, precision=precision)
    assert got.dtype == dtype
    want = exact("ij,jk,kl->il", operands)
    error = np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)
    # Three operands, an intermediate and the result are each rounded to bfloat16 (unit 2**-9) or float32.
    narrow = precision != "float32"
    assert error < (5 * 2**-9 if narrow else 1e-6)
    assert (error > 2**-12) == narrow


def test_integers_and_complex_are_einsum_too() -> None:
    a, b = jnp.arange(12).reshape(3, 4), jnp.arange(20).reshape(4, 5)
    got = contract("ij,jk->ik", a, b)
    assert got.dtype == a.dtype
    np.testing.assert_array_equal(got, np.asarray(a) @ np.asarray(b))
    z = draw([(3, 4)])[0] * (1 + 2j)
    np.testing.assert_allclose(contract("ij,kj->ik", z, z), np.asarray(z) @ np.asarray(z).T, rtol=1e-5)


# A chain whose first product is large: [n, n] for operands of [n, 8].
CHAIN = "id,jd,je->ie"
CHAIN_SHAPES: Shapes = [(700, 8), (500, 8), (500, 8)]
WHOLE = 4 * 700 * 500


def chain(limit: int | None) -> Any:
    options = {} if limit is None else {"memory_efficient": True, "memory_limit_bytes": limit}
    return lambda *x: contract(CHAIN, *x, optimize=False, **options)


@pytest.mark.quick
@pytest.mark.parametrize("limit", [WHOLE // 2, WHOLE // 10 + 1, 2000])
def test_chunks_give_the_same_result_and_gradient(limit: int) -> None:
    operands = draw(CHAIN_SHAPES)
    close(chain(limit)(*operands), exact(CHAIN, operands), 2, 500)
    small = [x[:50] for x in operands]
    grads = [
        jax.jit(jax.grad(lambda *x, c=c: jnp.sum(jnp.sin(c(*x))), (0, 1, 2)))(*small)
        for c in (chain(min(limit, 400)), lambda *x: jnp.einsum(CHAIN, *x, precision="highest"))
    ]
    for got, want in zip(*grads, strict=True):
        close(got, np.asarray(want, np.float64), 4, 50)


def temporary(fn: Any, operands: list[jax.Array]) -> int:
    return int(jax.jit(fn).lower(*operands).compile().memory_analysis().temp_size_in_bytes)


@pytest.mark.quick
def test_chunks_bound_the_compiled_memory() -> None:
    """The compiler's own count: the whole intermediate without a limit, about the limit with one."""
    operands = draw(CHAIN_SHAPES)
    limit = WHOLE // 10
    assert temporary(chain(None), operands) >= WHOLE
    # Beside the intermediate: the chunk of the output, and slices of the operands of 700*8 numbers each.
    assert temporary(chain(limit), operands) <= limit + 4 * 4 * 700 * 8

    def gradient(limit: int | None) -> Any:
        return jax.grad(lambda *x: jnp.sum(jnp.sin(chain(limit)(*x))), (0, 1, 2))

    # The backward pass may hold the intermediate's cotangent as well, and sums up each operand's gradient.
    assert temporary(gradient(None), operands) >= WHOLE
    assert temporary(gradient(limit), operands) <= 2 * limit + 12 * 4 * 700 * 8


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_chunk_runs_along_any_axis_of_the_output(axis: int) -> None:
    """The longest output index is cut, wherever it stands; lengths that chunks do not divide."""
    order = ["ba", "ab", "ab"][axis]
    output = {0: "xba", 1: "bxa", 2: "bax"}[axis] if order else ""
    equation = f"xk,kab,a->{output}"
    operands = draw([(101, 3), (3, 4, 5), (4,)])
    report = path_report(equation, *operands, memory_efficient=True, memory_limit_bytes=600)
    assert report.chunked_index == "x"
    assert report.chunks > 3
    got = contract(equation, *operands, memory_efficient=True, memory_limit_bytes=600)
    close(got, exact(equation, operands), 2)


def test_chunks_under_vmap_and_shard_map() -> None:
    a, b, c = draw([(3, 40, 4), (3, 30, 4), (3, 30, 4)])
    fn = lambda *x: contract(CHAIN, *x, optimize=False, memory_efficient=True, memory_limit_bytes=500)  # noqa: E731
    want = exact("xid,xjd,xje->xie", [a, b, c])
    close(jax.vmap(fn)(a, b, c), want, 2)
    mesh = Mesh(np.asarray(jax.devices()[:4]), ("data",))
    split = jax.shard_map(fn, mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=P("data"))
    close(jax.jit(split)(a[0], b[0], c[0]), want[0], 2)


def test_what_does_not_depend_on_the_index_is_computed_once() -> None:
    operands = draw([(64, 4), (4, 6), (6, 4), (4, 5)])
    equation = "ia,ab,bc,cd->id"
    fn = lambda *x: contract(equation, *x, memory_efficient=True, memory_limit_bytes=200)  # noqa: E731
    (program,) = (e for e in jax.make_jaxpr(fn)(*operands).eqns)
    inner = program.params["jaxpr"].eqns
    names = [e.primitive.name for e in inner]
    # (ab,bc) and then cd come before the loop, one product is left inside.
    assert names.count("dot_general") == 2
    assert names.index("scan") > max(i for i, n in enumerate(names) if n == "dot_general")
    close(fn(*operands), exact(equation, operands), 3)


def test_a_limit_that_no_chunking_meets_says_the_least_that_would() -> None:
    operands = [jnp.ones((50, 50))] * 3
    with pytest.raises(ValueError, match=r"fits 100 bytes.*memory_limit_bytes=10000 or more"):
        contract("ij,jk,ki->", *operands, memory_efficient=True, memory_limit_bytes=100)
    with pytest.raises(ValueError, match="memory_limit_bytes=200 or more"):
        contract("ij,jk,kl->il", *operands, memory_efficient=True, memory_limit_bytes=100)
    contract("ij,jk,kl->il", *operands, memory_efficient=True, memory_limit_bytes=200)


@pytest.mark.parametrize(
    ("equation", "shapes", "options", "said"),
    [
        ("ij,jk->ik", [(2, 3), (4, 5)], {}, "one size.*'j'.*3 and 4"),
        ("ijk,jk->ik", [(2, 3), (3, 5)], {}, "one index for each axis.*'ijk' for operand 0"),
        ("ij,jk->ik", [(2, 3), (3, 5)], {"optimize": "best"}, "Unknown optimize 'best'.*'greedy'"),
        ("ij,jk->ik", [(2, 3), (3, 5)], {"precision": "half"}, "Unknown precision 'half'.*'mixed'"),
        ("ij,jk->ik", [(2, 3), (3, 5)], {"memory_limit_bytes": 5}, "memory_efficient=True too"),
        (
            "ij,jk->ik",
            [(2, 3), (3, 5)],
            {"memory_efficient": True, "memory_limit_bytes": 0},
            "positive number",
        ),
        ("ij,jk->iq", [(2, 3), (3, 5)], {}, "q"),
        ("ij", [], {}, "one operand or more"),
    ],
)
def test_a_mistake_is_named(equation: str, shapes: Shapes, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        contract(equation, *draw(shapes), **options)


@pytest.mark.quick
def test_the_report_is_what_runs() -> None:
    shapes = [jax.ShapeDtypeStruct(s, "float32") for s in CHAIN_SHAPES]
    report = path_report(CHAIN, *shapes, optimize=False, memory_efficient=True, memory_limit_bytes=WHOLE // 4)
    assert report.flops == 2 * 700 * 500 * 8 * 2
    assert report.chunks == 4
    assert report.chunked_index == "i"
    assert report.largest_intermediate_bytes == WHOLE // 4
    assert report.output_bytes == 4 * 700 * 8
    text = str(report)
    assert "2 steps" in text
    assert "id,jd->ij by gemm" in text
    assert "4 chunks along 'i'" in text
    plain = path_report("ij,ij->i", *[jax.ShapeDtypeStruct((3, 4), "float32")] * 2)
    assert "by einsum" in str(plain)
    assert "limit" not in str(plain)


def test_the_default_limit_is_a_quarter_of_the_device() -> None:
    x = jax.ShapeDtypeStruct((4, 4), "float32")
    report = path_report("ij,jk->ik", x, x, memory_efficient=True)
    assert report.chunks == 1
    from capibara.hardware import chip, host_memory_bytes

    assert report.memory_limit_bytes == host_memory_bytes() // 4
    with target("tpu", "TPU v4"):
        on_tpu = path_report("ij,jk->ik", x, x, memory_efficient=True)
    assert on_tpu.memory_limit_bytes == chip("tpu_v4").capacity_bytes // 4
