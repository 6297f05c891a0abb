"""The Hopper forward kernel in every form of the call: its numbers by emulation, its lowering for cuda, its limits."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.kernels.ops.attention import naive
from tests.kernels.pallas import hopper_emulator as emulator

from capibara.kernels import target
from capibara.kernels.core.spec import Call
from capibara.kernels.ops.attention.api import ATTENTION
from capibara.kernels.ops.attention.hopper import forward, walks
from capibara.kernels.ops.attention.hopper.backward_steps import HopperGradConfig
from capibara.kernels.ops.attention.hopper.calls import TILES_TOGETHER, refuses
from capibara.kernels.ops.attention.hopper.forward import (
    BOUNDING_CAP,
    HopperConfig,
    Plan,
    candidates,
    default_config,
    hopper_forward,
)
from capibara.kernels.ops.attention.hopper.masking import Band, Grid
from capibara.kernels.ops.attention.hopper.panels import Columns, WholeColumns, columns_of
from capibara.kernels.ops.attention.masking import FAR
from capibara.kernels.pallas import prng
from capibara.kernels.pallas.hopper import SMEM_BYTES, smem_bytes


@dataclasses.dataclass(frozen=True)
class Form:
    """A call: sizes, the operands beside q, k and v, and parameters."""

    b: int = 1
    h: int = 2
    kv: int = 1
    t: int = 256
    s: int = 256
    d: int = 64
    dtype: Any = jnp.bfloat16
    bias: tuple[int, ...] | None = None
    bias_dtype: Any = jnp.float32
    mask: tuple[int, ...] | None = None
    segments: str | None = None
    blocks: tuple[int, int, int, int] | None = None  # batch, heads, queries and keys of a block
    config: HopperConfig | None = None  # None: the default for the call
    ahead: bool = False
    poisoned: tuple[int, ...] = ()  # keys that nobody sees, and that hold NaN
    physical: str = "bhtd"
    params: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def arrays(self) -> dict[str, np.ndarray]:
        g = np.random.default_rng(0)
        normal = lambda shape, dtype: g.standard_normal(shape).astype(jnp.dtype(dtype))  # noqa: E731
        made = {"q": normal((self.b, self.h, self.t, self.d), self.dtype)}
        for name in "kv":
            made[name] = normal((self.b, self.kv, self.s, self.d), self.dtype)
        if self.bias:
            made["bias"] = normal(self.bias, self.bias_dtype)
        if self.mask:
            made["mask"] = g.random(self.mask) < 0.7
            made["mask"][..., list(self.poisoned)] = False
        if self.segments:
            ids = {
                # Boundaries at different places for queries and keys, inside blocks; some queries see nothing.
                "packed": lambda n: np.cumsum(g.random((self.b, n)) < 4 / n, axis=1),
                "unsorted": lambda n: g.integers(0, 3, (self.b, n)),
            }[self.segments]
            made["q_segments"], made["kv_segments"] = (ids(n).astype(np.int32) for n in (self.t, self.s))
            made["kv_segments"][:, list(self.poisoned)] = 99
        if self.blocks:
            bq, bk = self.blocks[2:]
            made["block_mask"] = g.random((*self.blocks[:2], -(-self.t // bq), -(-self.s // bk))) < 0.5
        if self.params.get("dropout_rate"):
            made["dropout_seed"] = np.array([5, 2**32 - 7], np.uint32)
        for name in "kv":
            made[name][:, :, list(self.poisoned)] = np.nan
        return made

    @property
    def all_params(self) -> dict[str, Any]:
        extra = {} if self.blocks is None else {"block_size": self.blocks[2:]}
        return {**self.params, **extra}

    def call(self) -> Call:
        with target("gpu", "NVIDIA H200"):
            arrays = self.arrays()
            return ATTENTION.call(*(arrays.get(n) for n in ATTENTION.operands), **self.all_params)

    def run(self, arrays: Mapping[str, Any]) -> Any:
        config = dataclasses.replace(self.config or default_config(self.call()), ahead=self.ahead)
        return hopper_forward(**arrays, config=config, physical=self.physical, return_lse=True, **self.all_params)


QUICK = {"xla_backend_optimization_level": "0"}  # of the work around the kernel: it is compiled to run once
FORMS = {
    "plain": Form(),
    "causal": Form(params={"causal": True}, h=4, kv=2),
    "windowed": Form(t=300, s=280, params={"window": (40, 17)}, config=HopperConfig(64, 64, 2)),
    "odd": Form(t=131, s=77, d=80, b=2),
    "one": Form(t=1, s=1, d=32),
    "bthd": Form(b=2, h=4, kv=2, t=140, s=150, physical="bthd", params={"causal": True}),
    "head-192": Form(d=192, t=140, s=140, params={"causal": True}),
    "head-192-whole": Form(d=192, t=136, s=200),
    "head-96": Form(b=2, h=4, kv=2, d=96, t=136, s=136, physical="bthd", params={"causal": True}),
    "head-36": Form(d=36, t=130, s=70),  # rows that TMA does not take as they lie
    "wide-block": Form(t=130, s=300, params={"causal": True, "q_offset": 170}, config=HopperConfig(64, 256, 2)),
    "many-rows": Form(t=200, s=300, config=HopperConfig(128, 64, 3)),
    "no-turns": Form(params={"causal": True}, config=HopperConfig(64, 64, 4, False)),
    "few-programs": Form(b=2, h=4, kv=2, t=400, s=300, config=HopperConfig(64, 64, 2, True, 3)),
    "few-programs-causal": Form(
        h=4, kv=2, t=400, s=400, d=128, config=HopperConfig(64, 128, 2, True, 5), params={"causal": True}
    ),
    # Sections of three of the eight heads, the last one of two.
    "few-programs-sections": Form(
        b=2, h=4, kv=2, t=400, s=400, config=HopperConfig(64, 64, 2, True, 5, section=3), params={"causal": True}
    ),
    "few-programs-dead": Form(
        t=500, s=256, config=HopperConfig(64, 64, 3, True, 2), params={"causal": True, "q_offset": -200}
    ),
    "more-programs-than-tiles": Form(config=HopperConfig(64, 64, 2, False, 100)),
    "few-programs-packed": Form(
        b=2, t=384, s=384, segments="packed", params={"causal": True}, config=HopperConfig(64, 64, 2, True, 4)
    ),
    "dead-rows": Form(params={"causal": True, "q_offset": -100}),
    "capped": Form(params={"softcap": 1.5, "scale": 0.5}, bias=(1, 2, 256, 256)),
    # Scores all over what the cap leaves, with a maximum of each row where the cap or the type bounds too little.
    "capped-wide": Form(params={"softcap": 50.0, "scale": 6.0, "causal": True}),
    "capped-high": Form(params={"softcap": 100.0, "scale": 6.0, "causal": True}),
    "capped-float16": Form(dtype=jnp.float16, params={"softcap": 50.0, "scale": 6.0}),
    # The maximum over keys is a minimum over the raw products; and minus infinity times zero would be NaN.
    "negative-scale": Form(params={"scale": -0.3, "causal": True}),
    "zero-scale": Form(params={"scale": 0.0, "causal": True}),
    "packed": Form(b=2, t=384, s=384, segments="packed", params={"causal": True}),
    "unsorted": Form(b=2, t=129, s=200, segments="unsorted", dtype=jnp.float16),
    "blocks": Form(t=512, s=512, blocks=(1, 2, 128, 128)),
    "blocks-causal": Form(b=2, t=300, s=384, blocks=(2, 1, 256, 128), params={"causal": True, "q_offset": 84}),
    "blocks-small": Form(blocks=(1, 2, 64, 32), params={"causal": True}),
    "masked": Form(b=2, t=150, s=161, mask=(2, 1, 150, 161)),
    "masked-row": Form(b=2, mask=(2, 1, 1, 256), params={"causal": True}),
    "biased": Form(t=150, s=161, bias=(1, 2, 150, 161), params={"causal": True}),
    "biased-bf16": Form(b=2, d=128, bias=(2, 1, 256, 256), bias_dtype=jnp.bfloat16),
    "biased-row": Form(bias=(1, 2, 1, 256)),
    "masked-biased": Form(d=128, mask=(1, 1, 256, 256), bias=(1, 2, 256, 256)),
    "masked-biased-wide": Form(
        d=256, t=140, s=140, mask=(1, 1, 140, 140), bias=(1, 2, 140, 140), poisoned=(3, 100), params={"softcap": 2.0}
    ),
    "blocks-biased-wide": Form(
        d=256, t=140, s=140, blocks=(1, 1, 64, 64), bias=(1, 2, 140, 140), params={"softcap": 2.0}
    ),
    "dropped": Form(b=2, t=131, s=150, params={"dropout_rate": 0.3, "causal": True}),
    "everything": Form(
        b=2, h=4, kv=2, t=100, s=120, bias=(1, 4, 100, 120), mask=(2, 1, 1, 120), segments="packed",
        blocks=(1, 4, 32, 64),
        params={"causal": True, "q_offset": 20, "window": (50, 3), "softcap": 4.0, "scale": 0.2, "dropout_rate": 0.2},
    ),
    # What nobody sees holds NaN: by position in the blocks at both ends of the band, by mask, and by segment.
    "unseen-by-position": Form(
        t=200, s=500, params={"causal": True, "q_offset": 150, "window": (30, 0)},
        poisoned=(*range(120), *range(350, 500)),
    ),
    "unseen-by-mask": Form(mask=(1, 1, 256, 256), params={"causal": True}, poisoned=(100, 139, 255)),
    "unseen-by-row": Form(mask=(1, 1, 1, 256), poisoned=(0, 100, 255)),
    "unseen-by-segment": Form(segments="unsorted", poisoned=(5, 201, 255)),
}  # fmt: skip
# The same with the next block's scores under way, in every form that walks the blocks in its own manner.
FORMS |= {f"{name}-ahead": dataclasses.replace(form, ahead=True) for name, form in FORMS.items()}
# The newest JAX gets these: several blocks of keys and of queries, both edges of a band, and every rule at once.
IN_THE_QUICK_RUN = ("windowed", "few-programs-sections", "everything", "everything-ahead")
each_form = pytest.mark.parametrize(
    "form",
    [
        pytest.param(form, id=name, marks=[pytest.mark.quick] if name in IN_THE_QUICK_RUN else [])
        for name, form in FORMS.items()
    ],
)


def _expected(form: Form, arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    rules = {n: arrays.get(n) for n in ("mask", "q_segments", "kv_segments", "block_mask")}
    params = form.all_params
    rules |= {n: params[n] for n in ("causal", "q_offset", "window", "block_size") if n in params}
    ok = naive.visible((form.b, form.h, form.t, form.s), **rules)
    rate, keep = params.get("dropout_rate", 0.0), None
    if rate:
        rows = np.arange(form.b * form.h * form.t, dtype=np.uint32).reshape(form.b, form.h, form.t, 1)
        drawn = jax.jit(functools.partial(prng.keep_mask, rate=rate))
        keep = drawn(arrays["dropout_seed"], rows, np.arange(form.s, dtype=np.uint32))
    return naive.attention(
        arrays["q"], arrays["k"], arrays["v"], ok, bias=arrays.get("bias"), scale=params.get("scale"),
        softcap=params.get("softcap"), keep=keep, rate=rate,
    )  # fmt: skip


@each_form
def test_numbers_are_right(form: Form) -> None:
    arrays = form.arrays()
    with emulator.emulated():
        out, lse = jax.block_until_ready(jax.jit(form.run, compiler_options=QUICK)(arrays))
    wanted = _expected(form, arrays)
    out, lse = np.asarray(out, np.float64), np.asarray(lse, np.float64)
    assert out.shape == wanted["out"].shape
    assert lse.shape == wanted["lse"].shape
    error = np.linalg.norm(out - wanted["out"]) / np.linalg.norm(wanted["out"])
    assert error <= ATTENTION.tolerance(form.call()), error  # NaN anywhere fails too
    assert (np.isneginf(lse) == np.isneginf(wanted["lse"])).all()
    assert (out[np.isneginf(lse)] == 0).all(), "a query that sees nothing gives zeros"
    alive = np.isfinite(wanted["lse"])
    # A score is a sum of head_dim products in float32, each rounded to 2^-24 of the sum; four for an unlucky draw.
    bound = 4 * 2.0**-24 * form.d * max(1.0, np.abs(wanted["lse"][alive]).max(initial=0.0))
    assert np.abs(lse[alive] - wanted["lse"][alive]).max(initial=0.0) < bound


@pytest.mark.parametrize("cap", [BOUNDING_CAP, BOUNDING_CAP + 1], ids=["bounded", "by-maximum"])
@pytest.mark.parametrize("sign", [1, -1])
def test_scores_at_the_cap_keep_large_and_small_values(cap: float, sign: int) -> None:
    """All exponentials at the end of their range: without a maximum of each row they are not near one."""
    form = Form(params={"softcap": cap, "scale": 6.0})
    arrays = form.arrays()
    arrays["q"][...], arrays["k"][...] = 4, 4 * sign
    # As far from one as a million keys' sum of values of 2^34: 256 keys of one sign have 2^12 less of it.
    arrays["v"] = (np.abs(arrays["v"].astype(np.float32)) * 2.0 ** (46 * sign)).astype(form.dtype)
    with emulator.emulated():
        out, lse = jax.block_until_ready(jax.jit(form.run, compiler_options=QUICK)(arrays))
    wanted = _expected(form, arrays)
    error = np.linalg.norm(np.asarray(out, np.float64) - wanted["out"]) / np.linalg.norm(wanted["out"])
    assert error <= ATTENTION.tolerance(form.call()), error
    by_newton = 5e-6 * cap if cap <= BOUNDING_CAP else 0.0  # as far off as the cap's quotient is
    np.testing.assert_allclose(lse, wanted["lse"], rtol=2.0**-20, atol=by_newton)


def _lowered(form: Form) -> str:
    shapes = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in form.arrays().items()}
    return str(jax.export.export(jax.jit(form.run), platforms=["cuda"])(shapes).mlir_module())


# One of each body, operand and way to walk the tiles; the others differ in sizes or in what the operands hold.
LOWERED = (
    "windowed", "odd", "bthd", "head-192", "head-192-whole", "wide-block", "many-rows", "no-turns", "few-programs-dead",
    "few-programs-packed", "capped", "capped-float16", "zero-scale", "unsorted", "blocks-small", "masked", "masked-row",
    "biased-bf16", "biased-row", "masked-biased-wide", "blocks-biased-wide", "dropped", "everything",
    "few-programs-dead-ahead", "everything-ahead", "odd-ahead",
)  # fmt: skip


@pytest.mark.spread(5)
@pytest.mark.quick(cases=6)
@pytest.mark.parametrize("name", LOWERED)
def test_lowers_for_cuda(name: str) -> None:
    assert "mosaic_gpu" in _lowered(FORMS[name])


@pytest.mark.quick
@pytest.mark.parametrize("ahead", [True, False])
def test_a_store_keeps_exponentials_before_the_wait_for_what_is_under_them(ahead: bool) -> None:
    """No emulation shows it: without the store numbers are as right, and nothing runs under the product."""
    form = dataclasses.replace(FORMS["plain"], ahead=ahead)
    assert ("st.shared.b32" in _lowered(form)) == ahead


@pytest.mark.parametrize(("head_dim", "causal"), [(144, True), (176, False), (240, True)])
def test_lowers_at_any_head_size_and_length(head_dim: int, causal: bool) -> None:
    assert "mosaic_gpu" in _lowered(Form(d=head_dim, t=1111, s=1111, physical="bthd", params={"causal": causal}))


@pytest.mark.quick
def test_no_copy_is_padded_or_cut() -> None:
    text = _lowered(dataclasses.replace(FORMS["odd"], physical="bthd"))
    assert "tensor<2x131x2x80xbf16>" in text
    moved = [line for line in text.splitlines() if "pad" in line or "stablehlo.slice" in line]
    assert not [line for line in moved if "xbf16>" in line], moved


@pytest.mark.quick
@pytest.mark.parametrize(
    ("head_dim", "length", "parts", "widths"),
    [
        (128, 256, 1, (128,)),  # whole
        (192, 256, 1, (192,)),
        (256, 256, 2, (128,)),
        (128, 260, 1, (64, 64)),  # a length that is no multiple of 8
        (128, 64, 1, (64, 64)),  # a single tile of an array that is shorter than what a program takes
        (192, 256, 2, (64, 32)),  # a half has no room for two of the widest
        (80, 256, 1, (64, 16)),
        (112, 256, 1, (64, 32, 16)),
        (72, 256, 1, (64, 16)),  # past the head's end copies are clipped
    ],
)
def test_columns_come_whole_or_in_panels(head_dim: int, length: int, parts: int, widths: tuple[int, ...]) -> None:
    columns = columns_of(head_dim, jnp.bfloat16, [(length, 128)], parts)
    panels = columns.panels(jnp.bfloat16)
    assert tuple(panel.width for panel in panels) == widths
    assert sum(widths) * parts == columns.width >= head_dim
    whole = len(widths) == 1
    assert isinstance(columns, WholeColumns) == whole
    assert columns.copies(jnp.bfloat16) == (1 if whole else parts * len(widths))
    in_panels = Columns(head_dim, parts).scratch((2,), 64, jnp.bfloat16)
    assert smem_bytes(columns.scratch((2,), 64, jnp.bfloat16)) == smem_bytes(in_panels), "as much memory either way"


@pytest.mark.parametrize(("physical", "shape"), [("bhtd", "1x2x256x64"), ("bthd", "1x256x2x64")])
def test_the_kernel_reads_the_layout_in_memory(physical: str, shape: str) -> None:
    form = dataclasses.replace(FORMS["plain"], physical=physical)
    text = _lowered(form)
    (kernel,) = [line for line in text.splitlines() if "custom_call" in line and "mosaic_gpu" in line]
    operands = kernel.rsplit(" : (", 1)[1]
    assert operands.startswith(f"tensor<{shape}xbf16>"), operands


def test_the_layout_is_one_of_two() -> None:
    with pytest.raises(ValueError, match="physical is one of bhtd, bthd"):
        dataclasses.replace(FORMS["plain"], physical="tbhd").run(FORMS["plain"].arrays())


def _table(grid: Grid, block_size: Any = None, **given: Any) -> np.ndarray:
    names = ("mask", "q_segments", "kv_segments", "block_mask")

    def table(given: Mapping[str, Any]) -> Any:
        kinds = grid.kinds(*(given.get(n) for n in names), block_size)
        return forward.key_block_table(grid, kinds, given.get("visible"))

    return np.asarray(jax.jit(table, compiler_options=QUICK)(given))


def test_dead_blocks_are_not_in_the_table() -> None:
    """Blocks of 128: causality leaves the lower triangle, the segments take four blocks away, the block mask one."""
    grid = Grid(512, Band(-(2**30), 0, 512), 128, 128)
    block_mask = np.ones((1, 1, 4, 4), bool)
    block_mask[0, 0, 2, 2] = False
    segments = (np.arange(512)[None] >= 256).astype(np.int32)
    table = _table(grid, q_segments=segments, kv_segments=segments, block_mask=block_mask, block_size=(128, 128))
    rows = [row[2 : 2 + row[1]] // 2 for row in table[0, 0]]
    assert [row.tolist() for row in rows] == [[0], [0, 1], [], [2, 3]]
    # Off the diagonal a block is whole, and comes first.
    assert table[0, 0, :, 0].tolist() == [0, 1, 0, 1]


def test_a_mask_of_pairs_kills_and_frees_whole_tiles() -> None:
    mask = np.zeros((1, 1, 256, 256), bool)
    mask[..., :128, 128:] = True
    mask[..., 200, 7] = True
    table = _table(Grid(256, Band(-(2**30), 2**30, 256), 128, 128), mask=mask)
    assert table[0, 0, :, :3].tolist() == [[1, 1, 2], [0, 1, 0]]  # whole: block 1; in part: block 0


@functools.cache
def _shape(**changed: Any) -> Call:
    return dataclasses.replace(Form(), **changed).call()


def _smem_bytes(config: HopperConfig, head_dim: int, **pair_dtypes: Any) -> int:
    refs = forward.scratch(config, Columns(head_dim), jnp.bfloat16, pair_dtypes, True)
    return smem_bytes(refs, forward.REDUCTION_BYTES)


@pytest.mark.parametrize("name", ["masked-biased", "biased-bf16", "masked-biased-wide", "blocks-small"])
def test_the_largest_candidate_fits_the_chip(name: str) -> None:
    """Mosaic counts shared memory when it lowers, and refuses what does not fit."""
    form = FORMS[name]
    made = candidates(form.call())
    assert default_config(form.call()) in made
    largest = max(made, key=lambda c: _smem_bytes(c, form.d))
    _lowered(dataclasses.replace(form, config=largest))


def test_the_largest_program_lowers() -> None:
    """A float32 bias leaves 920 bytes of shared memory to spare with heads of 128."""
    form = Form(d=128, bias=(1, 2, 256, 256), config=HopperConfig(64, 128, 2))
    assert form.config in candidates(form.call())
    assert SMEM_BYTES - 1024 < _smem_bytes(HopperConfig(64, 128, 2), 128, bias_tile=jnp.float32) <= SMEM_BYTES
    _lowered(form)


def test_defaults_by_head_size() -> None:
    assert default_config(_shape(d=64)) == HopperConfig(64, 128, 2, programs=132)
    assert default_config(_shape(d=64, t=4096, s=4096)) == HopperConfig(64, 256, 2, programs=132), "long rows"
    assert default_config(_shape(d=128)) == HopperConfig(64, 128, 2, programs=132)
    assert default_config(_shape(d=256)) == HopperConfig(64, 64, 2, order=TILES_TOGETHER, ahead=True)
    assert default_config(_shape(d=64, segments="packed")) == HopperConfig(64, 128, 2)
    assert default_config(_shape(d=64, s=40)) == HopperConfig(64, 64, 2, programs=132), "no more keys than there are"


@pytest.mark.quick
def test_with_causality_programs_walk_by_what_is_done_first() -> None:
    def walk(b: int, t: int, h: int, kv: int, d: int = 128, **params: Any) -> tuple[int, int]:
        q, k = (jax.ShapeDtypeStruct((b, heads, t, d), jnp.bfloat16) for heads in (h, kv))
        with target("gpu", "NVIDIA H200"):
            config = default_config(ATTENTION.call(q, k, k, causal=True, **params))
        return config.programs, config.section

    assert walk(8, 2048, 16, 8) == (132, 128), "all heads: the longest tiles first"
    assert walk(4, 1024, 64, 8) == (132, 132), "keys of so many heads at a time stay cached"
    assert walk(12, 768, 24, 8) == (132, 0), "a batch element at a time shares them out as well"
    assert walk(32, 512, 12, 12, d=64) == (132, 0), "short rows, and no head shares keys: reading must not bunch up"
    assert walk(4, 4096, 16, 16) == (0, 0), "more keys than are cached, and few tiles a program"
    assert walk(1, 32768, 8, 8) == (0, 0)
    assert walk(2, 4096, 16, 16, d=192) == (0, 0), "sections are of programs alone"
    assert walk(8, 2048, 16, 8, window=(127, 0)) == (132, 0), "in a window all tiles take as long"
    assert walk(1 << 20, 1024, 16, 8) == (132, 0), "too many tiles to count them"


@pytest.mark.quick
def test_scores_are_ahead_where_that_is_sooner() -> None:
    def ahead(b: int, t: int, h: int, kv: int, d: int = 128, masked: tuple[str, ...] = (), **params: Any) -> bool:
        q, k = (jax.ShapeDtypeStruct((b, heads, t, d), jnp.bfloat16) for heads in (h, kv))
        shapes = {
            "mask": ((b, 1, t, t), bool), "q_segments": ((b, t), "int32"), "kv_segments": ((b, t), "int32"),
            "bias": ((1, h, t, t), "float32"), "dropout_seed": ((2,), "uint32"),
        }  # fmt: skip
        made = {"q": q, "k": k, "v": k} | {name: jax.ShapeDtypeStruct(*shapes[name]) for name in masked}
        with target("gpu", "NVIDIA H200"):
            return default_config(ATTENTION.call(*(made.get(n) for n in ATTENTION.operands), **params)).ahead

    assert ahead(1, 16384, 32, 8, causal=True), "long tiles"
    assert not ahead(8, 1024, 32, 8, causal=True), "programs that go over short tiles are sooner"
    assert ahead(2, 8192, 16, 16), "all keys are seen, and many"
    assert not ahead(8, 2048, 16, 16)
    assert not ahead(8, 8192, 32, 8, causal=True, window=(1023, 0))
    assert not ahead(1, 16384, 32, 8, d=64, causal=True), "narrow heads"
    assert ahead(2, 4096, 16, 8, d=256, causal=True)
    assert ahead(2, 4096, 32, 8, masked=("dropout_seed",), dropout_rate=0.1, causal=True)
    for masked in (("mask",), ("q_segments", "kv_segments"), ("bias",)):
        assert not ahead(2, 4096, 32, 8, masked=masked, causal=True), masked


def test_blocks_are_chosen_to_divide_the_block_mask() -> None:
    call = FORMS["blocks"].call()
    assert all(c.divides((128, 128)) for c in candidates(call))
    narrow = dataclasses.replace(FORMS["blocks"], blocks=(1, 1, 128, 64)).call()
    assert default_config(narrow).block_k == 64


def test_refusals_say_why() -> None:
    with target("gpu", "NVIDIA A100"):
        q = jax.ShapeDtypeStruct((1, 1, 128, 64), jnp.bfloat16)
        assert "Hopper" in str(refuses(ATTENTION.call(q, q, q)))
    assert "bfloat16 or float16" in str(refuses(_shape(dtype=jnp.float32)))
    assert "256 at the most" in str(refuses(_shape(d=264)))
    assert "empty" in str(refuses(_shape(t=0)))
    assert "empty" in str(refuses(_shape(s=0)))
    assert all(refuses(form.call()) is None for form in FORMS.values())


@pytest.mark.parametrize(
    ("changed", "rule"), [({"block_q": 96}, "block_q"), ({"block_k": 100}, "block_k"), ({"stages": 1}, "stages")]
)
def test_configs_check_themselves(changed: dict[str, int], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        HopperConfig(**changed)


@pytest.mark.parametrize("name", ["plain", "packed"])
def test_lowers_inside_shard_map(name: str) -> None:
    """Loops over what is read from an operand count from zero, so a checked shard_map takes them."""
    form = dataclasses.replace(FORMS[name], b=2)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    arrays = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in form.arrays().items()}
    spec = jax.sharding.PartitionSpec("data")
    mapped = jax.shard_map(form.run, mesh=mesh, in_specs=(dict.fromkeys(arrays, spec),), out_specs=(spec, spec))
    assert "mosaic_gpu" in jax.export.export(jax.jit(mapped), platforms=["cuda"])(arrays).mlir_module()


def test_an_order_names_every_axis_of_the_launch_once() -> None:
    with pytest.raises(ValueError, match="order names batch, head, tile once each, the slowest first"):
        HopperConfig(order="head tile")
    with pytest.raises(ValueError, match="order names batch, head, tile once each"):
        HopperGradConfig(order="head head batch")
    plan = Plan(
        config=HopperConfig(order=TILES_TOGETHER), grid=Grid(300, Band(-FAR, FAR, 300), 128, 128), batch=2,
        heads=4, group=1, scale=1.0, softcap=None, bounded=False, dropout_rate=0.0,
        heads_first=True, folded=False,
    )  # fmt: skip
    assert plan.launch == ((4, 3, 2), ("head", "tile", "batch")), "the axis named last changes first"
    places = [tuple(map(int, plan.place(jnp.int32(n)))) for n in (0, 1, 2, 6)]
    assert places == [(0, 0, 0), (1, 0, 0), (0, 0, 1), (0, 1, 0)], "batch, head and tile, as the launch has them"


@pytest.mark.quick
@pytest.mark.parametrize("section", [0, 1, 3, 5, 8])
def test_a_walk_by_sections_comes_to_every_tile_once(section: int) -> None:
    grid = Grid(600, Band(-FAR, 0, 600), 128, 128)
    config = HopperConfig(programs=7, section=section)
    plan = Plan(
        config=config, grid=grid, batch=2, heads=4, group=1, scale=1.0, softcap=None, bounded=False,
        dropout_rate=0.0, heads_first=True, folded=False,
    )  # fmt: skip
    places = [tuple(map(int, plan.place(jnp.int32(n)))) for n in range(plan.tiles)]
    assert sorted(places) == list(itertools.product(range(2), range(4), range(5)))
    if section:
        assert [batch * 4 + head for batch, head, _ in places[:section]] == list(range(section))
    # What the choice of a section counts: blocks of the program that has the most.
    blocks = [grid.counts[0] - tile + 1 for *_, tile in places]
    load = [sum(blocks[program :: config.programs]) for program in range(config.programs)]
    assert walks.busiest(grid, 2, 4, 7, config.order, section) == (max(load), pytest.approx(sum(load) / 7))


def test_a_section_needs_programs_that_go_over_tiles() -> None:
    with pytest.raises(ValueError, match="section is 0, or more where programs go over several tiles"):
        HopperConfig(section=4)
