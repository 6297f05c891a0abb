"""Sequence-parallel attention on virtual CPU devices: equal to the op on the whole sequence, and what it sends."""

from __future__ import annotations

import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from capibara.kernels import explain, interpret, sequence_parallel_attention, target, trust, unzigzag, zigzag
from capibara.kernels.core.spec import unit_roundoff
from capibara.kernels.ops.attention import ATTENTION


class Case(NamedTuple):
    """A call: `mesh` is (data, seq, model) sizes; `heads` is (query heads, key heads)."""

    method: str
    mesh: tuple[int, int, int] = (1, 4, 1)
    heads: tuple[int, int] = (2, 2)
    local: int = 8  # length of one device
    order: str = "contiguous"
    layout: str = "bhtd"
    segments: bool = False
    dtype: str = "float32"
    rules: dict[str, Any] = {}  # noqa: RUF012 (read only)


CASES = {
    "ring-full": Case("ring", (2, 4, 1), (4, 2), order="zigzag", segments=True),
    "ring-causal-balanced": Case("ring", (2, 4, 1), (4, 2), rules={"causal": True, "scale": 0.5}),
    "ring-causal-zigzag": Case("ring", order="zigzag", layout="bthd", rules={"causal": True, "softcap": 2.0}),
    "ring-causal-odd": Case("ring", local=5, layout="bthd", segments=True, rules={"causal": True}),
    "ring-causal-8-loops": Case("ring", (1, 8, 1), local=4, rules={"causal": True}),
    "ring-window-looks-back": Case("ring", heads=(2, 1), segments=True, rules={"causal": True, "window": 11}),
    "ring-window-zigzag": Case("ring", order="zigzag", rules={"window": (3, 9)}),
    "ring-heads-split": Case("ring", (1, 2, 4), (8, 2), rules={"causal": True, "balance": False}),
    "ring-bfloat16": Case("ring", (4, 2, 1), (4, 1), dtype="bfloat16", rules={"causal": True}),
    "heads-zigzag": Case("all_to_all", heads=(4, 1), order="zigzag", layout="bthd", segments=True,
                         rules={"causal": True, "softcap": 2.0}),
    "heads-window-8": Case("all_to_all", (1, 8, 1), (8, 2), local=4, rules={"window": (3, 9), "scale": 0.5}),
    "heads-split-copied": Case("all_to_all", (1, 2, 2), (12, 3), rules={"causal": True, "window": 7}),
    "heads-bfloat16": Case("all_to_all", (2, 4, 1), (4, 4), dtype="bfloat16"),
}  # fmt: skip

# Most of the time here is LLVM's; these programs are small, and only what they compute matters.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def _mesh(data: int, seq: int, model: int = 1, kind: AxisType = AxisType.Auto) -> Mesh:
    devices = jax.devices("cpu")[: data * seq * model]
    return jax.make_mesh((data, seq, model), ("data", "seq", "model"), axis_types=(kind,) * 3, devices=devices)


def _normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _operands(case: Case) -> tuple[list[Any], Any, tuple[Any, Any]]:
    """(q, k, v) heads first, segment ids, cotangents of the output and the log-sum-exp."""
    batch, length = max(2, case.mesh[0]), case.mesh[1] * case.local
    heads, kv_heads = case.heads
    qkv = [_normal(i, batch, h, length, 8) for i, h in enumerate((heads, kv_heads, kv_heads))]
    ids = np.sort(np.random.default_rng(3).integers(0, 3, (batch, length)), axis=1) if case.segments else None
    flow = _normal(4, batch, heads, length, 8), _normal(5, batch, heads, length)
    return [jnp.asarray(x, case.dtype) for x in qkv], ids, flow


def _wanted(case: Case, qkv: list[Any], ids: Any, flow: Any) -> list[np.ndarray]:
    """out, lse, dq, dk, dv by the specification on the whole sequence, in float32."""
    rules = {k: v for k, v in case.rules.items() if k != "balance"}
    if isinstance(rules.get("window"), int):
        rules["window"] = (rules["window"] - 1, 0)

    @quick_jit
    def made(*qkv: Any) -> Any:
        ids32 = None if ids is None else jnp.asarray(ids, jnp.int32)
        whole = functools.partial(ATTENTION, implementation="reference", return_lse=True, **rules)
        out, pull = jax.vjp(lambda q, k, v: whole(q, k, v, None, None, ids32, ids32), *qkv)
        return *out, *pull(flow)

    return [np.asarray(x) for x in made(*(x.astype(jnp.float32) for x in qkv))]


