"""The Hopper kernels of the grouped products: their numbers by emulation, their lowering for cuda, their limits."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.kernels.pallas import hopper_emulator as emulator

from capibara.kernels import target
from capibara.kernels.ops.layers.grouped.api import (
    GROUPED_GATED_GEMM,
    GROUPED_GEMM,
    GROUPED_GEMM_WEIGHTS,
    grouped_gated_gemm,
    grouped_gemm,
)
from capibara.kernels.ops.layers.grouped.hopper import (
    GATED_IMPLEMENTATION,
    IMPLEMENTATION,
    WEIGHTS_IMPLEMENTATION,
    forward,
    weights,
)
from capibara.kernels.ops.layers.grouped.hopper.forward import (
    GroupedHopperConfig,
    banded,
    gated_forward,
    grouped_forward,
)
from capibara.kernels.ops.layers.grouped.hopper.weights import grouped_weights
from capibara.kernels.ops.layers.grouped.reference import ACTIVATIONS
from capibara.kernels.pallas.hopper import SMEM_BYTES

BF16 = jnp.dtype("bfloat16")
K, N = 128, 192


def _aligned(value: Any, number: int) -> Any:
    assert int(value) % number == 0
    return value


def _union(*specs: Callable[[], Any]) -> Callable[[], Any]:
    def make() -> tuple[Any, ...]:
        first = specs[0]()
        return (first, *(emulator.Ref(first.array) for _ in specs[1:]))

    return make


def _store_same() -> Callable[..., None]:
    """Copies out, and fails where a number is written twice and not the same: either of two tiles could come last."""
    written: dict[int, np.ndarray] = {}
    writing = threading.Lock()

    def copy(src: Any, dst: Any, commit_group: bool) -> None:
        inside, _ = dst._inside(clip=True)
        with writing:
            before = written.setdefault(id(dst.array), np.zeros(dst.array.shape, bool))
            again, old = before[inside].copy(), dst.array[inside].copy()
            before[inside] = True
            emulator._leave(src, dst, None)  # at once: groups of copies are not counted here
            np.testing.assert_array_equal(dst.array[inside][again], old[again], "a result is written twice")

    return copy


@contextlib.contextmanager
def emulated(monkeypatch: pytest.MonkeyPatch, programs: int) -> Iterator[None]:
    """Inside, the grouped kernels run on the CPU, few enough programs of them that each has several tiles."""
    with emulator.emulated(forward, weights), monkeypatch.context() as patched:
        gpu = emulator._Shim(
            forward.plgpu,
            RefUnion=_union,
            commit_smem_to_gmem_group=emulator._nothing,
            copy_smem_to_gmem=_store_same(),
        )
        names = {
            "plgpu": gpu,
            "pl": emulator._Shim(forward.pl, multiple_of=_aligned),
            "multiprocessors": lambda kind: programs,
        }
        for module, (name, shim) in itertools.product((forward, weights), names.items()):
            patched.setattr(module, name, shim)
        yield


def _finished(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel is called back when its result is due, which must be while it is emulated."""
    return lambda *args, **kwargs: jax.block_until_ready(kernel(*args, **kwargs))


def _normal(seed: int, *shape: int, dtype: Any = BF16) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def _parts(sizes: list[int]) -> list[tuple[int, int, int]]:
    ends = np.cumsum(sizes)
    return [(g, int(end - size), int(end)) for g, (size, end) in enumerate(zip(sizes, ends, strict=True))]


def _close(found: Any, wanted: np.ndarray, length: int) -> None:
    """One rounding of the result, and sqrt(length) roundings of the float32 sums, of the largest number."""
    unit = float(jnp.finfo(found.dtype).eps) / 2
    found, largest = np.asarray(found, np.float64), np.nanmax(np.abs(wanted), initial=0.0)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted))
    bound = unit * np.abs(wanted) + 4 * 2.0**-24 * length**0.5 * largest
    assert np.all((np.abs(found - wanted) <= bound) | np.isnan(wanted))


