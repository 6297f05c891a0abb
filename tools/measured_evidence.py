"""Make the table of measured evidence of a chip out of the runs that benchmarks/results has of it.

    python tools/measured_evidence.py

A row is one call that several implementations of an op were timed at in one run, or one implementation beside what a
user would write (a peer, under its own name), and says in which file and row it stands. Of several files a later one
speaks for the calls and implementations that it has. What one implementation alone was timed at is left out, and so
are peers that are other libraries' kernels, except where JAX's own is the only comparison there is.

READERS names the files, the oldest first, and what reads each. A file of `capibara kernels bench --json` needs no
reader of its own: `by_case`.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
from predicted_evidence import ROOT, written

from capibara import hardware
from capibara.kernels import lookup, target
from capibara.kernels.core.evidence import SHIPPED, params_key
from capibara.kernels.core.spec import Call, describe, nbytes
from capibara.kernels.core.tables import _FORMER_NAMES, slug
from capibara.kernels.ops.attention.hopper import backward, forward
from capibara.kernels.ops.attention.hopper.backward import DQ_COLUMNS
from capibara.kernels.ops.linalg.gemm.hopper import turned
from capibara.kernels.ops.vq.nearest.hopper.direct import MOST_COLUMNS

CHIP = "h200"
RESULTS = ROOT / "benchmarks" / "results"
TYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "i32": "int32", "u32": "uint32"}
# What a user would write, by the benchmarks' names.
PEERS = {
    "plain": "plain JAX",
    "jnp.fft": "jnp.fft",
    "ragged_dot": "lax.ragged_dot",
    "associative_scan": "lax.associative_scan",
    "jax": "jax's own paged kernel",
}
BOTH = "forward and backward"


class Timed(NamedTuple):
    """One call and who took how long at it, in microseconds."""

    row: int
    op: str
    operands: list[str]
    params: Mapping[str, Any]
    us: Mapping[str, float]
    passes: str | None = None


def operand(text: str) -> jax.ShapeDtypeStruct | None:
    """`bf16[16384,4096]`, the way every table writes it; `-` for an absent one."""
    if text == "-":
        return None
    dtype, dims = text.rstrip("]").split("[")
    return jax.ShapeDtypeStruct(tuple(map(int, dims.split(","))), TYPES[dtype])


def of_case(op: str, name: str) -> tuple[list[str], Mapping[str, Any]]:
    case = lookup(op).case(name)
    return [describe(x) for x in case.args()], case.params


def timed(op: str, row: Mapping[str, Any], also: Mapping[str, str] | None = None) -> dict[str, float]:
    """Implementations of the op in a row's microseconds, and peers; `also` renames what a benchmark calls otherwise.

    What dispatch took is known by name, where it took one implementation alone.
    """
    found = dict(row["microseconds"])
    taken = [part.rpartition(":")[2] for part in row["dispatch_takes"].split("+")]
    names = {_FORMER_NAMES.get(name, name) for name in taken}
    if len(names) == 1 and (name := names.pop()) not in found:
        found = {name: found["dispatch"], **found}
    renamed = {{**PEERS, **(also or {})}.get(name, name): us for name, us in found.items()}
    known = {*lookup(op).implementations, *PEERS.values()}
    return {name: us for name, us in renamed.items() if name in known}


def numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


def by_case(document: Any) -> Iterator[Timed]:
    """What `capibara kernels bench --json` wrote."""
    for number, row in enumerate(document["rows"]):
        peers = {peer["name"]: peer["timing"]["seconds"] * 1e6 for peer in row["peers"] if peer["timing"]}
        us = {**peers, row["ours"]["name"]: row["ours"]["timing"]["seconds"] * 1e6}
        ours = {name: time for name, time in us.items() if name in lookup(row["op"]).implementations}
        yield Timed(number, row["op"], *of_case(row["op"], row["case"]), ours)


def side_by_side(document: Any) -> Iterator[Timed]:
    """What benchmarks/layers_gpu.py, untuned_shapes_gpu.py and their kin wrote: a part, and what was timed in words."""
    for number, row in enumerate(document["rows"]):
        read = PARTS.get(row["part"])
        call = None if read is None else read(row["what"])
        if call is not None:
            op, operands, params, passes = call
            yield Timed(number, op, operands, params, timed(op, row, RENAMED.get(row["part"])), passes)


Read = tuple[str, list[str], dict[str, Any], str | None]


def norm(what: str) -> Read:
    """`rms 8192x6144 both`: the forward pass alone, the backward pass alone, or one after the other."""
    kind, size, direction = what.split()
    rows, columns = numbers(size)
    x, vector, each = f"bf16[{rows},{columns}]", f"bf16[{columns}]", f"f32[{rows}]"
    bias, mean = (vector, each) if kind == "layer" else ("-", "-")
    params = {} if kind == "layer" else {"kind": kind}
    if direction == "forward":
        return "norm", [x, vector, bias, "-"], params, None
    passes = BOTH if direction == "both" else None
    return "norm_grad", [x, vector, bias, mean, each, x, "-"], params, passes


def activation(what: str) -> Read:
    """`gelu gated 0.1 4096x4096 backward`, or with a rate of 0.1 in older runs `gelu+dropout 16384x16384 forward`."""
    kind, *words, size, direction = what.replace("+dropout", " 0.1").split()
    rate = next((float(word) for word in words if word != "gated"), 0.0)
    x = "bf16[{},{}]".format(*numbers(size))
    operands = [x, x if "gated" in words else "-", "u32[2]" if rate else "-", "-"]
    params = {"kind": kind, "rate": rate}
    return ("activation", operands, params, None) if direction == "forward" else (
        "activation_grad", [*operands, x], params, None
    )  # fmt: skip


def grouped(what: str) -> Read:
    rows, inner, columns, groups = numbers(what)
    weights, sizes, wide = f"bf16[{groups},{inner},{columns}]", f"i32[{groups}]", f"bf16[{rows},{inner}]"
    narrow = f"bf16[{rows},{columns}]"
    if what.endswith("forward"):
        return "grouped_gemm", [wide, weights, sizes], {}, None
    if what.endswith("d_lhs"):
        return "grouped_gemm", [narrow, weights, sizes], {"transpose_rhs": True}, None
    return "grouped_gemm_weights", [wide, narrow, sizes], {}, None


def route(what: str) -> Read | None:
    """Several calls a program alone: of one call most is the host's launch."""
    if "calls a program" not in what:
        return None
    tokens, experts, top_k, _ = numbers(what)
    return "route", [f"f32[{tokens},{experts}]", "-"], {"top_k": top_k}, None


