"""What every op and implementation must pass. Registering an op is all it takes to be tested here.

Values against the reference in float64, gradients, vmap, shard_map and automatic partitioning over 8 and 32 virtual
devices, the same bits twice, hostile shapes; for TPU kernels, emulation with race detection and lowering for tpu;
for GPU kernels, lowering for cuda.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from capibara.compile import lower_for
from capibara.kernels import interpret, target
from capibara.kernels.core.dispatch import run
from capibara.kernels.core.op import Op, registry
from capibara.kernels.core.spec import Case
from capibara.kernels.lab.check import Expected, check_output, cotangents, expected, with_gradient

OPS = registry()


@functools.cache
def _refusal(op: Op, name: str, case_name: str, on: str) -> str | None:
    """Why an implementation does not take a case: on this machine, by emulation if need be ("here"), or on a chip."""
    case = op.case(case_name)
    emulation = "hlo" if op.mesh_axes is None else "machine"  # which alone sends from device to device
    with interpret(emulation) if on == "here" else target(on):
        return op.implementations[name].refusal(op.call(*case.args(), **case.params))


def _runs_here(op: Op, name: str, case: Case) -> bool:
    """Whether this machine can run it, if only by emulation."""
    if op.implementations[name].platforms == ("gpu",) and jax.default_backend() != "gpu":
        return False
    return _refusal(op, name, case.name, "here") is None


def _lowers_for(platform: str) -> Callable[[Op, str, Case], bool]:
    """Kernels of this platform alone, and what they take on its chip."""

    def lowers(op: Op, name: str, case: Case) -> bool:
        impl = op.implementations[name]
        return impl.kernel and impl.platforms == (platform,) and _refusal(op, name, case.name, platform) is None

    return lowers


MOST_NUMBERS = 1 << 20  # operands whose float64 reference takes no time, and many tests at once no memory


def _is_read(op: Op, name: str, case: Case, tags: set[str]) -> bool:
    """A Hopper kernel takes few of the hostile cases: what is small of those that it is lowered for is tested too."""
    small = "gpu" in case.tags and sum(math.prod(shape) for shape in case.shapes if shape is not None) <= MOST_NUMBERS
    return bool(case.tags & tags) or ("test" in tags and op.implementations[name].platforms == ("gpu",) and small)


def _pairs(
    *tags: str, reference: bool = True, runs: Callable[[Op, str, Case], bool] = _runs_here, mesh_rule: bool = False
) -> list[Any]:
    """(op, implementation, case) for the cases with one of these tags, one pytest parameter each.

    What this machine lacks the chip for, and what an implementation refuses, is not made: that each takes something is
    a test of its own, below. The reference is plain JAX: without `reference`, how JAX itself transforms it is left out.
    With `mesh_rule` an op must have one, and its meshes are of virtual CPU devices. Ops that run over mesh axes do
    nothing alone on one device: tests/kernels/ops/collective is their suite.
    """
    made = []
    for op in OPS.values():
        if op.mesh_axes is not None or (mesh_rule and op.partition is None):
            continue
        for name, impl in op.implementations.items():
            if (not reference and impl.fn is op.reference) or (mesh_rule and impl.platforms == ("gpu",)):
                continue
            for case in op.cases:
                if _is_read(op, name, case, set(tags)) and runs(op, name, case):
                    made.append(pytest.param(op, name, case, id=f"{op.name}-{name}-{case.name}"))
    return made


def _marked(pairs: list[Any], mark: pytest.MarkDecorator, chosen: Callable[[Op, str, Case], bool]) -> list[Any]:
    """The pairs, with the mark on those that are chosen."""
    return [
        pytest.param(*pair.values, id=pair.id, marks=(*pair.marks, mark)) if chosen(*pair.values) else pair
        for pair in pairs
    ]


def _few_of_each(pairs: list[Any], most: int) -> list[Any]:
    """The pairs, slow but for so many cases of an implementation, spread over them, and for the quick ones: to lower a
    kernel takes long, and most of its shapes go the same way."""
    together: dict[tuple[str, str], list[Any]] = {}
    for pair in pairs:
        together.setdefault((pair.values[0].name, pair.values[1]), []).append(pair)
    made = []
    for cases in together.values():
        kept = {len(cases) - 1 - number * len(cases) // most for number in range(min(most, len(cases)))}
        for place, pair in enumerate(cases):
            marks = pair.marks if place in kept or pair.marks else (pytest.mark.slow,)
            made.append(pytest.param(*pair.values, id=pair.id, marks=marks))
    return made


def _speaks_for_its_op(op: Op, name: str, case: Case) -> bool:
    """Whether it is the implementation that shows a rule of the op's own in the quick run.

    The TPU kernel where there is one, for its emulation is what JAX changes most; else the first plain one.
    """
    plain = (n for n, impl in op.implementations.items() if len(impl.platforms) > 1 and impl.fn is not op.reference)
    return name == ("pallas_tpu" if "pallas_tpu" in op.implementations else next(plain, None))


def _speaks_for_its_family(op: Op, name: str, case: Case) -> bool:
    """The same of the first op of a family: how JAX maps over what is given to it is alike for all."""
    return _speaks_for_its_op(op, name, case) and any(family[0] is op for family in _families())


def _first(ops: Iterable[Op], *, kernel: bool) -> tuple[str, str] | None:
    """The first op with a mesh rule and its implementation that runs here, by our rule (`kernel`) or by XLA's own."""
    found = (
        (op.name, name)
        for op in ops
        if op.partition is not None and any("shard" in case.tags for case in op.cases)
        for name, impl in op.implementations.items()
        if impl.kernel == kernel and impl.fn is not op.reference and impl.platforms != ("gpu",)
    )
    return next(found, None)


