"""What every op and implementation must pass. Registering an op is all it takes to be tested here.

Values against the reference in float64, gradients, vmap, shard_map and automatic partitioning over 8 and 32 virtual
devices, the same bits twice, hostile shapes; for TPU kernels, emulation with race detection and lowering for tpu;
for GPU kernels, lowering for cuda.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from capibara.compile import lower_for
from capibara.kernels import interpret, target
from capibara.kernels.check import check, check_output, expected
from capibara.kernels.dispatch import run
from capibara.kernels.op import Case, Op, registry

OPS = registry()


def _pairs(*tags: str, kernels_only: bool = False, platform: str | None = None) -> list[Any]:
    """(op, implementation, case) for the cases with one of these tags, one pytest parameter each."""
    made = []
    for op in OPS.values():
        for name, impl in op.implementations.items():
            if (kernels_only and not impl.kernel) or (platform and impl.platforms != (platform,)):
                continue
            for case in op.cases:
                if case.tags & set(tags):
                    made.append(pytest.param(op, name, case, id=f"{op.name}-{name}-{case.name}"))
    return made


def _on_this_machine(op: Op, name: str, case: Case) -> None:
    """Skip an implementation that cannot run here even by emulation, saying why."""
    impl = op.implementations[name]
    if impl.platforms == ("gpu",) and jax.default_backend() != "gpu":
        pytest.skip("a GPU kernel: lowered here, run where a GPU is attached")
    with interpret("hlo"):
        reason = impl.refusal(op.call(*case.args(), **case.params))
    if reason is not None:
        pytest.skip(f"it refuses: {reason}")


def _configs(op: Op, name: str, case: Case) -> list[Any]:
    """The default and the candidate predicted worst, which for a tiled kernel is the one with the most steps."""
    impl = op.implementations[name]
    call = op.call(*case.args(), **case.params)
    if impl.config_type is None:
        return [None]
    return [impl.default_config(call), impl.candidates(call)[-1]]


def _races() -> bool:
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    state = interpret_pallas_call.races
    return state is not None and state.races_found


@pytest.mark.parametrize(("op", "name", "case"), _pairs("test"))
def test_values_against_float64(op: Op, name: str, case: Case) -> None:
    _on_this_machine(op, name, case)
    arrays = case.arrays()
    for config in _configs(op, name, case):
        with interpret(detect_races=True):
            result = check(op, arrays, case.params, name, config)
        assert result.ok, f"{config}: {result.why}"
        if op.implementations[name].platforms == ("tpu",):
            assert not _races(), f"{config}: unsynchronised accesses"


@pytest.mark.newest
@pytest.mark.parametrize(("op", "name", "case"), _pairs("shard"))
def test_values_on_the_shardable_cases(op: Op, name: str, case: Case) -> None:
    _on_this_machine(op, name, case)
    with interpret():
        result = check(op, case.arrays(), case.params, name)
    assert result.ok, result.why


@pytest.mark.parametrize(("op", "name", "case"), _pairs("test"))
def test_gradients_against_float64(op: Op, name: str, case: Case) -> None:
    _on_this_machine(op, name, case)
    from capibara.kernels.check import cotangents, with_gradient

    arrays = case.arrays()
    wanted = expected(op, arrays, case.params, grad=True)
    with interpret("hlo"):
        fn = with_gradient(functools.partial(op, implementation=name, **case.params))
        got = jax.jit(fn)(cotangents(op, arrays, case.params), *arrays)
    result = check_output(got, wanted)
    assert result.ok, result.why


@pytest.mark.parametrize(("op", "name", "case"), _pairs("test"))
def test_the_same_bits_twice(op: Op, name: str, case: Case) -> None:
    _on_this_machine(op, name, case)
    arrays = case.arrays()
    with interpret("hlo"):
        first, second = (op(*arrays, implementation=name, **case.params) for _ in range(2))
    np.testing.assert_array_equal(*(np.asarray(x.astype(jnp.float32)) for x in (first, second)))


@pytest.mark.newest
@pytest.mark.parametrize(("op", "name", "case"), _pairs("shard"))
def test_vmap_of_each_operand(op: Op, name: str, case: Case) -> None:
    """Mapping over any one operand, or over all, equals calling element by element."""
    _on_this_machine(op, name, case)
    stacks = [case.arrays(seed) for seed in range(3)]
    present = [i for i, x in enumerate(case.shapes) if x is not None]
    with interpret("hlo"):
        fn = functools.partial(op, implementation=name, **case.params)
        for mapped in [*([i] for i in present), present]:
            axes = tuple(0 if i in mapped else None for i in range(len(case.shapes)))
            stacked = tuple(
                None if x is None else jnp.stack([s[i] for s in stacks]) if i in mapped else x
                for i, x in enumerate(stacks[0])
            )
            got = jax.jit(jax.vmap(fn, in_axes=axes))(*stacked)
            for element in range(3):
                one = tuple(x[element] if axes[i] == 0 else x for i, x in enumerate(stacked))
                result = check_output(got[element], expected(op, one, case.params))
                assert result.ok, f"mapped over {mapped}: {result.why}"


def _factor_specs(op: Op, case: Case, chosen: dict[str, str]) -> tuple[list[Any], P]:
    """PartitionSpecs of the operands and the output that put the mesh axes `chosen` on the op's factors."""
    assert op.partition is not None
    left, right = op.partition.rule(op.call(*case.args(), **case.params)).split("->")
    specs = iter([P(*(chosen.get(f) for f in part.split())) for part in left.split(",")])
    operands = [None if x is None else next(specs) for x in case.shapes]
    return operands, P(*(chosen.get(f) for f in right.split()))