def nearest(what: str) -> Read:
    if what.startswith("nearest of"):
        codes, rows, width, _ = numbers(what)
    else:
        rows, width, codes = numbers(what)
    return "nearest_code", [f"f32[{rows},{width}]", f"f32[{codes},{width}]"], {}, None


def attention_call(batch: int, length: int, heads: int, kv_heads: int, head_dim: int, causal: bool, both: bool) -> Read:
    q, k = (f"bf16[{batch},{h},{length},{head_dim}]" for h in (heads, kv_heads))
    params = {"causal": True} if causal else {}
    if not both:
        return "attention", [q, k, k, *"-" * 6], params, None
    return "attention_grad", [q, k, k, *"-" * 6, q, f"f32[{batch},{heads},{length}]", q, "-"], params, BOTH


def attention(what: str) -> Read:
    return attention_call(*numbers(what), "causal" in what, what.endswith("both"))  # type: ignore[arg-type]


def recurrence(what: str) -> Read | None:
    if not what.startswith("recurrence"):
        return None
    batch, steps, channels, *_ = numbers(what)
    x = f"{'bf16' if 'bfloat16' in what else 'f32'}[{batch},{steps},{channels}]"
    if what.endswith("forward"):
        return "linear_recurrence", [x, x, "-"], {}, None
    return "linear_recurrence_grad", [x, x, "-", x, "-"], {}, None


def state_space(what: str) -> Read | None:
    if what.startswith("selective scan 8x4096x2048, 16 states, bfloat16"):
        operands, params = of_case("selective_scan", "mamba")
        return "selective_scan", [*operands[:5], *"-" * 4], dict(params), None
    if what.startswith("state space dual 8x4096, 32 heads of 64, 128 states"):
        operands, params = of_case("ssd", "mamba2-p64")
        return "ssd", [*operands[:4], *"-" * 3], dict(params), None
    return None