def _families() -> list[list[Op]]:
    made: dict[str, list[Op]] = {}
    for op in OPS.values():
        made.setdefault(".".join(op.reference.__module__.split(".")[:3]), []).append(op)
    return list(made.values())


def _first_of_its_family(op: Op, name: str, case: Case) -> bool:
    """Whether it shows in the quick run that jax's partitioner still asks for a mesh rule as we give it."""
    return (op.name, name) in {_first(family, kernel=True) for family in _families()}


def _over_devices(quick: Callable[[Op, str, Case], bool], *, every_op_on_32: bool) -> list[Any]:
    """(op, implementation, case, devices): every implementation on 8 devices.

    A mesh rule is the op's own, and its implementations see no more of it than a smaller shape. That the number of
    devices does not matter is shown on 32 by one kernel and one plain implementation a family, with `every_op_on_32`
    by one kernel an op; by the others with --slow.
    """
    groups = [*_families(), *([op] for op in OPS.values() if every_op_on_32)]
    on_32 = {_first(group, kernel=True) for group in groups} | {_first(group, kernel=False) for group in _families()}
    made = []
    for pair in _marked(_pairs("shard", reference=False, mesh_rule=True), pytest.mark.quick, quick):
        op, name, _ = pair.values
        made.append(pytest.param(*pair.values, 8, id=f"{pair.id}-8", marks=pair.marks))
        marks = [mark for mark in pair.marks if mark.name != "quick"]
        if (op.name, name) not in on_32:
            marks.append(pytest.mark.slow)
        made.append(pytest.param(*pair.values, 32, id=f"{pair.id}-32", marks=marks))
    return made


def _richness(case: Case) -> tuple[int, int]:
    return sum(x is not None and 0 not in x for x in case.shapes), len(case.params)


def _elements(case: Case) -> int:
    return sum(x.size for x in case.args() if x is not None)


def _richest(tag: str, on: str) -> Callable[[Op, str, Case], bool]:
    """Chooses a case an implementation: of those it takes the one with most operands and parameters, the smallest."""
    chosen: dict[tuple[str, str], str | None] = {}

    def is_chosen(op: Op, name: str, case: Case) -> bool:
        if (op.name, name) not in chosen:
            cases = [c for c in op.cases if tag in c.tags]
            cases.sort(key=lambda c: ([-n for n in _richness(c)], _elements(c)))
            chosen[op.name, name] = next((c.name for c in cases if _refusal(op, name, c.name, on) is None), None)
        return case.name == chosen[op.name, name]

    return is_chosen


def _plain_op(op: Op, name: str, case: Case) -> bool:
    """Whether it speaks for an op without a TPU kernel; those with one show values in other quick tests."""
    return "pallas_tpu" not in op.implementations and _speaks_for_its_op(op, name, case)


def _emulated_quickly() -> Callable[[Op, str, Case], bool]:
    """Chooses a case a TPU kernel: the machine's emulation, with its races, is what JAX changes most."""
    richest = _richest("test", "here")
    return lambda op, name, case: name == "pallas_tpu" and richest(op, name, case)