def _mesh(devices: int) -> jax.sharding.Mesh:
    shape = {8: (4, 2), 32: (8, 4)}[devices]
    return jax.make_mesh(
        shape, ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices("cpu")[:devices]
    )


def _layouts(op: Op, case: Case) -> list[dict[str, str]]:
    """Every assignment of the two mesh axes to two different factors of the op."""
    assert op.partition is not None
    rule = op.partition.rule(op.call(*case.args(), **case.params))
    factors = sorted(set(rule.replace("->", " ").replace(",", " ").split()))
    return [{f: "data", g: "model"} for f in factors for g in factors if f != g]


@pytest.mark.newest
@pytest.mark.parametrize("devices", [8, 32])
@pytest.mark.parametrize(("op", "name", "case"), _pairs("shard"))
def test_sharded_operands_need_no_shard_map(op: Op, name: str, case: Case, devices: int) -> None:
    """Under jit on a mesh, whatever the layout, contraction included; and the output stays sharded."""
    if op.partition is None:
        pytest.skip("it has no mesh rule: computed whole on every device")
    if op.implementations[name].platforms == ("gpu",):
        pytest.skip("the mesh is of virtual CPU devices")
    _on_this_machine(op, name, case)
    arrays = case.arrays()
    wanted = expected(op, arrays, case.params)
    mesh = _mesh(devices)
    with interpret("hlo"):
        for layout in _layouts(op, case):
            specs, out_spec = _factor_specs(op, case, layout)
            placed = [
                None if x is None else jax.device_put(x, NamedSharding(mesh, s))
                for x, s in zip(arrays, specs, strict=True)
            ]
            fn = jax.jit(functools.partial(op, implementation=name, **case.params))
            got = fn(*placed)
            result = check_output(got, wanted)
            assert result.ok, f"{layout}: {result.why}"
            assert got.sharding.is_equivalent_to(NamedSharding(mesh, out_spec), got.ndim), (layout, got.sharding)
            if op.implementations[name].kernel and set(layout) <= set("mn"):
                # The rows and columns of the output are split: nothing is gathered.
                assert "all-gather" not in fn.lower(*placed).compile().as_text(), layout