def convolution(what: str) -> Read | None:
    if what.endswith("exact"):
        return "conv2d", *of_case("conv2d", "56x56x256-f32"), None  # type: ignore[return-value]
    return None


def long(what: str) -> Read | None:
    """`long conv 8x768x8192 float32, filter of 8192` is [batch, channels, time]; with time before channels another."""
    batch, channels, steps, *rest = numbers(what)
    x = f"{'bf16' if 'bfloat16' in what else 'f32'}[{batch},{channels},{steps}]"
    if what.startswith("long conv"):
        return "causal_filter", [x, f"{x.partition('[')[0]}[{channels},{rest[-1]}]"], {}, None
    return ("causal_taps", [x, x], {"taps": steps}, None) if what.startswith("the filters' gradient") else None


PARTS: Mapping[str, Callable[[str], Read | None]] = {
    "norm": norm, "activation": activation, "grouped": grouped, "route": route, "vq": nearest, "attention": attention,
    "scan": recurrence, "ssm": state_space, "conv": convolution, "long": long,
}  # fmt: skip
RENAMED = {
    "attention": {"cudnn": "jax.nn", "by cudnn": "cudnn"},
    "conv": {"cudnn": "xla"},  # lax.conv_general_dilated, which is what our XLA form calls
    "long": {"composed": "xla"},
}


def attention_sizes(document: Any) -> Iterator[Timed]:
    """benchmarks/attention_gpu.py: sizes by name. Its "cudnn" is jax.nn's call of the kernel that ours calls too."""
    for number, row in enumerate(document["rows"]):
        sizes = (row[name] for name in ("batch", "length", "heads", "kv_heads", "head_dim", "causal"))
        op, operands, params, passes = attention_call(*sizes, row["direction"] != "forward")
        us = {name: row["microseconds"][name] for name in ("hopper", "cudnn") if name in row["microseconds"]}
        yield Timed(number, op, operands, params, us, passes)


def untuned_shapes(document: Any) -> Iterator[Timed]:
    """But for attention at head sizes and lengths that our kernel made padded copies for then: it does so no more."""
    for found in side_by_side(document):
        length, head_dim = numbers(found.operands[0])[-2:]
        if not found.op.startswith("attention") or (head_dim in (64, 128, 256) and length % 8 == 0):
            yield found


def paged(document: Any) -> Iterator[Timed]:
    for number, row in enumerate(document["rows"]):
        yield Timed(number, "paged_attention", *of_case("paged_attention", row["case"]), timed("paged_attention", row))


def state_space_gradients(document: Any) -> Iterator[Timed]:
    for number, row in enumerate(document["rows"]):
        us = {"hopper": 1e3 * row["mosaic_gpu_ms"], "xla": 1e3 * row["xla_ms"]}
        if row["op"] == "ssd_grad":
            batch, steps, heads, width, groups, states = numbers(row["shape"])
            x, each, shared = f"bf16[{batch},{steps},{heads},{width}]", f"f32[{batch},{steps},{heads}]", "bf16[{}]"
            shared = shared.format(f"{batch},{steps},{groups},{states}")
            yield Timed(number, "ssd_grad", [x, each, shared, shared, each, f"f32[{heads}]", "-", x, "-"], {}, us)
        else:
            operands, params = of_case("selective_scan_grad", "mamba")
            yield Timed(number, "selective_scan_grad", operands, params, us, BOTH)


def transforms(document: Any) -> Iterator[Timed]:
    """A line an implementation: those of one shape are one call, of a complex array. Planes are asked for by name."""
    names = {"fft f32 (dispatched)": "xla", "fft bf16 matmul": "xla_matmul", "fft bf16 mosaic_gpu": "hopper"}
    shapes: dict[str, dict[str, Any]] = {}
    for number, row in enumerate(document["rows"]):
        shapes.setdefault(row["shape"], {"row": number})[row["what"]] = 1e3 * row["milliseconds"]
    for shape, found in shapes.items():
        sizes = numbers(shape)
        if not shape.startswith("convolve"):
            us = {name: found[what] for what, name in names.items()}
            x = "f32[{},{}]".format(*sizes)
            yield Timed(found["row"], "fft", [x, x], {"precision": "bfloat16"}, us)
        elif "bfloat16 fused mosaic_gpu" in found:
            batch, channels, steps = sizes
            plane, spectrum = f"f32[{batch // 2},{channels},{steps}]", f"f32[{channels},{2 * steps}]"
            us = {"hopper": found["bfloat16 fused mosaic_gpu"], "cuFFT's transforms and a product": found["float32"]}
            operands = [plane, plane, spectrum, spectrum]
            yield Timed(found["row"], "fft_filter", operands, {"precision": "bfloat16"}, us)