@functools.lru_cache(maxsize=512)
def _right(op: Op, case_name: str, grad: bool = False) -> Expected:
    """What is right for a case: worked out once for all implementations and tests.

    It is asked for outside of `interpret`, which is part of what JAX compiles a program for.
    """
    case = op.case(case_name)
    return expected(op, case.arrays(), case.params, grad=grad)


def _emulation(op: Op, name: str) -> contextlib.AbstractContextManager[Any]:
    """The machine's emulation for a TPU kernel. To others it makes no difference, and would be compiled for anew."""
    tpu = op.implementations[name].platforms == ("tpu",)
    return interpret(detect_races=True) if tpu else interpret("hlo")


def _configs(op: Op, name: str, case: Case) -> list[Any]:
    """The default and the candidate predicted worst, which for a tiled kernel is the one with the most steps."""
    impl = op.implementations[name]
    call = op.call(*case.args(), **case.params)
    if impl.config_type is None:
        return [None]
    return list(dict.fromkeys([impl.default_config(call), impl.candidates(call)[-1]]))


@pytest.mark.parametrize(("op", "name", "case"), _marked(_pairs("test"), pytest.mark.quick, _emulated_quickly()))
def test_values_against_float64(op: Op, name: str, case: Case) -> None:
    """Also the same bits twice, unless it says that it sums in no fixed order; of TPU kernels that is a test below."""
    arrays = case.arrays()
    wanted = _right(op, case.name)
    impl = op.implementations[name]
    tpu = impl.platforms == ("tpu",)
    for number, config in enumerate(_configs(op, name, case)):
        with _emulation(op, name) as emulated:
            made = op(*arrays, implementation=name, config=config, **case.params)
            again = op(*arrays, implementation=name, config=config, **case.params) if not (tpu or number) else made
        result = check_output(made, wanted)
        assert result.ok, f"{config}: {result.why}"
        if impl.same_bits:
            _assert_same_bits(made, again)
        if tpu:
            assert not emulated.races_found(), f"{config}: unsynchronised accesses"


def _assert_same_bits(first: Any, second: Any) -> None:
    for one, other in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.mark.parametrize(
    ("op", "name", "case"),
    _marked(_pairs("shard"), pytest.mark.quick, _plain_op),
)
def test_values_on_the_shardable_cases(op: Op, name: str, case: Case) -> None:
    """The shapes that the tests below split, by the quick emulation. Races are looked for above: those cases are small
    enough to emulate the machine for, and run the config of most steps too.
    """
    with interpret("hlo"):
        made = op(*case.arrays(), implementation=name, **case.params)
    result = check_output(made, _right(op, case.name))
    assert result.ok, result.why


ROUNDING = ("round_fp8", "gated_fp8", "gated_fp8_grad")
"""Ops whose results are fp8 numbers: nothing flows back through them, and no float64 result stands beside them."""


def _differentiated() -> list[Any]:
    """(op, implementation, case) whose gradients say something that no other of them does.

    Of the implementations that JAX does not differentiate itself the first is in every case, the others in two, which
    have the most operands and parameters: what they add is what the passes run on, and that is tested by value. Where
    an op brings no gradient, the reference's is put around any of them in one way, and one case shows it.
    """
    made: dict[tuple[str, str], list[Any]] = {}
    for pair in _pairs("test", reference=False):
        op, name, _ = pair.values
        if op.name not in ROUNDING:
            made.setdefault((op.name, name), []).append(pair)
    differentiated: set[str] = set()
    for (op_name, name), pairs in made.items():
        op = OPS[op_name]
        impl = op.implementations[name]
        if impl.platforms == ("gpu",) or not (impl.kernel or impl.own_gradient):
            continue
        if op.gradient is None or op_name in differentiated:
            pairs.sort(key=lambda pair: _richness(pair.values[2]), reverse=True)
            del pairs[2 if op.gradient else 1 :]
        differentiated.add(op_name)
    return [pair for pairs in made.values() for pair in pairs]


@pytest.mark.parametrize(("op", "name", "case"), _differentiated())
def test_gradients_against_float64(op: Op, name: str, case: Case) -> None:
    arrays = case.arrays()
    wanted = _right(op, case.name, grad=True)
    flows = cotangents(op, arrays, case.params)
    with interpret("hlo"):
        got = jax.jit(with_gradient(functools.partial(op, implementation=name, **case.params)))(flows, *arrays)
    result = check_output(got, wanted)
    assert result.ok, result.why