def _rows_by_weights(lhs: np.ndarray, rhs: np.ndarray, sizes: list[int]) -> np.ndarray:
    out = np.zeros((lhs.shape[0], rhs.shape[2]))
    for g, start, end in _parts(sizes):
        out[start:end] = lhs[start:end].astype(np.float64) @ rhs[g].astype(np.float64)
    return out


SIZES = {
    # The first, last and a middle one empty; 7 rows to the next eight and 60 past the whole steps, more than one step
    # holds; 68 rows of no group.
    "ragged": (331, [0, 65, 0, 131, 64, 3, 0]),
    "one": (257, [257]),
    "huge": (358, [5, 290, 63]),  # 63 rows leave in six runs
    "none": (130, [0, 0]),
    "few": (3, [1, 0, 2]),
}
CONFIGS = [
    GroupedHopperConfig(64, 256, 3, "m", 2),
    GroupedHopperConfig(128, 128, 4, "n", 1, 1),
    GroupedHopperConfig(64, 128, 5, "n", 3),
]


FORMS = [
    ("ragged", CONFIGS[0]),
    ("ragged", CONFIGS[1]),
    ("one", CONFIGS[1]),
    ("huge", CONFIGS[2]),
    ("none", CONFIGS[0]),
    ("few", CONFIGS[2]),
]


@pytest.mark.parametrize(("name", "config"), FORMS, ids=str)
def test_rows(monkeypatch: pytest.MonkeyPatch, name: str, config: GroupedHopperConfig) -> None:
    rows, sizes = SIZES[name]
    lhs, rhs = _normal(0, rows, K), _normal(1, len(sizes), K, N)
    for g, _, end in _parts(sizes):
        rhs[g] *= g != 3
        if end < rows:
            lhs[end, 0] = np.nan  # the next group's first row, which this group's last tile reads
    transposed = name in ("ragged", "few")
    with emulated(monkeypatch, 1 if name == "ragged" else 3):
        out = _finished(grouped_forward)(
            lhs, rhs.transpose(0, 2, 1).copy() if transposed else rhs, np.array(sizes, np.int32), config=config,
            transpose_rhs=transposed, out_dtype="float32" if name == "huge" else None,
        )  # fmt: skip
    assert out.dtype == (np.float32 if name == "huge" else BF16)
    _close(out, _rows_by_weights(lhs, rhs, sizes), K)


@pytest.mark.parametrize(("name", "config"), FORMS, ids=str)
def test_weights(monkeypatch: pytest.MonkeyPatch, name: str, config: GroupedHopperConfig) -> None:
    rows, sizes = SIZES[name]
    lhs, d_out = _normal(0, rows, K), _normal(1, rows, N)
    for g, start, end in _parts(sizes):
        if g % 2 and end > start:
            lhs[start, 1] = d_out[end - 1, 2] = np.nan  # beside the rows of other groups
    lhs[sum(sizes) :], d_out[sum(sizes) :] = np.nan, np.inf
    wanted = np.zeros((len(sizes), K, N))
    for g, start, end in _parts(sizes):
        wanted[g] = lhs[start:end].astype(np.float64).T @ d_out[start:end].astype(np.float64)
    transpose = name in ("ragged", "few")
    with emulated(monkeypatch, 1 if name == "ragged" else 3):
        out = _finished(grouped_weights)(
            lhs, d_out, np.array(sizes, np.int32), config=config, transpose=transpose,
            out_dtype="float32" if name == "huge" else None,
        )  # fmt: skip
    assert out.dtype == (np.float32 if name == "huge" else BF16)
    _close(out, wanted.transpose(0, 2, 1) if transpose else wanted, rows)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated(monkeypatch: pytest.MonkeyPatch, activation: str) -> None:
    rows, sizes = SIZES["ragged"]
    lhs, gate, up = _normal(0, rows, K), _normal(1, len(sizes), K, N), _normal(2, len(sizes), K, N)
    gate = (gate.astype(np.float32) / 8).astype(BF16)  # where the activations bend
    config = CONFIGS[list(ACTIVATIONS).index(activation) % 3]
    products = activation != "gelu"
    with emulated(monkeypatch, 2):
        made = _finished(gated_forward)(
            lhs, gate, up, np.array(sizes, np.int32), config=config, activation=activation, return_products=products
        )
    g, u = (_rows_by_weights(lhs, w, sizes) for w in (gate, up))
    y, *both = made if products else (made,)
    with jax.enable_x64(True):
        wanted = np.asarray(ACTIVATIONS[activation](jnp.asarray(g)) * u)
    # Both products' sums; the slopes of the activations are 1.13 at most, and they are at most as large as the gate.
    _close(y, wanted, 16 * K)
    for found, exact in zip(both, (g, u), strict=False):
        _close(found, exact, K)
    assert len(both) == 2 * products