@pytest.mark.parametrize("devices", [8, 32])
@pytest.mark.parametrize(("op", "name", "case"), _pairs("shard"))
def test_inside_shard_map(op: Op, name: str, case: Case, devices: int) -> None:
    """Values and gradients inside shard_map, the operands split along a factor that is not summed away."""
    if op.partition is None:
        pytest.skip("it has no mesh rule to choose a split by")
    if op.implementations[name].platforms == ("gpu",):
        pytest.skip("the mesh is of virtual CPU devices")
    _on_this_machine(op, name, case)
    arrays = case.arrays()
    mesh = _mesh(devices)
    free = [f for f in _layouts(op, case)[0] if f not in op.partition.reduced]
    specs, out_spec = _factor_specs(op, case, {free[0]: "data"})
    wanted = expected(op, arrays, case.params)

    def local(*shards: Any) -> Any:
        return run(op, shards, dict(case.params), implementation=name)

    with interpret("hlo"):
        # The HLO emulation of a kernel does not carry the types that check_vma checks; they are checked by
        # lowering, below.
        mapped = jax.shard_map(
            local, mesh=mesh, in_specs=tuple(specs), out_specs=out_spec, check_vma=not op.implementations[name].kernel
        )
        result = check_output(jax.jit(mapped)(*arrays), wanted)
    assert result.ok, result.why


@pytest.mark.newest
@pytest.mark.parametrize(("op", "name", "case"), _pairs("shard", kernels_only=True, platform="tpu"))
def test_shard_map_with_a_gradient_lowers_for_tpu(op: Op, name: str, case: Case) -> None:
    """Inside a checked shard_map, a replicated operand's gradient is summed over the mesh: it lowers for tpu."""
    if op.partition is None:
        pytest.skip("it has no mesh rule to choose a split by")
    mesh = _mesh(8)
    free = [f for f in _layouts(op, case)[0] if f not in op.partition.reduced]
    specs, out_spec = _factor_specs(op, case, {free[0]: "data"})
    arrays = case.arrays()
    inputs = tuple(i for i, x in enumerate(arrays) if x is not None)

    def loss(*full: Any) -> Any:
        mapped = jax.shard_map(
            functools.partial(op, implementation=name, **case.params),
            mesh=mesh, in_specs=tuple(specs), out_specs=out_spec,
        )  # fmt: skip
        return mapped(*full).astype(jnp.float32).sum()

    with target("tpu", "TPU v4"):
        exported = jax.export.export(jax.jit(jax.grad(loss, argnums=inputs)), platforms=["tpu"])(*arrays)
    text = exported.mlir_module()
    assert "tpu_custom_call" in text
    assert "all_reduce" in text  # the replicated operands' gradients are summed over the devices


def _lowered(op: Op, name: str, case: Case, platform: str) -> None:
    args = case.args()
    with target({"tpu": "tpu", "cuda": "gpu"}[platform]):
        reason = op.implementations[name].refusal(op.call(*args, **case.params))
        if reason is not None:
            pytest.skip(f"it refuses: {reason}")

        def call(*present: Any) -> Any:
            given = iter(present)
            return op(*(None if x is None else next(given) for x in args), implementation=name, **case.params)

        result = lower_for(call, [x for x in args if x is not None], platform)
    assert result.ok, result.error
    assert result.custom_calls, "the kernel is not in the lowered program"


@pytest.mark.newest
@pytest.mark.parametrize(("op", "name", "case"), _pairs("tpu", kernels_only=True, platform="tpu"))
def test_tpu_kernels_lower_for_tpu(op: Op, name: str, case: Case) -> None:
    _lowered(op, name, case, "tpu")


@pytest.mark.newest
@pytest.mark.parametrize(("op", "name", "case"), _pairs("gpu", kernels_only=True, platform="gpu"))
def test_gpu_kernels_lower_for_cuda(op: Op, name: str, case: Case) -> None:
    _lowered(op, name, case, "cuda")


@pytest.mark.parametrize("op", OPS.values(), ids=str)
def test_cost_counts_at_least_the_operands(op: Op) -> None:
    for case in op.cases:
        call = op.call(*case.args(), **case.params)
        cost = op.cost(call)
        touched = sum(x.size * x.dtype.itemsize for x in call.args if x is not None)
        assert cost.flops > 0
        assert cost.bytes >= touched


@pytest.mark.parametrize("op", OPS.values(), ids=str)
def test_case_names_are_distinct(op: Op) -> None:
    names = [case.name for case in op.cases]
    assert len(names) == len(set(names))