def _tpu_kernels() -> list[Any]:
    """The first case of each: emulated it is one XLA program, and that shows as much as the others."""
    made: dict[tuple[str, str], Any] = {}
    for pair in _pairs("test", reference=False):
        op, name, _ = pair.values
        if op.implementations[name].same_bits and op.implementations[name].platforms == ("tpu",):
            made.setdefault((op.name, name), pair)
    return list(made.values())


@pytest.mark.parametrize(("op", "name", "case"), _tpu_kernels())
def test_a_tpu_kernel_gives_the_same_bits_twice(op: Op, name: str, case: Case) -> None:
    arrays = case.arrays()
    with interpret("hlo"):
        _assert_same_bits(*(op(*arrays, implementation=name, **case.params) for _ in range(2)))


@pytest.mark.parametrize(
    ("op", "name", "case"), _marked(_pairs("shard", reference=False), pytest.mark.quick, _speaks_for_its_family)
)
def test_vmap_of_each_operand(op: Op, name: str, case: Case) -> None:
    """Mapping over any one operand, or over all, equals calling element by element."""
    stacks = [case.arrays(seed) for seed in range(2)]
    present = [i for i, x in enumerate(case.shapes) if x is not None]
    # The rule is the op's own: an emulated kernel, slow as it is, shows that it is used by one operand and by all.
    alone = present[:1] if name == "pallas_tpu" else present
    fn = functools.partial(op, implementation=name, **case.params)
    done: list[list[int]] = []
    for mapped in [*([i] for i in alone), present]:
        chosen = [tuple(stack[i] if i in mapped else x for i, x in enumerate(stacks[0])) for stack in stacks]
        if case.complete is not None:  # what follows from the mapped operands is mapped with them
            made = [case.complete(one) for one in chosen]
            changed = [i for i, (x, y) in enumerate(zip(chosen[0], made[0], strict=True)) if x is not y]
            chosen, mapped = made, sorted({*mapped, *changed})
        if mapped in done:
            continue
        done.append(mapped)
        axes = tuple(0 if i in mapped else None for i in range(len(case.shapes)))
        stacked = tuple(
            x if axes[i] is None else jnp.stack([one[i] for one in chosen]) for i, x in enumerate(chosen[0])
        )
        with interpret("hlo"):
            got = jax.tree.map(np.asarray, jax.jit(jax.vmap(fn, in_axes=axes))(*stacked))
        for element, one in enumerate(chosen):
            mine = jax.tree.map(lambda x, e=element: x[e], got)
            result = check_output(mine, expected(op, one, case.params))
            assert result.ok, f"mapped over {mapped}: {result.why}"


def _factor_specs(op: Op, case: Case, chosen: dict[str, str]) -> tuple[list[Any], list[P]]:
    """PartitionSpecs of the operands and the outputs that put the mesh axes `chosen` on the op's factors."""
    assert op.partition is not None

    def specs(terms: Any) -> list[P]:
        # An axis made of several factors is split along the first of them.
        return [P(*(chosen.get(axis[0]) if axis else None for axis in term)) for term in terms]

    left, right = op.partition.factors(op.call(*case.args(), **case.params))
    given = iter(specs(left))
    return [None if x is None else next(given) for x in case.shapes], specs(right)


def _out_specs(op: Op, case: Case, specs: list[P]) -> Any:
    """The outputs' specs in the shape of what the op returns."""
    shapes = jax.eval_shape(functools.partial(op.reference, **case.params), *case.args())
    return jax.tree.unflatten(jax.tree.structure(shapes), specs)


def _mesh(devices: int) -> jax.sharding.Mesh:
    shape = {8: (4, 2), 32: (8, 4)}[devices]
    return jax.make_mesh(
        shape, ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices("cpu")[:devices]
    )


def _layouts(op: Op, case: Case) -> list[dict[str, str]]:
    """Every two factors of the op that may be split, over the two mesh axes; each factor has its turn on either."""
    assert op.partition is not None
    call = op.call(*case.args(), **case.params)
    whole = op.partition.replicated(call)
    named = {f for side in op.partition.factors(call) for term in side for axis in term for f in axis}
    pairs = list(itertools.combinations(sorted(named - set(whole)), 2))
    turned = [(g, f) if number % 2 else (f, g) for number, (f, g) in enumerate(pairs)]
    # With a single pair both ways round: each factor over either axis.
    return [{f: "data", g: "model"} for f, g in (turned if len(pairs) > 1 else [*pairs, *(p[::-1] for p in pairs)])]