@pytest.mark.spread(6)
@pytest.mark.parametrize("name", CASES)
def test_equal_to_the_whole(name: str) -> None:
    """Output, log-sum-exp and gradients, with the caller's arrays in his order and layout."""
    case = CASES[name]
    qkv, ids, flow = _operands(case)
    devices = case.mesh[1]

    def arrange(x: Any, undo: bool = False) -> Any:
        """Heads first and in order of position -> the caller's layout and order, or back."""
        if x.ndim == 4 and case.layout == "bthd" and undo:
            x = x.swapaxes(1, 2)
        if case.order == "zigzag":
            x = (unzigzag if undo else zigzag)(x, devices, 1 if x.ndim == 2 else 2)
        return x.swapaxes(1, 2) if x.ndim == 4 and case.layout == "bthd" and not undo else x

    @quick_jit
    def made(*qkv: Any) -> Any:
        def parallel(*qkv: Any) -> Any:
            out, lse = sequence_parallel_attention(
                *map(arrange, qkv), mesh=_mesh(*case.mesh), axis_name="seq", batch_axis_name="data",
                head_axis_name="model", method=case.method, order=case.order, layout=case.layout, return_lse=True,
                segment_ids=None if ids is None else arrange(jnp.asarray(ids)), **case.rules,
            )  # fmt: skip
            return arrange(out, undo=True), arrange(lse, undo=True)

        (out, lse), pull = jax.vjp(parallel, *qkv)
        return out, lse, *pull((flow[0].astype(out.dtype), flow[1]))

    # The op's own tolerance; a part's output is rounded to the operands' type before parts are combined, and each of
    # the combinations costs a few roundings in float32. Gradients: four times that, as for the op's own.
    call = ATTENTION.call(*qkv)
    allowed = ATTENTION.tolerance(call) + unit_roundoff(case.dtype) + 8 * devices * unit_roundoff(jnp.float32)
    parts = ("out", "lse", "dq", "dk", "dv")
    for part, got, want in zip(parts, made(*qkv), _wanted(case, qkv, ids, flow), strict=True):
        assert got.dtype == (jnp.float32 if part == "lse" else case.dtype)
        error = np.linalg.norm(np.asarray(got, np.float32) - want) / np.linalg.norm(want)
        assert error <= allowed * (4 if part[0] == "d" else 1), (part, error, allowed)


def _causal(seed: int = 0, heads: int = 4, length: int = 16) -> tuple[list[jax.Array], jax.Array]:
    qkv = [jnp.asarray(_normal(seed + i, 2, heads, length, 8)) for i in range(3)]
    return qkv, ATTENTION(*qkv, implementation="reference", causal=True)


call_causal = functools.partial(sequence_parallel_attention, axis_name="seq", causal=True, layout="bhtd")


@pytest.mark.quick
@pytest.mark.parametrize(("method", "checked"), [("ring", True), ("ring", False), ("all_to_all", True)])
def test_inside_the_callers_shard_map(method: str, checked: bool) -> None:
    qkv, wanted = _causal()
    spec = P("data", None, "seq")
    local = functools.partial(call_causal, method=method)
    mapped = jax.shard_map(local, mesh=_mesh(2, 2), in_specs=spec, out_specs=spec, check_vma=checked)
    flow = _normal(9, *wanted.shape)

    @quick_jit
    def both(*qkv: Any) -> Any:
        plain = functools.partial(ATTENTION, implementation="reference", causal=True)
        return [(out, *pull(flow)) for out, pull in (jax.vjp(fn, *qkv) for fn in (mapped, plain))]

    for got, want in zip(*both(*qkv), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5)


@pytest.mark.quick
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_the_active_mesh_is_used(kind: AxisType) -> None:
    qkv, wanted = _causal()
    mesh = _mesh(2, 4, kind=kind)
    with jax.set_mesh(mesh):
        made = call_causal(*qkv, batch_axis_name="data", method="all_to_all")
    np.testing.assert_allclose(made, wanted, atol=1e-5)
    assert made.sharding.is_equivalent_to(NamedSharding(mesh, P("data", None, "seq")), 4)