def transform_lengths(document: Any) -> Iterator[Timed]:
    """Float32 planes that are no complex array are asked for by name, and left out here."""
    forms = {
        "complex64, mosaic_gpu_pairs": ("hopper_pairs", "f32"),
        "bfloat16 planes, mosaic_gpu_long": ("hopper_long", "bf16"),
    }
    for number, row in enumerate(document["lengths"]):
        for form, (name, dtype) in forms.items():
            us = {who: 1e3 * time for who, time in row["milliseconds"].items()}
            if form in us:
                us = {name: us[form], "xla": us["jnp.fft in the same form"]}
                x = "{}[{},{}]".format(dtype, *numbers(row["what"]))
                yield Timed(number, "fft", [x, x], {"precision": "bfloat16"}, us)


def walks(document: Any) -> Iterator[Timed]:
    """Operands as tables write them; times of what dispatch takes, and of peers."""
    for number, row in enumerate(document["rows"]):
        params = {name: tuple(value) if isinstance(value, list) else value for name, value in row["params"].items()}
        us = {name: us for name, us in row["microseconds"].items() if name in lookup("attention").implementations}
        yield Timed(number, "attention", row["operands"], params, us)


def of_models(document: Any) -> Iterator[Timed]:
    """What `capibara kernels bench --models` wrote, of an op whose parameters are words: the least time of each
    implementation that was right. Models that are held back are left out: nothing is to be learnt by them."""
    for number, row in enumerate(document["rows"]):
        if "failed" in row or row["held_back"]:
            continue
        us = {name: min(row["microseconds"][name]) for name in row["ours"] if row["right"].get(name)}
        taken = us.pop("dispatch", None)
        us |= {} if taken is None else dict.fromkeys(row["same_as_dispatch"], taken)
        both = row["direction"] != "forward"
        (call,) = [d for d in row["decisions"] if d["op"] == f"{row['op']}_grad"] if both else [row]
        op, operands, params = call["op"], call["operands"], values(call["params"])
        us = {name: time for name, time in us.items() if name in lookup(op).implementations}
        if changed(op, operands, params, document["runs"][row["run"]]["commit"]):
            us.pop("hopper", None)
        yield Timed(number, op, operands, params, us, BOTH if both else None)


def nearest_by_parts(document: Any) -> Iterator[Timed]:
    """Of our configs the fastest, which is what dispatch takes since."""
    for number, row in enumerate(document["rows"]):
        ours = [us for name, us in row["microseconds"].items() if name.startswith("hopper")]
        if ours:
            dtype = {"float32": "f32", "float16": "f16"}[row["dtype"]]
            operands = [f"{dtype}[{row[rows]},{row['width']}]" for rows in ("rows", "codes")]
            yield Timed(number, "nearest_code", operands, {}, {"hopper": min(ours), "xla": row["microseconds"]["xla"]})


def gated_products(document: Any) -> Iterator[Timed]:
    """The kernels of gated_mlp beside what runs where they do not; models that are held back are left out."""
    for number, row in enumerate(document["rows"]):
        if row["held_back"]:
            continue
        rows, depth, columns = row["rows"], row["depth"], row["columns"]
        x, wide = f"bf16[{rows},{depth}]", f"bf16[{rows},{2 * columns}]"
        calls: dict[str, tuple[str, list[str], dict[str, Any]]] = {
            "forward": ("gated_products", [x, f"bf16[{depth},{2 * columns}]"], {}),
            "alone": ("gated_products", [x, f"bf16[{depth},{2 * columns}]"], {"keep": False}),
            "grad": ("gated_products_grad", [x, f"bf16[{columns},{depth}]", wide], {}),
        }
        for part, (op, operands, params) in calls.items():
            us = {"hopper": row["us"][f"{part} hopper"], "products and a pass": row["us"][f"{part} xla"]}
            yield Timed(number, op, operands, params | {"kind": row["kind"]}, us)