@pytest.mark.parametrize(
    ("op", "name", "case", "devices"), _over_devices(quick=_first_of_its_family, every_op_on_32=True)
)
def test_sharded_operands_need_no_shard_map(op: Op, name: str, case: Case, devices: int) -> None:
    """Under jit on a mesh, whatever the layout, contraction included; and the output stays sharded."""
    assert op.partition is not None
    arrays = case.arrays()
    wanted = _right(op, case.name)
    mesh = _mesh(devices)
    # Every layout on 8 devices; that the number of devices does not matter shows on two of them.
    layouts = _layouts(op, case) if devices == 8 else _layouts(op, case)[:2]
    with interpret("hlo"):
        for layout in layouts:
            specs, out_specs = _factor_specs(op, case, layout)
            placed = [
                None if x is None else jax.device_put(x, NamedSharding(mesh, s))
                for x, s in zip(arrays, specs, strict=True)
            ]
            program = jax.jit(functools.partial(op, implementation=name, **case.params)).lower(*placed).compile()
            got = program(*placed)
            result = check_output(got, wanted)
            assert result.ok, f"{layout}: {result.why}"
            for leaf, spec in zip(jax.tree.leaves(got), out_specs, strict=True):
                split = NamedSharding(mesh, spec)
                assert leaf.sharding.is_equivalent_to(split, leaf.ndim), (layout, leaf.sharding)
            if op.implementations[name].kernel and not set(layout) & set(op.partition.reduced):
                # Only what the outputs keep is split: nothing is gathered.
                assert "all-gather" not in program.as_text(), layout


def _free(op: Op, case: Case) -> list[str]:
    """Factors that every result keeps: where they are split, a device's part is that of the whole. What is the largest
    of all numbers, say, keeps none."""
    assert op.partition is not None
    _, results = op.partition.factors(op.call(*case.args(), **case.params))
    kept = [{f for axis in result for f in axis} for result in results]
    return [f for f in _layouts(op, case)[0] if all(f in factors for factors in kept)]


@pytest.mark.parametrize(
    ("op", "name", "case", "devices"),
    [
        pair
        for pair in _over_devices(quick=lambda *_: False, every_op_on_32=False)
        if _free(pair.values[0], pair.values[2])
    ],
)
def test_inside_shard_map(op: Op, name: str, case: Case, devices: int) -> None:
    """Values and gradients inside shard_map, the operands split along a factor that is not summed away."""
    arrays = case.arrays()
    mesh = _mesh(devices)
    specs, out_specs = _factor_specs(op, case, {_free(op, case)[0]: "data"})
    wanted = _right(op, case.name)

    def local(*shards: Any) -> Any:
        return run(op, shards, dict(case.params), implementation=name)

    with interpret("hlo"):
        # The HLO emulation of a kernel does not carry the types that check_vma checks; they are checked by
        # lowering, below.
        mapped = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=tuple(specs),
            out_specs=_out_specs(op, case, out_specs),
            check_vma=not op.implementations[name].kernel,
        )
        result = check_output(jax.jit(mapped)(*arrays), wanted)
    assert result.ok, result.why


@pytest.mark.quick(cases="all")
@pytest.mark.parametrize(
    ("op", "name", "case"),
    [pair for pair in _pairs("shard", runs=_lowers_for("tpu"), mesh_rule=True) if pair.values[0].gradient is not None],
)
def test_shard_map_with_a_gradient_lowers_for_tpu(op: Op, name: str, case: Case) -> None:
    """Inside a checked shard_map, a replicated operand's gradient is summed over the mesh: it lowers for tpu."""
    assert op.partition is not None
    mesh = _mesh(8)
    free = [f for f in _layouts(op, case)[0] if f not in op.partition.reduced]
    specs, out_specs = _factor_specs(op, case, {free[0]: "data"})
    arrays = case.arrays()
    inputs = tuple(i for i, x in enumerate(arrays) if x is not None and jnp.issubdtype(x.dtype, jnp.inexact))

    def loss(*full: Any) -> Any:
        mapped = jax.shard_map(
            functools.partial(op, implementation=name, **case.params),
            mesh=mesh, in_specs=tuple(specs), out_specs=_out_specs(op, case, out_specs),
        )  # fmt: skip
        return sum(x.astype(jnp.float32).sum() for x in jax.tree.leaves(mapped(*full)))

    with target("tpu", "TPU v4"):
        # With the value, so that the kernel is there also where the backward pass is XLA's.
        exported = jax.export.export(jax.jit(jax.value_and_grad(loss, argnums=inputs)), platforms=["tpu"])(*arrays)
    text = exported.mlir_module()
    assert "tpu_custom_call" in text
    replicated = any(specs[i] is not None and "data" not in specs[i] for i in inputs)
    assert ("all_reduce" in text) == replicated, "a replicated operand's gradient is summed over the devices"