def test_a_mesh_with_explicit_axes_may_be_passed() -> None:
    qkv, wanted = _causal()
    made = call_causal(*qkv, mesh=_mesh(2, 4, kind=AxisType.Explicit), batch_axis_name="data", method="all_to_all")
    np.testing.assert_allclose(made, wanted, atol=1e-5)


def test_vmap() -> None:
    qkv, wanted = _causal()
    one = functools.partial(call_causal, mesh=_mesh(1, 2))
    made = quick_jit(jax.vmap(lambda *x: one(*(a[None] for a in x))[0]))(*qkv)
    np.testing.assert_allclose(made, wanted, atol=1e-5)


def test_the_kernel_by_emulation() -> None:
    qkv, wanted = _causal(heads=1)
    with interpret("hlo"):
        made = quick_jit(functools.partial(call_causal, mesh=_mesh(1, 2), implementation="pallas_tpu"))(*qkv)
    np.testing.assert_allclose(made, wanted, atol=1e-5)


@pytest.mark.quick
def test_it_lowers_for_tpu_with_kernels() -> None:
    """Forward and backward, eight devices: the own block, and a loop with two cases and its last turn unrolled."""
    mesh = _mesh(1, 8)
    x = jax.ShapeDtypeStruct((1, 1, 2048, 128), jnp.bfloat16, sharding=NamedSharding(mesh, P(None, None, "seq")))

    def loss(*qkv: Any) -> Any:
        return call_causal(*qkv, mesh=mesh).astype(jnp.float32).sum()

    with target("tpu", "TPU v4"), trust("predicted"):
        text = jax.export.export(jax.jit(jax.grad(loss, (0, 1, 2))), platforms=["tpu"])(x, x, x).mlir_module()
    assert text.count("tpu_custom_call") == 2 * (1 + 2 + 2)


# What is sent, what is kept, what is not computed.


def _placed(heads: int = 2, length: int = 32, devices: int = 4) -> tuple[Mesh, list[jax.Array]]:
    mesh = _mesh(1, devices)
    sharding = NamedSharding(mesh, P(None, None, "seq"))
    shapes = ((1, heads, length, 8), (1, 1, length, 8), (1, 1, length, 8))
    return mesh, [jax.device_put(_normal(i, *shape), sharding) for i, shape in enumerate(shapes)]


def _sent(fn: Any, *arrays: Any) -> dict[str, int]:
    """Bytes that one device sends, by kind of collective, in the compiled program."""
    text = quick_jit(fn).lower(*arrays).compile().as_text()
    found: dict[str, int] = {}
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter|collective-broadcast"
    for shapes, kind in re.findall(rf"= (.*?) ({kinds})(?:-start)?\(", text):
        for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", shapes):
            size = {"f32": 4, "s32": 4, "bf16": 2}[dtype]
            found[kind] = found.get(kind, 0) + size * int(np.prod([int(n) for n in dims.split(",") if n]))
    return found