def gemm_tiles(document: Any) -> Iterator[Timed]:
    """Of our tiles those that dispatch takes since; few rows have another kernel since, and rows of its own."""
    for number, row in enumerate(document["rows"]):
        call = lookup("gemm").call(*map(operand, row["operands"]), **values(row["params"]))
        if turned.ahead_of(call):
            continue
        config = lookup("gemm").implementations["hopper"].default_config(call)
        us = {name: min(taken) for name, taken in row["microseconds"].items() if row["right"].get(name)}
        ours = us.get(f"{config.tile_m}x{config.tile_n} {config.split}")
        xla = us.get("dispatch" if "xla" in row["same_as_dispatch"] else "xla")
        if ours is not None and xla is not None:
            yield Timed(number, "gemm", row["operands"], values(row["params"]), {"hopper": ours, "xla": xla})


def gemm_few_rows(document: Any) -> Iterator[Timed]:
    """Of our cuts the one that dispatch takes since."""
    for number, row in enumerate(document["rows"]):
        call = lookup("gemm").call(*map(operand, row["operands"]), **values(row["params"]))
        cut = turned.candidates(call)[0]
        us = {name: min(taken) for name, taken in row["microseconds"].items() if row["right"].get(name)}
        us |= dict.fromkeys(row["same_as_dispatch"], us["dispatch"])
        us["hopper_turned"] = us.pop(f"{cut.rows} rows, {cut.parts}", None)
        forms = {name: time for name, time in us.items() if name in call.op.implementations and time is not None}
        yield Timed(number, "gemm", row["operands"], values(row["params"]), forms)


def filters(document: Any) -> Iterator[Timed]:
    """Of long filters the forward pass: with the gradient it is no op of its own."""
    for number, row in enumerate(document["rows"]):
        if row["direction"] == "forward":
            us = {name: min(taken) for name, taken in row["microseconds"].items() if row["right"].get(name)}
            us = {name: time for name, time in us.items() if name in lookup("long_conv").implementations}
            yield Timed(number, "long_conv", row["operands"], values(row["params"]), us)


def narrow_codes(document: Any) -> Iterator[Timed]:
    """Of the lattice the rows of codes that are compared by their distances, as they are since."""

    def holds(row: Mapping[str, Any]) -> bool:
        since = document["runs"][row["run"]]["commit"] not in BEFORE_AHEAD
        return since and row.get("op") == "nearest_code" and numbers(row["operands"][1])[-1] <= MOST_COLUMNS

    rows = [row if holds(row) else {"failed": "left out"} for row in document["rows"]]
    yield from of_models(document | {"rows": rows})


LATTICE = "2026-11-17-h200-lattice.json"
SHAPES = "2026-11-19-h200-shapes.json"
READERS: Mapping[str, Callable[[Any], Iterator[Timed]]] = {
    "2026-11-15-h200-gemm.json": by_case,
    "2026-11-15-h200-attention.json": attention_sizes,
    "2026-11-15-h200-paged-attention.json": paged,
    "2026-11-15-h200-layers.json": side_by_side,
    "2026-11-15-h200-layers-second.json": side_by_side,
    "2026-11-15-h200-nearest-code.json": side_by_side,
    "2026-11-15-h200-sequences.json": side_by_side,
    "2026-11-15-h200-state-space-gradients.json": state_space_gradients,
    "2026-11-15-h200-fft-kernels.json": transforms,
    "2026-11-15-h200-long-transforms-2.json": transform_lengths,
    "2026-11-15-h200-long-conv.json": side_by_side,
    "2026-11-16-h200-untuned-shapes.json": untuned_shapes,
    "2026-11-16-h200-attention-head-sizes.json": attention_sizes,
    "2026-11-17-h200-attention-walks.json": walks,
    "2026-11-18-h200-causal-conv1d.json": of_models,
    "2026-11-18-h200-gated-mlp.json": gated_products,
    "2026-11-18-h200-nearest-few-rows.json": nearest_by_parts,
    SHAPES: of_models,
    "2026-11-19-h200-gemm-tiles.json": gemm_tiles,
    "2026-11-19-h200-gemm-few-rows.json": gemm_few_rows,
    LATTICE: narrow_codes,
    "2026-11-19-h200-long-conv.json": filters,
}


