"""The Hopper backward kernel in every form of the call: its numbers by emulation, its lowering for cuda, its limits."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.kernels.ops.attention import naive
from tests.kernels.pallas import hopper_emulator as emulator

from capibara.compile import lower_for
from capibara.compile.kernels import implementation_program
from capibara.kernels import target
from capibara.kernels.core import evidence
from capibara.kernels.core.spec import Call
from capibara.kernels.ops.attention.api import ATTENTION_GRAD
from capibara.kernels.ops.attention.hopper import backward, backward_divided, backward_loops
from capibara.kernels.ops.attention.hopper.backward import candidates, default_config, hopper_backward, refuses
from capibara.kernels.ops.attention.hopper.backward_steps import HopperGradConfig, Plan, Walk
from capibara.kernels.ops.attention.hopper.masking import Band, Grid
from capibara.kernels.pallas import hopper, prng

QUICK = {"xla_backend_optimization_level": "0"}  # of the work around the kernel: it is compiled to run once


@dataclasses.dataclass(frozen=True)
class Form:
    """A call: sizes, the operands beside q, k and v, and parameters."""

    b: int = 1
    h: int = 2
    kv: int = 1
    t: int = 200
    s: int = 136
    d: int = 64
    dtype: Any = jnp.bfloat16
    mask: tuple[int, ...] | None = None
    segments: str | None = None
    blocks: tuple[int, int, int, int] | None = None  # batch, heads, queries and keys of a block
    config: HopperGradConfig | None = None  # None: the default for the call, with `sharers`
    sharers: int = 0
    poisoned: tuple[int, ...] = ()  # keys that nobody sees, and that hold NaN
    d_lse: bool = False
    physical: str = "bhtd"
    params: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def operands(self) -> dict[str, np.ndarray]:
        g = np.random.default_rng(0)
        normal = lambda shape, dtype: g.standard_normal(shape).astype(jnp.dtype(dtype))  # noqa: E731
        made = {"q": normal((self.b, self.h, self.t, self.d), self.dtype)}
        for name in "kv":
            made[name] = normal((self.b, self.kv, self.s, self.d), self.dtype)
        if self.mask:
            made["mask"] = g.random(self.mask) < 0.7
            made["mask"][..., list(self.poisoned)] = False
        if self.segments:
            ids = {
                # Boundaries at different places for queries and keys, inside tiles; some queries see nothing.
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
        made["d_out"] = normal(made["q"].shape, self.dtype)
        if self.d_lse:
            made["d_lse"] = normal(made["q"].shape[:3], jnp.float32)
        return made

    @property
    def all_params(self) -> dict[str, Any]:
        extra = {} if self.blocks is None else {"block_size": self.blocks[2:]}
        return {**self.params, **extra}

    def expected(self, given: Mapping[str, Any]) -> dict[str, np.ndarray]:
        rules = {n: given.get(n) for n in ("mask", "q_segments", "kv_segments", "block_mask")}
        params = self.all_params
        rules |= {n: params[n] for n in ("causal", "q_offset", "window", "block_size") if n in params}
        ok = naive.visible((self.b, self.h, self.t, self.s), **rules)
        rate, keep = params.get("dropout_rate", 0.0), None
        if rate:
            rows = np.arange(self.b * self.h * self.t, dtype=np.uint32).reshape(self.b, self.h, self.t, 1)
            drawn = jax.jit(functools.partial(prng.keep_mask, rate=rate))
            keep = drawn(given["dropout_seed"], rows, np.arange(self.s, dtype=np.uint32))
        return naive.attention(
            given["q"], given["k"], given["v"], ok, scale=params.get("scale"), softcap=params.get("softcap"),
            keep=keep, rate=rate, d_out=given["d_out"], d_lse=given.get("d_lse"),
        )  # fmt: skip

    def arrays(self) -> dict[str, Any]:
        """Every operand of the backward pass; what the forward pass would have saved is the exact value, rounded."""
        given = self.operands()
        wanted = self.expected(given)
        return given | {"out": wanted["out"].astype(self.dtype), "lse": wanted["lse"].astype(np.float32)}

    def shapes(self) -> dict[str, Any]:
        made = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in self.operands().items()}
        return made | {"out": made["q"], "lse": jax.ShapeDtypeStruct((self.b, self.h, self.t), jnp.float32)}

    def call(self) -> Call:
        given = self.shapes()
        with target("gpu", "NVIDIA H200"):
            return ATTENTION_GRAD.call(*(given.get(n) for n in ATTENTION_GRAD.operands), **self.all_params)

    def run(self, given: Mapping[str, Any]) -> Any:
        config = self.config or dataclasses.replace(default_config(self.call()), sharers=self.sharers)
        absent = dict.fromkeys(ATTENTION_GRAD.operands)
        return hopper_backward(**(absent | dict(given)), config=config, physical=self.physical, **self.all_params)[:3]


CAUSAL = {"causal": True}
FORMS = {
    "plain": Form(d=128),
    "causal": Form(b=2, h=4, kv=2, s=200, params=CAUSAL, d_lse=True),
    "windowed": Form(d=128, t=300, s=280, params={"window": (40, 17)}),
    "capped": Form(d=256, t=130, params={"softcap": 1.5, "scale": 0.5, "causal": True}),
    "odd": Form(t=131, s=77, d=80, b=2, dtype=jnp.float16),
    "head-96": Form(h=4, kv=2, t=136, s=200, d=96, physical="bthd", params=CAUSAL),
    "head-112": Form(t=131, s=150, d=112, params={"window": (40, 0)}),
    "head-36": Form(t=70, s=130, d=36),  # rows that TMA does not take as they lie
    "head-208": Form(h=4, kv=2, t=131, s=77, d=208, physical="bthd", params=CAUSAL),
    "head-144": Form(s=144, d=144, segments="packed"),  # dq in an odd number of pieces, through one place
    "short": Form(t=40, s=60, d=128, params=CAUSAL),
    "bthd": Form(b=2, h=4, kv=2, t=140, s=150, d=128, physical="bthd", params=CAUSAL),
    "three-stages": Form(d=128, s=200, config=HopperGradConfig(64, 3, "head tile batch"), params=CAUSAL),
    "two-parts": Form(b=2, h=4, kv=2, s=200, d=128, config=HopperGradConfig(64, 2, parts=2), params=CAUSAL),
    "two-parts-bthd-packed": Form(
        h=4, kv=2, t=300, s=300, config=HopperGradConfig(128, 2, parts=2), segments="packed", physical="bthd",
    ),
    "two-parts-256": Form(h=4, kv=2, d=256, config=HopperGradConfig(64, 2, parts=2), params=CAUSAL),
    # Several programs of a tile of keys, whose gradients are added to sums.
    "sharers": Form(b=2, h=6, kv=1, t=200, s=150, d=128, sharers=2, params=CAUSAL),
    "sharers-64-packed": Form(b=2, h=4, kv=2, t=300, s=264, segments="packed", sharers=1, physical="bthd"),
    "sharers-80": Form(h=4, kv=1, t=131, s=77, d=80, sharers=2, params={"dropout_rate": 0.2, **CAUSAL}),
    "sharers-256": Form(b=2, h=4, kv=1, s=200, d=256, sharers=2, physical="bthd", params=CAUSAL),
    "sharers-208": Form(h=2, t=131, s=77, d=208, sharers=1, params={"softcap": 2.0, **CAUSAL}),
    "sharers-masked": Form(d=128, h=4, kv=1, mask=(1, 4, 200, 136), sharers=2, params=CAUSAL, poisoned=(100, 135)),
    # Keys that one program's query heads do not see and another's do.
    "sharers-masked-row": Form(d=128, h=4, kv=1, mask=(1, 4, 1, 136), sharers=2),
    "divided-192": Form(h=4, kv=2, t=131, s=77, d=192, params=CAUSAL),  # in columns of 128 and of 64
    "packed": Form(b=2, h=4, kv=2, t=300, s=300, d=128, segments="packed", params=CAUSAL, d_lse=True),
    "packed-64": Form(b=2, t=300, s=300, segments="packed"),
    "packed-256": Form(b=2, h=4, kv=2, s=200, d=256, segments="packed", params=CAUSAL),
    "packed-bthd": Form(b=2, t=300, s=264, d=128, segments="packed", physical="bthd"),
    "unsorted": Form(b=2, t=129, d=128, segments="unsorted", dtype=jnp.float16),
    "dropped": Form(b=2, h=4, kv=2, t=131, s=150, d=128, params={"dropout_rate": 0.3, **CAUSAL}),
    "dropped-64": Form(b=2, params={"dropout_rate": 0.1}),
    "dropped-256": Form(b=2, t=131, d=256, params={"dropout_rate": 0.3, "softcap": 2.0}),
    "packed-dropped": Form(b=2, d=128, segments="packed", params={"dropout_rate": 0.2, **CAUSAL}),
    "blocks": Form(h=4, kv=2, t=384, s=384, d=128, blocks=(1, 4, 64, 128)),
    "blocks-causal": Form(b=2, t=300, s=300, blocks=(2, 1, 256, 128), params={"q_offset": 10, **CAUSAL}),
    "blocks-256": Form(d=256, s=200, blocks=(1, 2, 64, 64), params=CAUSAL),
    "blocks-small": Form(d=128, blocks=(1, 2, 48, 32), params=CAUSAL),
    "masked": Form(b=2, h=4, kv=2, s=161, d=128, mask=(2, 4, 200, 161)),
    "masked-64": Form(b=2, mask=(2, 1, 200, 136), params=CAUSAL),
    "masked-256": Form(h=4, kv=2, d=256, mask=(1, 4, 200, 136)),
    "masked-row": Form(b=2, h=4, kv=2, d=128, mask=(2, 4, 1, 136), params=CAUSAL),
    "masked-row-256": Form(b=2, d=256, mask=(2, 1, 1, 136)),
    "everything": Form(
        b=2, h=4, kv=2, t=100, s=120, d=128, mask=(2, 1, 1, 120), segments="packed", blocks=(1, 4, 32, 64), d_lse=True,
        params={"causal": True, "q_offset": 20, "window": (50, 3), "softcap": 4.0, "scale": 0.2, "dropout_rate": 0.2},
    ),
    "everything-256": Form(
        h=4, kv=2, t=100, s=120, d=256, mask=(1, 4, 100, 120), segments="packed", blocks=(1, 1, 32, 64),
        params={"dropout_rate": 0.2, **CAUSAL},
    ),
    # What nobody sees holds NaN: by position at both ends of the band, by mask, and by segment.
    "unseen-by-position": Form(
        t=100, s=300, d=128, params={"causal": True, "q_offset": 100, "window": (30, 0)},
        poisoned=(*range(70), *range(200, 300)),
    ),
    "unseen-by-mask": Form(d=128, h=4, kv=2, mask=(1, 4, 200, 136), params=CAUSAL, poisoned=(100, 135)),
    "unseen-by-row": Form(d=256, mask=(1, 1, 1, 136), poisoned=(0, 100, 135)),
    "unseen-by-segment": Form(segments="unsorted", s=200, poisoned=(5, 150, 199)),
}  # fmt: skip
# With lengths that 8 divides columns come whole.
FORMS |= {
    "windowed-whole": dataclasses.replace(FORMS["windowed"], t=304, s=280),
    "everything-whole": dataclasses.replace(FORMS["everything"], t=136, s=128, mask=(2, 1, 1, 128)),
}
# The newest JAX gets these: several blocks, a part of a head in panels, and every rule at once.
IN_THE_QUICK_RUN = ("causal", "head-208", "everything", "everything-whole")
each_form = pytest.mark.parametrize(
    "form",
    [
        pytest.param(form, id=name, marks=[pytest.mark.quick] if name in IN_THE_QUICK_RUN else [])
        for name, form in FORMS.items()
    ],
)


def test_roles_that_cannot_be_divided_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    form = Form(d=256, params={"softcap": 2.0}, config=HopperGradConfig(divided=True))
    for _ in range(2):
        jax.eval_shape(form.run, form.shapes())
    (said,) = (r.getMessage() for r in caplog.records if "no divided roles" in r.message)
    assert said.endswith("head_dim 256, a soft cap (said once)")


@each_form
def test_numbers_are_right(form: Form) -> None:
    arrays = form.arrays()
    with emulator.emulated():
        made = jax.block_until_ready(jax.jit(form.run, compiler_options=QUICK)(arrays))
    wanted = form.expected(arrays)
    # Probabilities or their gradients, and then the result, are rounded to the type: twice half its epsilon at most.
    bound = float(jnp.finfo(form.dtype).eps)
    assert bound <= ATTENTION_GRAD.tolerance(form.call())
    for name, x in zip(("dq", "dk", "dv"), made, strict=True):
        x, y = np.asarray(x, np.float64), wanted[name]
        assert x.shape == y.shape, name
        error = np.linalg.norm(x - y) / np.linalg.norm(y)
        assert error <= bound, (name, error)  # NaN anywhere fails too
        if name != "dq":
            assert (x[:, :, list(form.poisoned)] == 0).all(), f"{name} of what nobody sees"


IN_EITHER_TYPE = (
    "causal", "packed-64", "packed-bthd", "windowed-whole", "everything-whole", "head-208", "dropped-256",
    "sharers-256", "divided-192",
)  # fmt: skip


@pytest.mark.parametrize("name", IN_EITHER_TYPE)
def test_sums_of_dq_are_right_in_either_type(name: str) -> None:
    """The other forms here share query heads out, and have float32 sums; in 16 bits each loop is shown here."""
    form = FORMS[name]
    form = dataclasses.replace(form, sharers=0)
    config = dataclasses.replace(form.config or default_config(form.call()), sharers=0)
    errors = {}
    for rounded in (False, True):
        chosen = dataclasses.replace(form, config=dataclasses.replace(config, rounded=rounded))
        arrays = chosen.arrays()
        with emulator.emulated():
            dq, *_ = jax.block_until_ready(jax.jit(chosen.run, compiler_options=QUICK)(arrays))
        wanted = chosen.expected(arrays)["dq"]
        errors[rounded] = np.linalg.norm(np.asarray(dq, np.float64) - wanted) / np.linalg.norm(wanted)
    assert errors[False] <= errors[True] * 1.001
    assert errors[True] <= float(jnp.finfo(form.dtype).eps)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("shape", "params", "rounded"),
    [
        ((2, 512, 16, 128), {}, True),
        ((2, 1024, 16, 128), CAUSAL, True),
        ((2, 1024, 16, 128), {}, False),
        ((2, 2048, 16, 128), CAUSAL, False),
        ((2, 512, 16, 256), CAUSAL, True),  # tiles of 64 keys
        ((2, 8192, 16, 128), {"q_offset": -7168, **CAUSAL}, True),  # only the last 1,024 queries see any
        ((2, 8192, 16, 128), {"q_offset": -6144, **CAUSAL}, False),
        ((2, 1024, 16, 256), CAUSAL, False),
        ((2, 8192, 16, 64), {"window": (127, 0), **CAUSAL}, True),
        ((2, 8192, 16, 64), {"window": (4095, 0), **CAUSAL}, False),
        ((1, 32768, 16, 64), {"window": (127, 0), **CAUSAL}, False),  # in two launches
    ],
)
def test_sums_are_rounded_where_few_tiles_add_to_them(
    shape: tuple[int, int, int, int], params: dict[str, Any], rounded: bool
) -> None:
    batch, length, heads, head_dim = shape
    q = jax.ShapeDtypeStruct((batch, heads, length, head_dim), jnp.bfloat16)
    lse = jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)
    with target("gpu", "NVIDIA H200"):
        call = ATTENTION_GRAD.call(q, q, q, *(None,) * 6, q, lse, q, None, **params)
        assert default_config(call).rounded == rounded
        assert {config.rounded for config in candidates(call)} == {rounded}  # a tuner does not trade digits for time


@pytest.mark.quick
@pytest.mark.parametrize(
    ("length", "head_dim", "window", "queries"),
    [(257, 64, None, 64), (512, 64, None, 128), (700, 64, None, 128), (4096, 64, (127, 0), 64), (512, 128, None, 64)],
)
def test_queries_of_a_step(length: int, head_dim: int, window: Any, queries: int) -> None:
    """Of 257, three steps of 128 would make a third more pairs than five of 64."""
    q = jax.ShapeDtypeStruct((2, 12, length, head_dim), jnp.bfloat16)
    lse = jax.ShapeDtypeStruct((2, 12, length), jnp.float32)
    with target("gpu", "NVIDIA H200"):
        call = ATTENTION_GRAD.call(q, q, q, *(None,) * 6, q, lse, q, None, causal=True, window=window)
        assert default_config(call).block_q == queries


@pytest.mark.quick
@pytest.mark.parametrize("more", [{"sharers": 2}, {"parts": 2}])
def test_rounded_sums_are_of_whole_programs(more: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="rounded is of programs that visit all query heads"):
        HopperGradConfig(rounded=True, **more)


@pytest.mark.quick
def test_rounded_sums_are_never_in_float32() -> None:
    """What they start from is not."""
    form = Form(t=256, s=256, d=128, params=CAUSAL)
    for rounded in (False, True):
        config = dataclasses.replace(default_config(form.call()), sharers=0, rounded=rounded)
        jaxpr = jax.make_jaxpr(dataclasses.replace(form, config=config).run)(form.shapes())
        assert (f"f32[1,2,256,{form.d}] = broadcast_in_dim" in str(jaxpr)) != rounded


@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize(
    "form",
    [
        Form(t=70, s=60, d=d, params={"softcap": 5.0} if capped else {})
        for d, capped in ((64, False), (256, True), (256, False))
    ],
    ids=["narrow", "wide", "divided"],
)
def test_a_slow_warpgroup_still_finds_its_keys(form: Form, slow: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one is done with its own, and writes their gradients where the keys were."""
    arrays = form.arrays()
    with emulator.emulated():
        for module in (backward_loops, backward_divided):

            def late(*args: Any, own: Any = module.multiply) -> None:
                if emulator._here.warpgroup == slow:
                    time.sleep(0.05)
                own(*args)

            monkeypatch.setattr(module, "multiply", late)
        made = jax.block_until_ready(jax.jit(form.run, compiler_options=QUICK)(arrays))
    for name, x in zip(("dq", "dk", "dv"), made, strict=True):
        wanted = form.expected(arrays)[name]
        assert np.linalg.norm(np.asarray(x, np.float64) - wanted) <= 2**-7 * np.linalg.norm(wanted), name