@pytest.mark.quick
@pytest.mark.parametrize(
    ("rules", "hops", "exchanged"),
    [({}, 3, False), ({"causal": True, "balance": False}, 3, False), ({"causal": True}, 3, True),
     ({"causal": True, "window": 9}, 1, False), ({"window": (1, 1)}, 2, False)],
    ids=["full", "causal", "balanced", "window", "window-both-sides"],
)  # fmt: skip
def test_the_ring_sends_keys_and_values_from_device_to_device(rules: Any, hops: int, exchanged: bool) -> None:
    """Nothing is gathered. A hop is one device's keys and values; those that no device needs are not made."""
    mesh, qkv = _placed()
    q, k = (x.nbytes // 4 for x in qkv[:2])
    ring = functools.partial(sequence_parallel_attention, layout="bhtd", mesh=mesh, axis_name="seq", **rules)
    # Balancing moves every half of q, k and v on the way in, and of the output on the way out.
    assert _sent(ring, *qkv) == {"collective-permute": hops * 2 * k + (2 * q + 2 * k) * exchanged}


def test_the_backward_ring_sends_gradients_along() -> None:
    """Keys and values again; with them their gradients in float32, which go one hop further, home.

    Both rings are in one program: had the compiler kept the first one's blocks for the second, less would be sent.
    """
    mesh, qkv = _placed()
    k = qkv[1].nbytes // 4
    ring = functools.partial(sequence_parallel_attention, layout="bhtd", mesh=mesh, axis_name="seq")

    def both(flow: Any, *qkv: Any) -> Any:
        out, pull = jax.vjp(ring, *qkv)
        return out, pull(flow)

    assert _sent(both, qkv[0], *qkv) == {"collective-permute": 3 * 2 * k + (3 * 2 * k + 4 * 2 * k)}


@pytest.mark.quick(cases=2)
@pytest.mark.parametrize("devices", [4, 8])
@pytest.mark.parametrize("rules", [{}, {"causal": True}, {"causal": True, "balance": False}])
def test_nothing_of_a_step_is_kept_for_the_backward_pass(devices: int, rules: Any) -> None:
    """The residuals are the operands, the output and one number a query, however many steps there were."""
    mesh, qkv = _placed(devices=devices, length=4 * devices)
    ring = functools.partial(sequence_parallel_attention, layout="bhtd", mesh=mesh, axis_name="seq", **rules)
    residuals = jax.eval_shape(lambda *x: jax.vjp(ring, *x)[1], *qkv)
    kept = sum(x.size for x in jax.tree.leaves(residuals) if x.size > devices)  # less a few flags, one a device
    q, k, v = (x.size for x in qkv)
    assert kept == 2 * q + k + v + q // 8


def _inner(equation: Any) -> list[Any]:
    """The programs inside of an equation: of a call, a loop, a conditional's branches."""
    values = [v for p in equation.params.values() for v in (p if isinstance(p, tuple | list) else (p,))]
    return [j for j in (getattr(v, "jaxpr", v) for v in values) if hasattr(j, "eqns")]


def _order_of(jaxpr: Any, names: dict[str, str]) -> str:
    """The primitives of interest in program order, one letter each."""
    found = ""
    for equation in jaxpr.eqns:
        found += names.get(equation.primitive.name, "")
        found += "".join(_order_of(inner, names) for inner in _inner(equation))
    return found


@pytest.mark.quick
def test_the_next_block_is_sent_for_before_the_product() -> None:
    mesh, qkv = _placed()
    ring = functools.partial(sequence_parallel_attention, layout="bhtd", mesh=mesh, axis_name="seq")
    jaxpr = jax.make_jaxpr(lambda flow, *qkv: jax.vjp(ring, *qkv)[1](flow))(qkv[0], *qkv)
    forward = "ssxx" * 3 + "xx"  # two sends, then two products; the last block is sent nowhere
    backward = ("ss" + "xxxxx" + "ss") * 3 + "xxxxx" + "ss"  # keys go before the products, gradients after
    assert _order_of(jaxpr.jaxpr, {"ppermute": "s", "dot_general": "x"}) == forward + backward


def _branches(jaxpr: Any) -> list[list[int]]:
    """For each conditional, how many products each branch has."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "cond":
            found.append(sorted(len(_order_of(b.jaxpr, {"dot_general": "x"})) for b in equation.params["branches"]))
        found += [branch for inner in _inner(equation) for branch in _branches(inner)]
    return found


def test_blocks_ruled_out_are_not_computed() -> None:
    mesh, qkv = _placed()
    for rules, wanted in (({"balance": False}, [[0, 2]] * 3), ({"window": 9}, [[0, 2]]), ({}, [[2, 2]] * 3)):
        ring = functools.partial(call_causal, mesh=mesh, **rules)
        assert _branches(jax.make_jaxpr(ring)(*qkv).jaxpr) == wanted, rules


@pytest.mark.quick
def test_the_implementation_is_dispatched_and_explained() -> None:
    mesh, qkv = _placed()
    found = explain(functools.partial(call_causal, mesh=mesh), *qkv)
    assert [s.implementation for s in found.selections] == ["xla"] * 7
    asked = explain(functools.partial(call_causal, mesh=mesh, method="all_to_all", implementation="reference"),
                    *(jnp.repeat(x, 4, 1) for x in qkv))  # fmt: skip
    assert asked.implementation == "reference"


# Errors say the rule, what arrived and the fix.

X = jnp.ones((2, 4, 16, 8))


@pytest.mark.parametrize(
    ("shape", "keywords", "words"),
    [
        ((2, 4, 18, 8), {}, "split evenly.*a length of 18.*pad to 20"),
        ((2, 4, 12, 8), {"order": "zigzag"}, "two chunks a device.*a length of 12.*pad to 16"),
        ((2, 6, 16, 8), {"method": "all_to_all"}, "6 heads on a device for 4 devices.*multiple of 4"),
        ((3, 4, 16, 8), {"batch_axis_name": "data"}, "a batch of 3.*multiple of 2"),
        ((2, 3, 16, 8), {"head_axis_name": "data"}, "a number of heads of 3.*multiple of 2"),
        ((2, 4, 16), {}, "four axes"),
        ((2, 4, 16, 8), {"method": "rings"}, "Unknown method.*'ring'"),
        ((2, 4, 16, 8), {"order": "zig"}, "Unknown order.*'zigzag'"),
        ((2, 4, 16, 8), {"layout": "tbhd"}, "Unknown layout"),
        ((2, 4, 16, 8), {"axis_name": "sequence"}, "Unknown mesh axis 'sequence'.*'seq'"),
        ((2, 4, 16, 8), {"axis_name": ("seq",)}, "axis_name is one mesh axis"),
        ((2, 4, 16, 8), {"batch_axis_name": "seq"}, "splits one thing"),
        ((2, 4, 16, 8), {"mesh": None}, "no mesh.*jax.set_mesh"),
        ((2, 4, 16, 8), {"mesh": (2, 4)}, "mesh is a jax.sharding.Mesh.*tuple"),
        ((2, 4, 16, 8), {"implementation": "reference"}, "use implementation='xla'"),
        ((2, 4, 16, 8), {"implementation": "fast"}, "Unknown implementation of attention 'fast'"),
        ((2, 4, 16, 8), {"method": "all_to_all", "balance": True}, "balance is for method='ring'"),
        ((2, 4, 16, 8), {"balance": True}, "for causal attention without a window"),
        ((2, 4, 16, 8), {"window": 0}, "1 key or more"),
        ((2, 4, 16, 8), {"segment_ids": np.ones((2, 8), int)}, r"segment_ids is \[batch, length\], here \[2, 16\]"),
        ((2, 4, 16, 8), {"softcap": 0.0}, "soft cap is above 0"),
    ],
)
def test_errors(shape: tuple[int, ...], keywords: dict[str, Any], words: str) -> None:
    x = jnp.ones(shape)
    with pytest.raises(ValueError, match=words):
        sequence_parallel_attention(x, x, x, **{"layout": "bhtd", "mesh": _mesh(2, 4), "axis_name": "seq", **keywords})


def test_other_refusals() -> None:
    mesh = _mesh(2, 4)
    with pytest.raises(ValueError, match="as many queries as keys"):
        call_causal(X, X[:, :, :8], X[:, :, :8], mesh=mesh)
    with interpret("machine"), pytest.raises(ValueError, match=r"interpret\('hlo'\)"):
        call_causal(X, X, X, mesh=mesh)
    with pytest.raises(ValueError, match="differentiated once"):
        jax.eval_shape(jax.grad(lambda q: jax.grad(lambda q: call_causal(q, X, X, mesh=mesh).sum())(q).sum()), X)

    def inside(names: set[str], **keywords: Any) -> Any:
        spec = P("data", None, "seq") if "seq" in names else P("data")
        local = functools.partial(call_causal, **keywords)
        mapped = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, axis_names=names)
        return jax.eval_shape(mapped, X, X, X)

    with pytest.raises(ValueError, match=r"split already\. Got mesh"):
        inside({"data", "seq", "model"}, mesh=mesh)
    with pytest.raises(ValueError, match=r"split already\. Got batch_axis_name"):
        inside({"data", "seq", "model"}, batch_axis_name="data")
    with pytest.raises(ValueError, match="take 'seq' in the surrounding shard_map too"):
        inside({"data"})