# Runs of the lattice and of grids before our kernels changed as `changed` says, the first time and the second.
BEFORE_SHARES = ("58844c0", "68751da", "815b60d1", "89114390")
BEFORE_AHEAD = (*BEFORE_SHARES, "e9f35676", "d69c8836", "d9acf031")
BEFORE_ROUNDED = (*BEFORE_AHEAD, "1263f70f", "91772d10", "568d7480")
BEFORE_64 = (*BEFORE_ROUNDED, "e01b631d")


# In runs before this moment cuDNN's forward pass alone was timed in programs that return its result, which XLA fills
# first, and no model's program does (`without_fills` in kernels/lab/lattice/measure.py): so many microseconds, and its
# bytes at so many a microsecond, beside torch's in 39 rows, and by profiles of five calls.
FILLED_UNTIL = "2026-11-19T22:40"
FILL_US, FILLED_BYTES_A_US = 2.4, 4.37e6


def without_fill(op: str, output: Any, us: Mapping[str, float], date: str) -> dict[str, float]:
    """Times of a call, cuDNN's forward pass as it is in a program that goes on with its `output`."""
    fill = FILL_US + nbytes(output) / FILLED_BYTES_A_US if op == "attention" and date < FILLED_UNTIL else 0.0
    return {name: time - fill if name == "cudnn" else time for name, time in us.items()}


def changed(op: str, operands: Sequence[str], params: Mapping[str, Any], commit: str | None = None) -> bool:
    """Whether our kernel at this call is another one than in runs of this commit; None: of before there were commits.

    First attention's gradient divides roles at heads of 192 and 256, lets several programs share a key head, and has
    lost its third loop where the last tile of keys is not whole; norms of 4096 to 8192 columns are shared by six
    programs of a core, in the place of three. Then attention has scores ahead, and so has its gradient where columns
    come whole, which is half a percent for heads of 64, whose times stay; and narrow codes are compared by their
    distances. Then sums of dq are in 16 bits where few tiles of keys add to them, and soft caps take less; then steps
    of narrow heads have 64 queries where those of 128 have many more pairs.
    """
    if commit is not None and commit not in BEFORE_64:
        return False
    shapes = [operand(text) for text in operands]
    config = backward.default_config(lookup(op).call(*shapes, **params)) if op == "attention_grad" else None
    if config is not None and config.block_q == 64 and operands[0].endswith(",64]"):
        return True
    if commit is not None and commit not in BEFORE_ROUNDED:
        return False
    if config is not None and config.rounded:
        return True
    if op == "attention" and params.get("softcap") is not None:
        return True
    if commit is not None and commit not in BEFORE_AHEAD:
        return False
    if op == "nearest_code":
        return shapes[1] is not None and shapes[1].shape[1] <= MOST_COLUMNS
    if op == "attention":
        return forward.default_config(lookup(op).call(*shapes, **params)).ahead
    if op == "attention_grad" and _is_ahead(*(x.shape for x in shapes[:2] if x is not None)):
        return True
    return (commit is None or commit in BEFORE_SHARES) and _shares(op, [x.shape for x in shapes[:2] if x is not None])


def _is_ahead(q: tuple[int, ...], k: tuple[int, ...]) -> bool:
    return q[-1] == 128 and not (q[2] % 8 or k[2] % 8)


def _shares(op: str, shapes: Sequence[tuple[int, ...]]) -> bool:
    if op in ("norm", "norm_grad"):
        return 4096 < shapes[0][-1] <= 8192
    if op != "attention_grad":
        return False
    q, k = shapes
    return q[-1] in DQ_COLUMNS or q[1] != k[1] or k[2] % 128 != 0