def _lowered(op: Op, name: str, case: Case, platform: str) -> None:
    args = case.args()
    with target({"tpu": "tpu", "cuda": "gpu"}[platform]):

        def call(*present: Any) -> Any:
            given = iter(present)
            return op(*(None if x is None else next(given) for x in args), implementation=name, **case.params)

        result = lower_for(call, [x for x in args if x is not None], platform)
    assert result.ok, result.error
    assert result.custom_calls, "the kernel is not in the lowered program"


@pytest.mark.parametrize(
    ("op", "name", "case"),
    _few_of_each(_marked(_pairs("tpu", runs=_lowers_for("tpu")), pytest.mark.quick, _richest("tpu", "tpu")), 3),
)
def test_tpu_kernels_lower_for_tpu(op: Op, name: str, case: Case) -> None:
    _lowered(op, name, case, "tpu")


@pytest.mark.parametrize(
    ("op", "name", "case"),
    _few_of_each(_marked(_pairs("gpu", runs=_lowers_for("gpu")), pytest.mark.quick, _richest("gpu", "gpu")), 3),
)
def test_gpu_kernels_lower_for_cuda(op: Op, name: str, case: Case) -> None:
    _lowered(op, name, case, "cuda")


@pytest.mark.gpu
def test_gpu_kernels_run_here() -> None:
    """Without a GPU this stands for all of their cases that would run: they are lowered only."""
    assert any(op.implementations[name].platforms == ("gpu",) for op, name, _ in (p.values for p in _pairs("test")))


def _chips(op: Op, name: str) -> dict[str, tuple[str, ...]]:
    """Where an implementation runs, and the tags of the cases that are read for it there."""
    platforms = op.implementations[name].platforms
    read = {"here": ("test", "shard")} if platforms != ("gpu",) else {}
    return read | {chip: (chip, "bench", "tune") for chip in platforms if chip != "cpu"}


@pytest.mark.quick(cases="all")
@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_every_implementation_takes_a_case_of_each_of_its_tags(op: Op) -> None:
    """One that refuses everything would leave the rest of this suite green."""
    for name, impl in op.implementations.items():
        for on, tags in _chips(op, name).items():
            for tag in tags:
                cases = [case for case in op.cases if tag in case.tags]
                refused = {case.name: _refusal(op, name, case.name, on) for case in cases}
                assert not cases or None in refused.values(), f"{name} takes no {tag!r} case on {on}: {refused}"
        if len(impl.platforms) == 1:
            (chip,) = impl.platforms
            assert any(chip in case.tags for case in op.cases), f"{name}: no case is tagged {chip!r}"
        if impl.platforms == ("gpu",):
            small = [case.name for case in op.cases if _is_read(op, name, case, {"test"})]
            refused = {case: _refusal(op, name, case, "gpu") for case in small}
            assert None in refused.values(), f"{name}: no case that is quick to check: {refused}"


# Operands that are written where they lie, and of which a call touches a few rows.
IN_PLACE = {"paged_write": ("key_pages", "value_pages")}


@pytest.mark.parametrize("op", OPS.values(), ids=str)
def test_cost_counts_at_least_the_operands(op: Op) -> None:
    for case in op.cases:
        call = op.call(*case.args(), **case.params)
        cost = op.cost(call)
        operands = zip(op.operands, call.args, strict=True)
        read = [x for name, x in operands if x is not None and name not in IN_PLACE.get(op.name, ())]
        touched = sum(x.size * x.dtype.itemsize for x in read)
        assert cost.flops > 0 or cost.link_bytes > 0
        assert cost.bytes >= touched


@pytest.mark.parametrize("op", OPS.values(), ids=str)
def test_case_names_are_distinct(op: Op) -> None:
    names = [case.name for case in op.cases]
    assert len(names) == len(set(names))