# Most mistakes of one show beside a whole number of steps alone.
beside_steps = st.builds(lambda steps, more: max(0, 32 * steps + more), st.integers(0, 6), st.integers(-2, 2))


@given(
    st.integers(1, 300), st.integers(1, 300), st.sampled_from([64, 128]), st.sampled_from([64, 128]),
    st.just(0) | beside_steps, *[st.none() | beside_steps] * 2,
)  # fmt: skip
@example(200, 200, 64, 64, 0, 62, None)
@example(200, 200, 64, 64, 0, None, 62)
@settings(max_examples=300)
def test_steps_without_a_mask_need_none(
    length: int, keys: int, block_q: int, tile: int, offset: int, left: int | None, right: int | None
) -> None:
    """By position: no step that sees a key is left out, and the others all are, but for those past the last query."""
    plan = Plan(
        HopperGradConfig(block_q=block_q), tile=tile, keys=keys, length=length, sharers=2, programs=1, offset=offset,
        left=left, right=right, scale=1.0, softcap=None, physical="bhtd",
    )  # fmt: skip
    query, key = np.arange(plan.steps * block_q)[:, None] + offset, np.arange(-(-keys // tile) * tile)[None]
    sees = np.ones((query.size, key.size), bool)
    sees &= True if left is None else key >= query - left
    sees &= True if right is None else key <= query + right
    for number in range(key.size // tile):
        with emulator.emulated(), emulator.as_program(batch=0, head=0, tile=number):
            walk = Walk(plan, {})
            first = int(walk.first_key)
            ranges = [[*map(int, each)] for each in walk._ranges(walk.first_key, tile)]
        visited = {step: bool(masked) for begin, end, masked in ranges for step in range(begin, end)}
        assert list(visited) == sorted(visited), "in one order, each once"
        for step in range(plan.steps):
            own = np.s_[step * block_q : (step + 1) * block_q, first : first + tile]
            inside = (sees & (key < keys))[own]
            if inside[: length - step * block_q].any():
                assert step in visited
                assert visited[step] or inside.all()
            if step in visited and inside.all():
                assert not visited[step]


def _lowered(form: Form) -> str:
    return str(jax.export.export(jax.jit(form.run), platforms=["cuda"])(form.shapes()).mlir_module())


# One of each body and each operand; the others differ in sizes only.
LOWERED = (
    "plain", "capped", "head-96", "head-112", "head-208", "sharers", "sharers-256", "packed", "packed-64",
    "dropped", "dropped-256", "blocks", "masked-64", "masked-row", "everything-256", "unseen-by-segment",
    "causal", "sharers-masked", "everything-whole",
)  # fmt: skip


@pytest.mark.spread(5)
@pytest.mark.quick(cases=4)
@pytest.mark.parametrize("name", LOWERED)
def test_lowers_for_cuda(name: str) -> None:
    assert "mosaic_gpu" in _lowered(FORMS[name])


def test_sums_of_dq_begin_with_what_the_compiler_does_not_know() -> None:
    """Zeros that it knows it makes for all layers of a step at once, and keeps until each one's turn."""
    text = _lowered(FORMS["plain"])
    (zeros,) = [line for line in text.splitlines() if "stablehlo.popcnt" in line]
    assert "tensor<ui16>" in zeros


@pytest.mark.quick
@pytest.mark.parametrize("name", ["plain", "everything"])
def test_lowers_inside_shard_map(name: str) -> None:
    """Tables and masks that all devices share beside operands that they do not, with JAX's checks on."""
    form = FORMS[name]
    spec = jax.sharding.PartitionSpec("x")
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    shapes = form.shapes()
    shared = {n: jax.sharding.PartitionSpec() if x.shape[0] != form.b else spec for n, x in shapes.items()}
    mapped = jax.shard_map(form.run, mesh=mesh, in_specs=(shared,), out_specs=(spec,) * 3)
    text = jax.jit(mapped).trace(shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


def _prepared(grid: Grid, heads: tuple[int, int], **given: Any) -> dict[str, np.ndarray]:
    names = ("mask", "q_segments", "kv_segments", "block_mask")
    size = given.pop("block_size", None)
    position = {"causal": grid.band.above == 0, "q_offset": 0, "window": None}

    def make(given: Mapping[str, Any]) -> Any:
        return backward.mask_operands(grid, heads, *(given.get(n) for n in names), size, position)

    return jax.tree.map(np.asarray, jax.jit(make, compiler_options=QUICK)(given))


FAR = 2**30


def test_dead_steps_are_not_in_the_table() -> None:
    """Keys by 128, queries by 64: causality leaves steps from the diagonal on, the segments cut at 256."""
    grid = Grid(512, Band(-FAR, 0, 512), 64, 128)
    segments = (np.arange(512)[None] >= 256).astype(np.int32)
    table = _prepared(grid, (1, 1), q_segments=segments, kv_segments=segments)["table"]
    listed = [row[3 : 3 + row[1]].tolist() for row in table[0, 0]]
    # The diagonal's two steps see the tile in part, and come last.
    assert listed == [[2, 3, 0, 1], [2, 3], [6, 7, 4, 5], [6, 7]]
    assert table[0, 0, :, 0].tolist() == [2, 0, 2, 0]
    assert not table[..., 2].any(), "every key is seen"


def test_the_table_lists_every_head_that_shares_the_keys() -> None:
    block_mask = np.zeros((1, 4, 2, 2), bool)
    block_mask[0, 1, :, 0] = True  # the second query head of the first key head
    block_mask[0, 2, 1, 1] = True  # the first of the second
    grid = Grid(128, Band(-FAR, FAR, 256), 64, 128)
    table = _prepared(grid, (4, 2), block_mask=block_mask, block_size=(64, 128))["table"]
    assert table.shape == (1, 2, 2, 3 + 2 * 2 + 1)
    listed = [[row[3 : 3 + row[1]].tolist() for row in head] for head in table[0]]
    assert listed == [[[2, 3], []], [[], [1]]]  # member * 2 + step


def test_a_mask_is_packed_along_the_queries() -> None:
    mask = np.zeros((1, 1, 70, 5), bool)
    mask[0, 0, 33, 2] = mask[0, 0, 31, 4] = mask[0, 0, 64, 0] = True
    words = np.asarray(backward.packed_mask(jnp.asarray(mask), Grid(70, Band(-FAR, FAR, 5), 64, 64)))
    assert words.shape == (1, 1, 4, 64)
    found = {(w, s): words[0, 0, w, s] for w, s in zip(*np.nonzero(words[0, 0]), strict=True)}
    assert found == {(1, 2): 2, (0, 4): -(2**31), (2, 0): 1}


@pytest.mark.parametrize("name", ["packed", "everything", "everything-256", "masked-64"])
def test_the_largest_candidate_fits_the_chip(name: str) -> None:
    """Mosaic counts shared memory when it lowers, and refuses what does not fit."""
    form = FORMS[name]
    made = candidates(form.call())
    assert default_config(form.call()) in made
    _lowered(dataclasses.replace(form, config=max(made, key=lambda c: c.stages)))


def test_lines_take_the_room_of_a_third_stage() -> None:
    stages = {name: {c.stages for c in candidates(FORMS[name].call())} for name in ("plain", "packed")}
    assert stages == {"plain": {2, 3}, "packed": {2}}


@pytest.mark.parametrize(
    ("options", "rule"),
    [({"do_stages": -1}, "do_stages is 0 or more"), *(({"dq_columns": n}, "multiple of 16") for n in (0, -16, 24))],
)
def test_a_config_that_cannot_be_says_so(options: dict[str, int], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        HopperGradConfig(divided=True, **options)  # type: ignore[arg-type]


def test_refusals_say_why() -> None:
    assert all(refuses(form.call()) is None for form in FORMS.values())
    q = jax.ShapeDtypeStruct((1, 1, 128, 64), jnp.bfloat16)
    lse = jax.ShapeDtypeStruct((1, 1, 128), jnp.float32)
    bias = jax.ShapeDtypeStruct((1, 1, 128, 128), jnp.float32)

    def call(q: Any, bias: Any = None) -> Call:
        return ATTENTION_GRAD.call(q, q, q, bias, *[None] * 5, q, lse, q, None)

    with target("gpu", "NVIDIA H200"):
        assert "no form with bias" in str(refuses(call(q, bias)))
        assert "bfloat16 or float16" in str(refuses(call(jax.ShapeDtypeStruct(q.shape, jnp.float32))))
    with target("gpu", "NVIDIA A100"):
        assert "Hopper" in str(refuses(call(q)))


@pytest.mark.quick
@pytest.mark.parametrize("name", ["gpt-4k", "wide-4k"])
def test_one_chips_program_lowers(name: str) -> None:
    """As a shard of a mesh or inside shard_map it stands in custom_vmap alone, which takes no stray reference."""
    fn, args = implementation_program(ATTENTION_GRAD, ATTENTION_GRAD.case(name), "hopper", None, "NVIDIA H200")
    result = lower_for(fn, args, "cuda")
    assert result.ok, result.error
    assert result.custom_calls


@pytest.mark.parametrize(
    ("head_dim", "right", "length", "group", "hidden"),
    [
        (128, 0, 4096, 8, True),
        (64, 0, 4096, 8, False),
        (128, None, 4096, 8, False),
        # The zero is a visit's number shifted by 20 bits: a visit past those would read another block of keys.
        (128, 0, 64 * 2**14, 64, True),
        (128, 0, 64 * 2**14, 65, False),
    ],
)
def test_a_hidden_zero_is_zero_at_every_visit(
    monkeypatch: pytest.MonkeyPatch, head_dim: int, right: int | None, length: int, group: int, hidden: bool
) -> None:
    monkeypatch.setattr(hopper, "hidden_zero", lambda done, stage: done >> 20 + stage)
    plan = Plan(
        HopperGradConfig(block_q=64), tile=128, keys=length, length=length, sharers=group, programs=1, offset=0,
        left=None, right=right, scale=1.0, softcap=None, physical="bhtd",
    )  # fmt: skip
    last = np.int32(group * plan.steps - 1)
    assert [int(zero) for zero in plan.hidden_zeros(head_dim, last, 3)] == [0, 0, 0]
    assert isinstance(plan.hidden_zeros(head_dim, last, 1)[0], np.int32) is hidden


@pytest.mark.quick
@pytest.mark.parametrize(
    ("head_dim", "window", "first"),
    [
        (64, None, "hopper"),
        (64, (1023, 0), "hopper"),
        (64, (127, 0), "hopper"),  # few tiles add to a row
        (64, (479, 0), "cudnn"),
        (256, (511, 0), "hopper"),
        (80, (127, 0), "cudnn"),
        (256, (127, 0), "cudnn"),
    ],
)
def test_windows_of_which_none_was_timed_are_left_to_the_vendor(head_dim: int, window: Any, first: str) -> None:
    q, k = (jax.ShapeDtypeStruct((1, heads, 4096, head_dim), jnp.bfloat16) for heads in (64, 8))
    lse = jax.ShapeDtypeStruct((1, 64, 4096), jnp.float32)
    with target("gpu", "NVIDIA H200"):
        call = ATTENTION_GRAD.call(q, k, k, *(None,) * 6, q, lse, q, causal=True, window=window)
        names = evidence.order(call, "measured").names
    assert next(name for name in names if name in ("hopper", "cudnn")) == first
