"""gemm for Hopper's tensor cores, in Pallas (Mosaic GPU).

A persistent grid, one program a multiprocessor, walks the output tiles in a snake so that neighbours share operands
in L2. In each program one warpgroup only fetches tiles (TMA, several stages deep) and two multiply (wgmma) and
write back; the epilogue is applied to the float32 accumulator in registers and stored through shared memory in
double-buffered pieces while the next tile is already being fetched.

Sizes need not be multiples of a tile: TMA fills what lies past an edge with zeros and drops what is written there.
It does demand that rows lie 16 bytes apart, so the last axes are multiples of eight 16-bit numbers.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara import hardware
from capibara.errors import rule_error
from capibara.kernels.context import current_target
from capibara.kernels.linalg.gemm.reference import ACTIVATIONS
from capibara.kernels.op import Call, Implementation
from capibara.kernels.transforms import out_struct

SMEM_BYTES = 227 * 1024  # what one program may have on Hopper
TMA_ALIGNMENT = 16  # bytes between rows


@dataclasses.dataclass(frozen=True)
class HopperConfig:
    """One warpgroup's tile, pipeline depth, and the order in which output tiles are visited.

    The two multiplying warpgroups sit side by side along `split` ("m" or "n"), so a program's tile is twice as
    large there. Tiles are visited along `minor` in bands `band` tiles wide.
    """

    tile_m: int
    tile_n: int
    tile_k: int = 64
    stages: int = 4
    split: str = "m"
    minor: str = "n"
    band: int = 8

    def __post_init__(self) -> None:
        if self.tile_m % 64 or not 64 <= self.tile_m <= 256:
            raise rule_error("tile_m is 64, 128, 192 or 256", self.tile_m, "use 128")
        if self.tile_n % 64 or not 64 <= self.tile_n <= 256:
            raise rule_error("tile_n is 64, 128, 192 or 256", self.tile_n, "use 128")
        if self.tile_k not in (32, 64, 128):
            raise rule_error("tile_k is 32, 64 or 128", self.tile_k, "use 64")
        if self.stages < 2:
            raise rule_error("stages is two or more", self.stages, "use 4")
        if {self.split, self.minor} - {"m", "n"}:
            raise rule_error("split and minor are 'm' or 'n'", (self.split, self.minor), "use 'm' or 'n'")

    @property
    def program_tile(self) -> tuple[int, int]:
        return self.tile_m * (1 + (self.split == "m")), self.tile_n * (1 + (self.split == "n"))

    @property
    def smem_bytes(self) -> int:
        """Shared memory of the operands' stages and the two warpgroups' double-buffered 64x64 output pieces."""
        m, n = self.program_tile
        return 2 * self.stages * (m + n) * self.tile_k + 2 * 2 * 64 * 64 * 4


def candidates(call: Call) -> Sequence[HopperConfig]:
    """The tiles worth timing: those whose accumulator fits the registers and whose stages fit shared memory."""
    tiles = [(128, 128, "m"), (128, 128, "n"), (64, 256, "m"), (128, 192, "m"), (256, 64, "n"), (64, 128, "m")]
    made = [
        HopperConfig(m, n, 64, stages, split, minor, band)
        for m, n, split in tiles
        for stages in (4, 5)
        for minor in ("m", "n")
        for band in (4, 8, 16)
    ]
    return [c for c in made if c.smem_bytes <= SMEM_BYTES]


def default_config(call: Call) -> HopperConfig:
    """Large tiles when they fill the chip; smaller ones when there are too few of them to go round."""
    from capibara.kernels.linalg.gemm.api import sizes

    count, m, n, _ = sizes(call)
    large = HopperConfig(128, 128, 64, 4, "m", "n", 8)
    rows, columns = large.program_tile
    tiles = count * math.ceil(m / rows) * math.ceil(n / columns)
    if tiles >= multiprocessors(call.target.device_kind) // 2:
        return large
    return HopperConfig(64, 128, 64, 4, "m", "n", 8)


def multiprocessors(device_kind: str) -> int:
    chip = hardware.chip_for(device_kind)
    return (chip.cores_per_chip if chip is not None else None) or 132


def refuses(call: Call) -> str | None:
    from capibara.kernels.linalg.gemm.api import out_dtype_of, sizes

    a, b, bias, residual = call.args
    assert a is not None
    assert b is not None
    if not call.target.device_kind.startswith(("NVIDIA H100", "NVIDIA H200", "NVIDIA GH200", "NVIDIA H800")):
        return f"it is written for Hopper (wgmma); this is {call.target.device_kind}"
    if a.dtype != b.dtype or np.dtype(a.dtype).name not in ("bfloat16", "float16"):
        return f"its tensor-core form takes two bfloat16 or two float16 operands, not {a.dtype} and {b.dtype}"
    if residual is not None and residual.dtype != out_dtype_of(call):
        return f"the residual has the output's type {out_dtype_of(call)}, not {residual.dtype}"
    if out_dtype_of(call) not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"it writes bfloat16, float16 or float32, not {out_dtype_of(call)}"
    if 0 in a.shape or 0 in b.shape:
        return "an operand is empty"
    if bias is not None and len(bias.shape) == 2:
        return "the bias differs from one batch element to the next"
    _, _, n, _ = sizes(call)
    for name, width, size in (
        ("a", a.shape[-1], a.dtype.itemsize),
        ("b", b.shape[-1], b.dtype.itemsize),
        ("the output", n, out_dtype_of(call).itemsize),
    ):
        if width * size % TMA_ALIGNMENT:
            return f"rows of {name} are {width * size} bytes long, and TMA wants a multiple of {TMA_ALIGNMENT}"
    return None


def _swizzled(columns: int, dtype: Any) -> tuple[Any, ...]:
    """The shared-memory layout that wgmma and TMA agree on for tiles this wide."""
    size = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(columns * size * 8)
    return plgpu.TilingTransform((8, swizzle // size)), plgpu.SwizzleTransform(swizzle)


def mosaic_gpu(
    a: jax.Array,
    b: jax.Array,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    *,
    config: HopperConfig,
    transpose_a: bool = False,
    transpose_b: bool = False,
    activation: str | None = None,
    precision: str | None = None,
    out_dtype: str | None = None,
) -> jax.Array:
    """gemm as one persistent kernel; see the module's text. 16-bit operands have one precision."""
    m, k = a.shape[-2:][::-1] if transpose_a else a.shape[-2:]
    n = b.shape[-2] if transpose_b else b.shape[-1]
    batched = a.ndim == 3 or b.ndim == 3
    count = (a.shape[0] if a.ndim == 3 else b.shape[0]) if batched else 1
    out = out_struct((count, m, n) if batched else (m, n), jnp.dtype(out_dtype) if out_dtype else a.dtype, a)
    body = functools.partial(
        _program,
        config=config,
        sizes=(count, m, n, k),
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        activation=activation,
        has_bias=bias is not None,
        has_residual=residual is not None,
    )
    kernel = plgpu.kernel(
        body,
        out_type=out,
        grid=(multiprocessors(current_target().device_kind),),
        grid_names=("program",),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    operands = [a, b]
    if bias is not None:
        operands.append(bias)
    if residual is not None:
        operands.append(residual)
    return kernel(*operands)  # type: ignore[no-any-return]


def _program(
    *refs: Any, config: HopperConfig, sizes: tuple[int, int, int, int], transpose_a: bool, transpose_b: bool,
    activation: str | None, has_bias: bool, has_residual: bool,
) -> None:  # fmt: skip
    a_hbm, b_hbm, *rest = refs
    bias_hbm = rest.pop(0) if has_bias else None
    residual_hbm = rest.pop(0) if has_residual else None
    (out_hbm,) = rest
    count, m, n, k = sizes
    tile_m, tile_n, tile_k = config.tile_m, config.tile_n, config.tile_k
    program_m, program_n = config.program_tile
    steps = math.ceil(k / tile_k)
    grid_m, grid_n = math.ceil(m / program_m), math.ceil(n / program_n)
    piece = 64  # the epilogue goes through shared memory in 64x64 pieces
    pieces = [(r, c) for r in range(0, tile_m, piece) for c in range(0, tile_n, piece)]
    slots = min(2, len(pieces))
    a_block = (tile_k, program_m) if transpose_a else (program_m, tile_k)
    b_block = (program_n, tile_k) if transpose_b else (tile_k, program_n)

    def pipeline(step: Any, context: Any) -> Any:
        return plgpu.emit_pipeline_warp_specialized(
            step,
            grid=(steps,),
            in_specs=[
                plgpu.BlockSpec(
                    a_block,
                    (lambda s: (s, 0)) if transpose_a else (lambda s: (0, s)),
                    transforms=_swizzled(a_block[1] if a_block[1] < 64 else 64, a_hbm.dtype),
                    memory_space=plgpu.SMEM,
                    delay_release=1,
                ),
                plgpu.BlockSpec(
                    b_block,
                    (lambda s: (0, s)) if transpose_b else (lambda s: (s, 0)),
                    transforms=_swizzled(b_block[1] if b_block[1] < 64 else 64, b_hbm.dtype),
                    memory_space=plgpu.SMEM,
                    delay_release=1,
                ),
            ],
            max_concurrent_steps=config.stages,
            num_compute_wgs=2,
            memory_registers=40,
            wg_axis="warpgroup",
            compute_context=context,
        )

    nothing = lambda *_, **__: None  # noqa: E731
    first_a = a_hbm.at[0] if len(a_hbm.shape) == 3 else a_hbm
    first_b = b_hbm.at[0] if len(b_hbm.shape) == 3 else b_hbm

    @functools.partial(
        pl.run_scoped,
        allocations=pipeline(nothing, nothing).get_allocations(first_a, first_b),
        out_smem=plgpu.SMEM((2, slots, piece, piece), out_hbm.dtype, transforms=_swizzled(piece, out_hbm.dtype)),
        residual_arrived=plgpu.Barrier(num_barriers=2 * slots) if has_residual else None,
        collective_axes="warpgroup",
    )
    def _tiles(allocations: Any, out_smem: Any, residual_arrived: Any) -> None:
        warpgroup = lax.axis_index("warpgroup")

        @plgpu.nd_loop((count * grid_m * grid_n,), collective_axes="program")
        def _tile(loop: Any) -> None:
            (index,) = loop.index
            group = index // (grid_m * grid_n)
            row, column = plgpu.planar_snake(
                index % (grid_m * grid_n), (grid_m, grid_n), 0 if config.minor == "m" else 1, config.band
            )
            matrix_a = a_hbm.at[group] if len(a_hbm.shape) == 3 else a_hbm
            matrix_b = b_hbm.at[group] if len(b_hbm.shape) == 3 else b_hbm
            matrix_out = out_hbm.at[group] if len(out_hbm.shape) == 3 else out_hbm
            rows, columns = pl.ds(row * program_m, program_m), pl.ds(column * program_n, program_n)
            # Where this warpgroup's part of the program's tile starts.
            start_m = row * program_m + (warpgroup * tile_m if config.split == "m" else 0)
            start_n = column * program_n + (warpgroup * tile_n if config.split == "n" else 0)
            part_m = pl.ds(warpgroup * tile_m, tile_m) if config.split == "m" else slice(None)
            part_n = pl.ds(warpgroup * tile_n, tile_n) if config.split == "n" else slice(None)

            def write_back(evaluate: Any) -> None:
                @functools.partial(pl.run_scoped, accumulator=plgpu.ACC((tile_m, tile_n), jnp.float32))
                def _scope(accumulator: Any) -> None:
                    evaluate(accumulator)
                    z = accumulator[...]
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    for number, (r, c) in enumerate(pieces):
                        slot = number % slots
                        at = (pl.ds(start_m + r, piece), pl.ds(start_n + c, piece))
                        staged = out_smem.at[warpgroup, slot]
                        plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)
                        value = z[r : r + piece, c : c + piece]
                        if bias_hbm is not None:
                            line = bias_hbm[pl.ds(start_n + c, piece)].astype(jnp.float32)
                            value = value + lax.broadcast_in_dim(line, value.shape, (1,))
                        if activation is not None:
                            value = ACTIVATIONS[activation](value)
                        if residual_hbm is not None:
                            matrix = residual_hbm.at[group] if len(residual_hbm.shape) == 3 else residual_hbm
                            arrived = residual_arrived.at[warpgroup * slots + slot]
                            plgpu.copy_gmem_to_smem(matrix.at[at], staged, arrived)
                            plgpu.barrier_wait(arrived)
                            value = value + staged[...].astype(jnp.float32)
                        staged[...] = value.astype(out_hbm.dtype)
                        plgpu.commit_smem()
                        plgpu.copy_smem_to_gmem(staged, matrix_out.at[at])

            def multiply(_: Any, a_smem: Any, b_smem: Any, accumulator: Any) -> Any:
                left = plgpu.transpose_ref(a_smem, (1, 0)) if transpose_a else a_smem
                right = plgpu.transpose_ref(b_smem, (1, 0)) if transpose_b else b_smem
                plgpu.wgmma(accumulator, left.at[part_m], right.at[:, part_n])
                plgpu.wgmma_wait(1)
                return accumulator

            pipeline(multiply, write_back)(
                matrix_a.at[:, rows] if transpose_a else matrix_a.at[rows, :],
                matrix_b.at[columns, :] if transpose_b else matrix_b.at[:, columns],
                allocations=allocations,
            )

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


IMPLEMENTATION = Implementation(
    "mosaic_gpu",
    mosaic_gpu,
    platforms=("gpu",),
    refuses=refuses,
    # cuBLAS holds the bare product; what it cannot do is apply an activation on the way out.
    rank=lambda call: 20 if call.params["activation"] is not None else 5,
    kernel=True,
    config_type=HopperConfig,
    default_config=default_config,
    candidates=candidates,
)
