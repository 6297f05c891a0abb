"""Activation and its gradient for Hopper, in Pallas (Mosaic GPU): numbers pass through registers, each of them once.

A program is one warpgroup and several of them share a multiprocessor. It takes one piece after another: a few chunks,
in which each thread has `vector` neighbouring numbers. Many programs take a few pieces each; or few, all at work
together, take many, the next one on its way while one is computed.

Without dropout rows do not matter: pieces are of the array as it lies, a multiple of `vector` long, and the last one
starts early where it would go beyond the end. With dropout a program keeps to a piece of the columns and walks down the
rows, so all that the hash needs of a column is worked out once, and what a row adds to it are two scalars; a pair of
columns has one hash.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.errors import rule_error
from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.core.varying import out_struct
from capibara.kernels.ops.layers.activation.folding import fold_rows, group_scalars, word
from capibara.kernels.ops.layers.activation.masking import Strides, scale
from capibara.kernels.ops.layers.activation.tanh_formulas import value, value_and_slope
from capibara.kernels.pallas import prng
from capibara.kernels.pallas.hopper import load, multiprocessors, named, refuses_chip

THREADS = 128  # of a warpgroup
VECTORS = (8, 4, 2)  # neighbouring numbers of a thread: 16 bytes of bfloat16 at most, a pair at least

# Nothing is shared between threads, so the barriers that Pallas would put around stores are not needed.
COMPILER_PARAMS = plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True)


@dataclasses.dataclass(frozen=True)
class StreamConfig:
    """How many programs share the work, what each takes at a time, and whether it fetches the next piece early."""

    programs: int
    chunks: int
    vector: int = 8
    ahead: bool = True

    def __post_init__(self) -> None:
        if self.programs < 1 or self.chunks < 1 or self.vector not in VECTORS:
            raise rule_error(
                "programs and chunks are 1 or more, and vector is 8, 4 or 2", self, "use programs=8448, chunks=2"
            )

    @property
    def width(self) -> int:
        """Numbers of a chunk."""
        return THREADS * self.vector

    @property
    def piece(self) -> int:
        """Numbers that a program takes at a time, of one row where rows matter."""
        return self.width * self.chunks


def _length(call: Call) -> int:
    """What pieces are cut of: a row, or where nothing is dropped the whole array."""
    shape = call.need("x").shape
    return shape[-1] if call.params["rate"] else math.prod(shape)


def candidates(call: Call) -> Sequence[StreamConfig]:
    """The best of those that an H200 timed first: gelu with dropout at 16384x16384, and with a gate at 16384x8192."""
    length, cores = _length(call), multiprocessors(call.target.device_kind)
    whole = bool(call.params["rate"])  # pieces fill a row
    vectors = [v for v in VECTORS if length % (THREADS * v if whole else v) == 0 and length >= THREADS * v]
    forms = [
        (64, 2, False), (128, 1, False), (6, 2, True), (8, 1, True), (4, 4, True), (8, 2, True), (16, 1, True),
        (32, 4, False), (16, 1, False),
    ]  # fmt: skip
    if call["up"] is not None:
        forms.sort(key=lambda form: form != (8, 1, True))
    configs = []
    for each, chunks, ahead in forms:
        lines = length // (THREADS * vectors[0]) if vectors else 0
        if lines >= chunks and (lines % chunks == 0 or not whole):
            configs.append(StreamConfig(each * cores, chunks, vectors[0], ahead))
    # Narrower vectors too, though they ask the memory more often: once, as a check on the widest.
    configs += [dataclasses.replace(configs[0], vector=vector) for vector in vectors[1:]]
    return configs


def refuses(call: Call) -> str | None:
    chip = refuses_chip(call.target.device_kind)
    if chip is not None:
        return chip
    x = call.need("x")
    if np.dtype(x.dtype).name != "bfloat16":
        return f"its tanh is an instruction good to 11 bits, which is enough for bfloat16; x is {x.dtype.name}"
    if math.prod(x.shape) == 0:
        return "x is empty"
    if not call.params["rate"] and math.prod(x.shape) >= 2**31:
        return "it counts numbers in 32 bits"
    if not candidates(call):
        if call.params["rate"]:
            return f"each of 128 threads takes pairs of columns, so it takes a multiple of 256; not {x.shape[-1]}"
        return f"each of 128 threads takes pairs of numbers, 256 or more and an even count; not {math.prod(x.shape)}"
    return None


def _computed(values: Sequence[Any], kind: str, has_up: bool, grad: bool) -> list[Any]:
    """The results, in float32, of one chunk of each operand."""
    x, *others = (v.astype(jnp.float32) for v in values)
    if not grad:
        y = value(kind, x)
        return [y * others[0] if has_up else y]
    flow = others[-1]
    if not has_up:
        slope = value_and_slope(kind, x)[1]
        return [flow if slope is None else flow * slope]
    y, slope = value_and_slope(kind, x)
    through = flow * others[0]
    return [through if slope is None else through * slope, flow * y]


def _flat_program(*refs: Any, config: StreamConfig, programs: int, kind: str, has_up: bool, grad: bool) -> None:
    inputs = 1 + has_up + grad
    sources, results = refs[:inputs], refs[inputs:]
    (length,) = sources[0].shape
    layout = plgpu.Layout.WG_STRIDED((config.width,), vec_size=config.vector)
    number = lax.axis_index("program")
    whole = length // config.piece
    count = lax.div(whole - number + (programs - 1), programs)
    if length % config.piece:
        # What is left is of the program that has the last whole piece, parts of which it computes again.
        count = count + jnp.where(number == (whole - 1) % programs, 1, 0)

    def place(turn: Any, chunk: int) -> Any:
        first = lax.min((number + turn * programs) * config.piece, length - config.piece)
        return (pl.ds(first + chunk * config.width, config.width),)

    def fetch(turn: Any) -> tuple[Any, ...]:
        return tuple(load(ref.at[place(turn, c)], layout) for c in range(config.chunks) for ref in sources)

    def step(turn: Any, carry: Any) -> Any:
        piece = carry if config.ahead else fetch(turn)
        following = fetch(lax.min(turn + 1, count - 1)) if config.ahead else None
        for chunk in range(config.chunks):
            outs = _computed(piece[chunk * inputs : (chunk + 1) * inputs], kind, has_up, grad)
            for ref, terms in zip(results, outs, strict=True):
                ref.at[place(turn, chunk)][...] = terms.astype(ref.dtype)
        return following

    lax.fori_loop(0, count, step, fetch(jnp.int32(0)) if config.ahead else None)


def _program(
    *refs: Any, config: StreamConfig, rows: int, share: int, stride: int, kind: str, rate: float, offset: bool,
    has_up: bool, grad: bool,
) -> None:  # fmt: skip
    inputs = 1 + has_up + grad
    scalars_hbm, sources, results = refs[0], refs[1 : 1 + inputs], refs[1 + inputs :]
    pieces = sources[0].shape[1] // config.piece
    layout = plgpu.Layout.WG_STRIDED((config.width,), vec_size=config.vector)

    number = lax.axis_index("program")
    piece, rest = lax.rem(number, pieces), lax.div(number, pieces)
    first, group = lax.rem(rest, share), lax.div(rest, share)
    count = lax.div(rows - first + (share - 1), share)
    low, high, begin, first_column = (scalars_hbm[group * 4 + i] for i in range(4))

    def place(turn: Any, chunk: int) -> Any:
        return group * rows + first + turn * share, pl.ds(piece * config.piece + chunk * config.width, config.width)

    def fetch(turn: Any) -> tuple[Any, ...]:
        return tuple(load(ref.at[place(turn, c)], layout) for c in range(config.chunks) for ref in sources)

    def keep(keys: Any, chunk: int) -> Any:
        begins = piece * config.piece + chunk * config.width
        columns = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, (config.width,), 0), layout)
        if offset:
            columns = columns + (begins + first_column)
            pairs = lax.shift_right_logical(columns, jnp.full(columns.shape, 1, jnp.int32))
        else:
            # A chunk begins at an even column. So the compiler can tell that neighbours have one hash.
            pairs = lax.shift_right_logical(columns, jnp.full(columns.shape, 1, jnp.int32)) + lax.div(begins, 2)
        return prng.pair_kept_of(prng.random_bits(keys, pairs), columns, rate)

    def step(turn: Any, carry: Any) -> Any:
        row = carry if config.ahead else fetch(turn)
        following = fetch(lax.min(turn + 1, count - 1)) if config.ahead else None
        keys = prng.row_keys((low, high), (first + turn * share) * word(stride) + begin)
        for chunk in range(config.chunks):
            outs = _computed(row[chunk * inputs : (chunk + 1) * inputs], kind, has_up, grad)
            kept = keep(keys, chunk)
            for ref, terms in zip(results, outs, strict=True):
                ref.at[place(turn, chunk)][...] = jnp.where(kept, terms * scale(rate), 0.0).astype(ref.dtype)
        return following

    lax.fori_loop(0, count, step, fetch(jnp.int32(0)) if config.ahead else None)


def _run(
    operands: list[jax.Array], seed: Any, offsets: Any, outputs: int, config: StreamConfig, kind: str, rate: float,
    strides: Strides | None, has_up: bool, grad: bool,
) -> list[jax.Array]:  # fmt: skip
    x = operands[0]
    if not rate:
        if x.size < config.piece or x.size % config.vector:
            raise rule_error(
                "Without dropout an array has a piece or more, and a multiple of `vector` numbers",
                f"{x.size} numbers and {config}", "use fewer chunks, or a smaller vector",
            )  # fmt: skip
        programs = min(config.programs, x.size // config.piece)
        outs = plgpu.kernel(
            named("activation", _flat_program, config=config, programs=programs, kind=kind, has_up=has_up, grad=grad),
            out_type=[out_struct((x.size,), x.dtype, x)] * outputs,
            grid=(programs,),
            grid_names=("program",),
            compiler_params=COMPILER_PARAMS,
        )(*(v.reshape(-1) for v in operands))
        return [v.reshape(x.shape) for v in outs]
    *lead, columns = x.shape
    fold = fold_rows(tuple(lead), seed, strides)
    flat = (fold.groups * fold.rows, columns)
    pieces = columns // config.piece
    share = max(1, min(fold.rows, config.programs // (fold.groups * pieces)))
    outs = plgpu.kernel(
        named(
            "activation", _program, config=config, rows=fold.rows, share=share, stride=fold.stride, kind=kind,
            rate=rate, offset=offsets is not None, has_up=has_up, grad=grad,
        ),
        out_type=[out_struct(flat, x.dtype, x)] * outputs,
        grid=(fold.groups * share * pieces,),
        grid_names=("program",),
        compiler_params=COMPILER_PARAMS,
    )(group_scalars(fold, seed, offsets), *(v.reshape(flat) for v in operands))  # fmt: skip
    return [v.reshape(x.shape) for v in outs]


def activation_forward(
    x: jax.Array, up: jax.Array | None = None, seed: jax.Array | None = None, offsets: jax.Array | None = None,
    *, config: StreamConfig, kind: str, rate: float, strides: Strides | None,
) -> jax.Array:  # fmt: skip
    """The forward pass as one kernel; see the module's text."""
    operands = [v for v in (x, up) if v is not None]
    return _run(operands, seed, offsets, 1, config, kind, rate, strides, up is not None, False)[0]