def values(params: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters as the lattice writes them, in words."""
    made = {}
    for name, text in params.items():
        try:
            made[name] = ast.literal_eval(text) if isinstance(text, str) else text
        except (ValueError, SyntaxError):
            made[name] = text
    return made


# Passes over memory of so few microseconds, by the host's clock: a launch of the host's is a part of them.
HOST_SHOWS_US = 100.0
PASSES = ("norm", "norm_grad", "activation", "activation_grad")


def _holds(found: Timed, file: str) -> Timed:
    """Without what later runs show to be of another clock or of another kernel."""
    if file in (SHAPES, LATTICE):  # whose runs have commits
        return found
    if found.op in PASSES and min(found.us.values()) < HOST_SHOWS_US:
        return found._replace(us={})
    if changed(found.op, found.operands, found.params):
        return found._replace(us={name: us for name, us in found.us.items() if name != "hopper"})
    return found


def _ours(found: Timed) -> set[str]:
    return {name for name in found.us if name in lookup(found.op).implementations}


def measured() -> list[tuple[int, Timed, Call]]:
    """Every row that speaks, with the place of its file in READERS, and its call."""
    chip = hardware.chip(CHIP)
    calls: dict[tuple[str, ...], list[tuple[int, Timed, Call]]] = {}
    with target(chip.platform, chip.device_kinds[0]):
        for number, (file, read) in enumerate(READERS.items()):
            here: dict[tuple[str, ...], list[tuple[int, Timed, Call]]] = {}
            document = json.loads((RESULTS / file).read_text(encoding="utf-8"))
            for found in read(document):
                found = _holds(found, file)
                if found.passes != BOTH and found.op == "attention":
                    when = document["runs"][document["rows"][found.row]["run"]] if "runs" in document else document
                    us = without_fill(found.op, operand(found.operands[0]), found.us, str(when["date"]))
                    found = found._replace(us=us)
                if "xla" in found.us:  # then peers say nothing more
                    found = found._replace(us={n: us for n, us in found.us.items() if n not in PEERS.values()})
                if len(found.us) > 1:
                    call = lookup(found.op).call(*map(operand, found.operands), **found.params)
                    here.setdefault((found.op, *found.operands, params_key(call)), []).append((number, found, call))
            for key, rows in here.items():
                said = {name for _, found, _ in rows for name in found.us}
                older = [row for row in calls.get(key, []) if not said.issuperset(_ours(row[1]))]
                calls[key] = older + rows
    return [row for rows in calls.values() for row in rows]


def _date(document: Any) -> str:
    """A file of several runs has the day of each, and is as old as the last."""
    return str((document if "date" in document else document["runs"][-1])["date"])[:10]


def table() -> dict[str, Any]:
    chip = hardware.chip(CHIP)
    documents = {file: json.loads((RESULTS / file).read_text(encoding="utf-8")) for file in READERS}
    sources = [
        {"kind": "measured", "file": f"benchmarks/results/{file}", "date": _date(document)}
        for file, document in documents.items()
    ]
    ops: dict[str, list[dict[str, Any]]] = {}
    for number, found, call in measured():
        row: dict[str, Any] = {"source": number, "row": found.row, "operands": [describe(x) for x in call.args]}
        row |= {"params": params_key(call), "us": {name: round(us, 1) for name, us in found.us.items()}}
        row |= {} if found.passes is None else {"passes": found.passes}
        ops.setdefault(found.op, []).append(row)
    return {"chip": chip.name, "device_kind": chip.device_kinds[0], "sources": sources, "ops": ops}


def lines(made: dict[str, Any]) -> Iterator[str]:
    """The table of docs/evidence.md: each kernel of ours, what it was timed beside, and how it fared."""
    for op, rows in made["ops"].items():
        for name, implementation in lookup(op).implementations.items():
            if implementation.platforms != ("gpu",) or name == "cudnn":
                continue
            beside: dict[str, list[float]] = {}
            for us in (row["us"] for row in rows if name in row["us"]):
                others = {other: time for other, time in us.items() if other != name}
                known = [other for other in ("cudnn", "xla") if other in others]
                peer = known[0] if known else min(others, key=lambda other: others[other])
                beside.setdefault(peer, []).append(others[peer] / us[name])
            gains = sorted(gain for found in beside.values() for gain in found)
            if gains:
                before = "by rule" if callable(implementation.ahead_of) else "always"
                before = before if implementation.ahead_of != ("xla_matmul",) else "the products in XLA"
                mean = statistics.geometric_mean(gains)
                told = f"{gains[0]:.2f}, {mean:.2f}, {gains[-1]:.2f}"
                what = op if name == "hopper" else f"{op}, {name}"
                yield f"| {what} | {len(gains)} | {', '.join(beside)} | {told} | {before} |"


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    made = table()
    (SHIPPED / f"{slug(made['device_kind'])}.json").write_text(written(made), encoding="utf-8")
    print("\n".join(lines(made)))


if __name__ == "__main__":
    main()