@pytest.mark.parametrize(("rows", "columns", "band"), [(1, 1, 4), (7, 3, 2), (5, 4, 8), (6, 1, 1)])
def test_every_tile_is_visited_once(rows: int, columns: int, band: int) -> None:
    visit = jax.vmap(lambda index: banded(index, jnp.int32(rows), columns, band))
    visited = list(zip(*map(np.asarray, visit(jnp.arange(rows * columns, dtype=jnp.int32))), strict=True))
    assert sorted(visited) == list(itertools.product(range(rows), range(columns)))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ((32, 128), "tile_m is"),
        ((64, 100), "tile_n is"),
        ((128, 256), "at most 128 x 192"),
        ((64, 256, 4, "n"), "at most 256 long"),
        ((64, 256, 1), "stages is two"),
        ((64, 256, 4, "k"), "split is"),
        ((64, 256, 4, "m", 0), "band and pieces"),
    ],
)
def test_bad_config(fields: tuple[Any, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        GroupedHopperConfig(*fields)


def test_a_gated_tile_is_wide_enough_to_halve() -> None:
    with pytest.raises(ValueError, match="halves tile_n"):
        gated_forward(
            _normal(0, 8, 128), _normal(1, 2, 128, 128), _normal(2, 2, 128, 128), np.array([4, 4]),
            config=GroupedHopperConfig(64, 64),
        )  # fmt: skip


def _calls(rows: int, inner: int, columns: int, groups: int, dtype: Any = BF16, **more: Any) -> list[tuple[Any, Any]]:
    """The three ops on these sizes, each with its implementation."""
    lhs, flow, weight, counts = (
        jax.ShapeDtypeStruct(shape, kind)
        for shape, kind in (
            ((rows, inner), dtype), ((rows, columns), dtype), ((groups, inner, columns), dtype), ((groups,), jnp.int32),
        )
    )  # fmt: skip
    with target("gpu", more.pop("chip", "NVIDIA H200")):
        return [
            (GROUPED_GEMM.call(lhs, weight, counts, **more), IMPLEMENTATION),
            (GROUPED_GEMM_WEIGHTS.call(lhs, flow, counts, **more), WEIGHTS_IMPLEMENTATION),
            (GROUPED_GATED_GEMM.call(lhs, weight, weight, counts), GATED_IMPLEMENTATION),
        ]


@pytest.mark.parametrize("rows", [256, 16384])
def test_candidates(rows: int) -> None:
    for call, implementation in _calls(rows, 4096, 2048, 32):
        assert implementation.refusal(call) is None
        configs = implementation.candidates(call)
        assert 5 <= len(configs) <= 12
        assert implementation.default_config(call) == configs[0]
        assert len(set(configs)) == len(configs)
        assert all(config.smem_bytes() <= SMEM_BYTES for config in configs)
        # No deeper ring fits, unless it is as deep as any.
        assert all(
            c.stages == 6 or dataclasses.replace(c, stages=c.stages + 1).smem_bytes() > SMEM_BYTES for c in configs
        )


@pytest.mark.parametrize(("rows", "height"), [(256, 64), (3000, 128), (4500, 192), (6144, 128), (16384, 128)])
def test_a_tile_is_as_high_as_groups_fill_it(rows: int, height: int) -> None:
    """32 groups: of 140 rows a tile of 128 would leave most of a second one empty; of 192 half have more than those."""
    call, implementation = _calls(rows, 4096, 2048, 32)[0]
    assert implementation.default_config(call).program_tile[0] == height


@pytest.mark.parametrize(
    ("sizes", "more", "said"),
    [
        ((64, 128, 128, 2), {"chip": "NVIDIA A100-SXM4-80GB"}, "written for Hopper"),
        ((64, 128, 128, 2), {"dtype": jnp.float32}, "bfloat16 or float16, not float32"),
        ((64, 96, 128, 2), {}, "K is 96"),
        ((64, 128, 64, 2), {}, "N is 64"),
        ((0, 128, 128, 2), {}, "empty"),
    ],
)
def test_refuses(sizes: tuple[int, int, int, int], more: dict[str, Any], said: str) -> None:
    for call, implementation in _calls(*sizes, **more):
        assert said in (implementation.refusal(call) or "nothing")


def test_refuses_a_wide_output() -> None:
    for call, implementation in _calls(64, 128, 128, 2, out_dtype="float64")[:2]:
        assert "not float64" in (implementation.refusal(call) or "nothing")


LOWERED = {
    "rows": (lambda x, r, s: grouped_forward(x, r, s, config=CONFIGS[0]), (640, 256), (5, 256, 384)),
    "transposed": (
        lambda x, r, s: grouped_forward(x, r, s, config=CONFIGS[1], transpose_rhs=True, out_dtype="float32"),
        (333, 256),
        (5, 384, 256),
    ),
    "gated": (
        lambda x, g, u, s: gated_forward(x, g, u, s, config=CONFIGS[0], activation="gelu", return_products=True),
        (640, 256),
        (5, 256, 384),
        (5, 256, 384),
    ),
    "weights": (lambda x, d, s: grouped_weights(x, d, s, config=CONFIGS[1]), (333, 256), (333, 384)),
}


@pytest.mark.quick
@pytest.mark.parametrize("form", LOWERED)
def test_lowers_for_cuda(form: str) -> None:
    fn, *shapes = LOWERED[form]
    operands = [jax.ShapeDtypeStruct(s, BF16) for s in shapes]
    with target("gpu", "NVIDIA H200"):
        made = jax.export.export(jax.jit(fn), platforms=["cuda"])(*operands, jax.ShapeDtypeStruct((5,), jnp.int32))
    assert "mosaic_gpu" in made.mlir_module()


@pytest.mark.quick
def test_gradients_inside_shard_map_keep_their_axes() -> None:
    """One device is a mesh too: what varies over its axis must still do so when it leaves a kernel."""
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    shape = jax.ShapeDtypeStruct

    def loss(lhs: Any, gate: Any, up: Any, sizes: Any) -> Any:
        hidden = grouped_gated_gemm(lhs, gate, up, sizes, implementation="hopper")
        out = grouped_gemm(hidden, gate, sizes, transpose_rhs=True, implementation="hopper")
        return out.astype(jnp.float32).sum()[None]

    split = jax.P("x")
    local = jax.shard_map(loss, mesh=mesh, in_specs=(split, jax.P(), jax.P(), jax.P()), out_specs=split)
    weight = shape((4, 256, 128), BF16)
    with target("gpu", "NVIDIA H200"):
        made = jax.eval_shape(
            jax.grad(lambda *args: local(*args).sum(), argnums=(0, 1, 2)),
            shape((64, 256), BF16), weight, weight, shape((4,), jnp.int32),
        )  # fmt: skip
    assert [x.shape for x in made] == [(64, 256), weight.shape, weight.shape]