def activation_backward(
    x: jax.Array, up: jax.Array | None, seed: jax.Array | None, offsets: jax.Array | None, d_out: jax.Array,
    *, config: StreamConfig, kind: str, rate: float, strides: Strides | None,
) -> tuple[Any, Any]:  # fmt: skip
    operands = [v for v in (x, up, d_out) if v is not None]
    outputs = 1 if up is None else 2
    d_x, *d_up = _run(operands, seed, offsets, outputs, config, kind, rate, strides, up is not None, True)
    return d_x, d_up[0] if d_up else None


LARGE = 1 << 23  # elements, from which on a pass takes longer than it takes to start one


def _ahead_of(call: Call) -> tuple[str, ...]:
    """On an H200, against xla's pass. Alone: gelu 1.2 to 1.7 times its speed and gelu_tanh 1.25 to 1.6, from 16 rows of
    5120 on; silu and relu 1.2 from 8192x4096 on. With dropout 1.1 to 2.1 times, but for relu, 0.97. With a gate gelu
    1.16 to 1.2 times, gelu_tanh 1.04 to 1.07, silu 0.96 to 1.03; with dropout, too, gelu 1.15, silu 1.0, and 0.7 where
    the columns are cut in many pieces. Other kinds were timed with dropout alone."""
    kind, large = call.params["kind"], math.prod(call.need("x").shape) >= LARGE
    if call.params["rate"]:
        return () if kind == "relu" or (call["up"] is not None and kind != "gelu") else ("xla",)
    kinds = ("gelu", "gelu_tanh", *(("silu", "relu") if large and call["up"] is None else ()))
    return ("xla",) if kind in kinds else ()


def _ahead_of_grad(call: Call) -> tuple[str, ...]:
    """On an H200, against xla's pass, without dropout or gate: both passes of gelu 1.0 to 1.8 times its speed and of
    gelu_tanh 1.0 to 1.3, from 16 rows of 5120 on, this one alone 0.8 of few rows and up to 1.9; silu 1.0, relu 0.96.
    With dropout gelu 1.1, gelu_tanh 1.0, relu 0.98, and others as the forward pass. With a gate 0.85 to 0.92 times,
    dropout or not."""
    kind = call.params["kind"]
    if call["up"] is not None or kind in ("silu", "relu"):
        return ()
    return ("xla",) if call.params["rate"] or kind in ("gelu", "gelu_tanh") else ()


def _implementation(fn: Any, ahead_of: Callable[[Call], tuple[str, ...]]) -> Implementation:
    return Implementation(
        "hopper",
        fn,
        platforms=("gpu",),
        refuses=refuses,
        ahead_of=ahead_of,
        kernel=True,
        config_type=StreamConfig,
        candidates=candidates,
    )


IMPLEMENTATION = _implementation(activation_forward, _ahead_of)
GRAD_IMPLEMENTATION = _implementation(activation_backward, _ahead_of_grad)
