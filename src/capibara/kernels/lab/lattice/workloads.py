"""The calls that published models make of each op, at drawn batches and lengths.

A family of ops has one function here: a model and a generator of random numbers in, one `Workload` out. `draw` walks
over the families in turn, so that a run that is cut anywhere has seen all of them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from capibara.errors import unknown_name
from capibara.kernels.core.op import Op, lookup
from capibara.kernels.core.spec import Case, Cost, Excerpt
from capibara.kernels.lab.lattice import peers
from capibara.kernels.lab.lattice.models import Model, held_back, models
from capibara.kernels.ops.attention.rope import rope
from capibara.kernels.ops.conv.causal1d.cases import case as conv1d_case
from capibara.kernels.ops.conv.conv2d.cases import case as conv2d_case
from capibara.kernels.ops.layers.cross_entropy.api import GRADIENTS, cross_entropy
from capibara.kernels.ops.layers.grouped.cases import even
from capibara.kernels.ops.scan.selective.cases import make_case as selective_case
from capibara.kernels.ops.scan.ssd.cases import make_case as dual_case

__all__ = ["FAMILIES", "Workload", "attention_of", "draw", "with_op"]

# What a call may take at the most: some milliseconds of an H200, so that a row is a second of timing.
MOST_FLOPS = 3e12
MOST_BYTES = 3e9
LENGTHS = (512, 1024, 2048, 4096, 8192)
NO_TAGS: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class Workload:
    """One op at one shape of a model.

    Attributes:
      ours: the public call on the case's arrays, laid out as a model has them; `ours(*arrays, form=None)`, where None
        leaves the choice to dispatch, and a name of `forms` asks for that one.
      forms: the op's implementations, or other ways that our function has, to hold dispatch's choice against.
      peers: what a user would run without this library, by name, on the same arrays.
      torch: torch's own functions of the same, by name: `fn(torch, *tensors)`.
      arrange: takes the op's arrays and results to the order that `ours` and the peers have in memory; its own inverse.
    """

    family: str
    model: str
    what: str
    op: Op
    case: Case
    grad: bool
    ours: Callable[..., Any]
    forms: tuple[str, ...]
    peers: Mapping[str, Callable[..., Any]]
    torch: Mapping[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)
    arrange: Callable[[Any], Any] = lambda x: x

    @property
    def held_back(self) -> bool:
        return held_back(self.model)

    @property
    def direction(self) -> str:
        return "forward+backward" if self.grad else "forward"

    @property
    def cost(self) -> Cost:
        return self.op.cost(self.op.call(*self.case.args(), target=None, **self.case.params))

    def __str__(self) -> str:
        return f"{self.family}: {self.what}, {self.direction} ({self.model})"


@dataclasses.dataclass(frozen=True)
class Draw:
    """Random sizes; `shrink` divides lengths and counts of tokens, for machines without an accelerator."""

    generator: np.random.Generator
    shrink: int = 1

    def chance(self, share: float) -> bool:
        return bool(self.generator.random() < share)

    def pick(self, values: Sequence[Any]) -> Any:
        return values[int(self.generator.integers(len(values)))]

    def length(self) -> int:
        """Two of five are as they come, the others what people train with."""
        if self.chance(0.4):
            return max(3, int(self.generator.integers(200, 6000)) // self.shrink)
        return max(4, self.pick(LENGTHS) // self.shrink)

    def tokens(self, least: int = 11, most: int = 15) -> int:
        return max(1, round(2 ** self.generator.uniform(least, most)) // self.shrink)

    def rows(self) -> int:
        """Tokens of a layer: a training batch, or one time in four what a server decodes."""
        return int(self.generator.integers(1, 513)) if self.chance(0.25) else self.batch_of(self.length())[2]

    def batch_of(self, length: int) -> tuple[int, int, int]:
        """How many sequences, how long, and both together."""
        batch = max(1, round(self.tokens() / length))
        return batch, length, batch * length


def _plain(op: Op, case: Case) -> Callable[..., Any]:
    def ours(*arrays: Any, form: str | None = None) -> Any:
        return op(*arrays, implementation=form, **case.params)

    return ours


def _accepting(op: Op, case: Case) -> tuple[str, ...]:
    """The implementations that take the call here; the reference is no way to run."""
    call = op.call(*case.args(), target=None, **case.params)
    return tuple(name for name, impl in op.implementations.items() if name != "reference" and not impl.refusal(call))


def _first_groups(op: Op, arrays: Sequence[Any]) -> Excerpt:
    """The rows and weights of the first groups: the reference multiplies every row by every group."""
    lhs, *weights, sizes = arrays
    counts = np.asarray(sizes)
    kept = int(np.searchsorted(np.cumsum(counts), 1)) + 2
    rows = int(counts[:kept].sum())

    def gradients(leaves: Sequence[Any]) -> list[Any]:
        return [x[: kept if number else rows] for number, x in enumerate(leaves)]

    part = (lhs[:rows], *(x[:kept] for x in weights), sizes[:kept])
    return Excerpt(part, lambda leaves: [x[:rows] for x in leaves], gradients, f"the first {kept} groups")


def with_op(
    family: str, model: str, what: str, name: str, case: Case, grad: bool, *, peers: Mapping[str, Any],
    torch: Mapping[str, Any] | None = None,
) -> Workload:  # fmt: skip
    """One op at a case, as the public call of its name makes it."""
    op = lookup(name)
    workload = Workload(
        family, model, what, op, case, grad, _plain(op, case), _accepting(op, case), dict(peers), dict(torch or {})
    )
    if family != "grouped gemm":
        return workload
    in_parts = Op(
        op.name, family=op.family, reference=op.reference, operands=op.operands, params=op.params, cost=op.cost,
        tolerance=op.tolerance, excerpt=_first_groups,
    )  # fmt: skip
    return dataclasses.replace(workload, op=in_parts)


# Attention


def _swapped(tree: Any) -> Any:
    """[batch, heads, length, head_dim] and [batch, length, heads, head_dim] into each other."""
    return jax.tree.map(lambda x: x.swapaxes(1, 2) if x.ndim == 4 else x, tree)


def attention(name: str, model: Model, draw: Draw, grad: bool) -> Workload:
    assert model.heads
    assert model.kv_heads
    assert model.head_dim
    causal = not model.tokens
    params: dict[str, Any] = {}
    length = draw.length() if causal else max(3, draw.pick(model.tokens) // draw.shrink)
    batch, _, _ = draw.batch_of(length)
    if causal:
        params["causal"] = True
        if model.window is not None and draw.chance(0.5) and model.window < length:
            params["window"] = (model.window - 1, 0)
    if model.softcap is not None:
        params["softcap"] = model.softcap
    return attention_of(name, (batch, length, model.heads, model.kv_heads, model.head_dim), params, grad)


def attention_of(name: str, sizes: tuple[int, int, int, int, int], params: Mapping[str, Any], grad: bool) -> Workload:
    """Attention within a sequence: `sizes` are batch, length, heads, heads of keys, and columns of a head."""
    batch, length, heads, kv_heads, head_dim = sizes
    op = lookup("attention")
    shapes = tuple((batch, number, length, head_dim) for number in (heads, kv_heads, kv_heads))
    case = Case(name, (*shapes, *(None,) * 6), "bfloat16", params)

    def ours(q: Any, k: Any, v: Any, *rest: Any, form: str | None = None) -> Any:
        made = op(*_swapped((q, k, v)), *rest, implementation=form, physical="bthd", **params)
        return made.swapaxes(1, 2)

    said = [f"B{batch} T{length} H{heads}/{kv_heads} D{head_dim}"]
    said += ["causal"] if params.get("causal") else []
    said += [f"window {params['window'][0] + 1}"] if "window" in params else []
    said += [f"softcap {params['softcap']:g}"] if "softcap" in params else []
    quadratic = batch * heads * length * length > 1 << 28
    forms = tuple(form for form in _accepting(op, case) if not (form == "xla" and quadratic))
    return Workload(
        "attention", name, " ".join(said), op, case, grad, ours, forms, peers.attention(params, not quadratic),
        peers.torch_attention(params), _swapped,
    )  # fmt: skip


def paged(name: str, model: Model, draw: Draw, grad: bool) -> Workload:
    assert model.heads
    assert model.kv_heads
    assert model.head_dim
    sequences, page = int(2 ** draw.generator.uniform(0, 7)), draw.pick((16, 64))
    longest = max(page, int(2 ** draw.generator.uniform(9, 14)) // draw.shrink)
    while sequences > 1 and sequences * longest * model.kv_heads * model.head_dim > 1 << 28:
        sequences //= 2
    lengths = np.maximum(1, draw.generator.integers(longest // 2, longest + 1, sequences)).astype(np.int32)
    used = -(-lengths // page)
    pages, columns = int(used.sum()), int(used.max())

    def table(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        order, made = generator.permutation(pages), np.zeros(shape, np.int64)
        starts = np.concatenate([[0], np.cumsum(used)])
        for row, count in enumerate(used):
            made[row, :count] = order[starts[row] : starts[row] + count]
        return made

    pool = (pages, page, model.kv_heads, model.head_dim)
    shapes = ((sequences, model.heads, model.head_dim), pool, pool, (sequences, columns), (sequences,), None)
    case = Case(
        name, shapes, "bfloat16", {}, NO_TAGS, {3: "int32", 4: "int32"}, {3: table, 4: lambda g, shape: lengths}
    )
    said = f"{sequences} of {longest}, pages of {page}, H{model.heads}/{model.kv_heads} D{model.head_dim}"
    return with_op("paged decode", name, said, "paged_attention", case, False, peers={"gathered": peers.gathered_pages})


def rotary(name: str, model: Model, draw: Draw, grad: bool) -> Workload:
    """Not an op with implementations: one elementwise function, held against what a user writes."""
    assert model.heads
    assert model.head_dim
    batch, length, _ = draw.batch_of(draw.length())
    case = Case(name, ((batch, length, model.heads, model.head_dim),), "bfloat16")
    op = Op(
        "rope", family="attention", reference=peers.rope, operands=("x",),
        cost=lambda call: Cost(bytes=4.0 * math.prod(call.need("x").shape)), tolerance=lambda call: 2.0**-7,
    )  # fmt: skip
    return Workload(
        "rope", name, f"B{batch} T{length} H{model.heads} D{model.head_dim}", op, case, grad,
        lambda x, form=None: rope(x), (), {"plain": peers.rope},
    )  # fmt: skip


# Products


def _products(model: Model) -> list[tuple[str, int, int, str]]:
    """What is multiplied by what, and the part of the layer that it is."""
    found = []
    hidden = model.hidden
    if hidden and model.heads and model.kv_heads and model.head_dim:
        found += [("qkv", hidden, (model.heads + 2 * model.kv_heads) * model.head_dim, "plain")]
        found += [("out", model.heads * model.head_dim, hidden, "residual")]
    if hidden and model.ffn:
        found += [("up", hidden, model.ffn, "plain" if model.gated else model.activation)]
        found += [("down", model.ffn, hidden, "residual")]
    if hidden and model.inner:
        found += [("in", hidden, 2 * model.inner, "plain"), ("out", model.inner, hidden, "residual")]
    return found


def gemm(name: str, model: Model, draw: Draw, grad: bool) -> Workload:
    part, inner, columns, extra = draw.pick(_products(model))
    rows, params = draw.rows(), {}
    bias = residual = None
    # Half of the products are without what follows them in the layer.
    if extra == "residual" and draw.chance(0.5):
        residual = (rows, columns)
    elif extra in ("gelu", "gelu_tanh") and draw.chance(0.5):
        bias, params["activation"] = (columns,), "gelu"
    case = Case(name, ((rows, inner), (inner, columns), bias, residual), "bfloat16", params)
    said = f"{part} {rows}x{inner}x{columns}" + (" +residual" if residual else "") + (" bias gelu" if bias else "")
    return with_op(
        "gemm", name, said, "gemm", case, grad, peers={"plain": peers.gemm(params)}, torch=peers.torch_gemm(params)
    )


def grouped(name: str, model: Model, draw: Draw, grad: bool) -> Workload:
    assert model.hidden
    assert model.experts
    assert model.expert_ffn
    experts, shared = model.experts, 1
    while experts // shared > 1 and experts // shared * model.hidden * model.expert_ffn > 1 << 29:
        shared *= 2  # as many devices hold them
    experts //= shared
    rows = max(1, draw.tokens(8, 14) * model.top_k // shared)
    sizes = even(rows)
    said = f"{rows} rows, {experts} experts of {model.hidden}x{model.expert_ffn}"
    if draw.chance(0.4):
        weight = (experts, model.hidden, model.expert_ffn)
        case = Case(name, ((rows, model.hidden), weight, weight, (experts,)), "bfloat16", {}, NO_TAGS, {3: "int32"},
                    {3: sizes})  # fmt: skip
        return with_op("grouped gemm", name, f"gated {said}", "grouped_gated_gemm", case, grad,
                      peers=peers.grouped_gated(rows), torch=peers.torch_grouped_gated())  # fmt: skip
    up = draw.chance(0.5)
    inner, columns = (model.hidden, model.expert_ffn) if up else (model.expert_ffn, model.hidden)
    shapes = ((rows, inner), (experts, inner, columns), (experts,))
    case = Case(name, shapes, "bfloat16", {}, NO_TAGS, {2: "int32"}, {2: sizes})
    return with_op("grouped gemm", name, f"{'up' if up else 'down'} {said}", "grouped_gemm", case, grad,
                  peers=peers.grouped(rows), torch=peers.torch_grouped())  # fmt: skip


def router(name: str, model: Model, draw: Draw, grad: bool) -> Workload:
    assert model.experts
    tokens = draw.rows()
    biased = model.gate == "sigmoid"
    params = {"top_k": model.top_k, "gate": model.gate}
    case = Case(
        name, ((tokens, model.experts), (model.experts,) if biased else None), "bfloat16", params, NO_TAGS,
        {1: "float32"},
    )  # fmt: skip
    said = f"{model.top_k} of {model.experts}, {tokens} tokens, {model.gate}"
    return with_op("router", name, said, "route", case, False, peers={"plain": peers.router(model.gate, model.top_k)},
                  torch=peers.torch_router(model.gate, model.top_k))  # fmt: skip


# Layers


def norm(name: str, model: Model, draw: Draw, grad: bool) -> Workload:
    assert model.hidden
    rows, columns = draw.rows(), model.hidden
    if model.qk_norm and model.heads and model.head_dim and draw.chance(0.4):
        rows, columns = rows * model.heads, model.head_dim
    bias = (columns,) if model.norm == "layer" else None
    params = {"kind": model.norm}
    case = Case(name, ((rows, columns), (columns,), bias, None), "bfloat16", params)
    return with_op("norm", name, f"{model.norm} {rows}x{columns}", "norm", case, grad,
                  peers={"plain": peers.norm(model.norm)}, torch=peers.torch_norm(model.norm))  # fmt: skip


def activation(name: str, model: Model, draw: Draw, grad: bool) -> Workload:
    assert model.ffn
    rows = draw.rows()
    shape = (rows, model.ffn)
    case = Case(name, (shape, shape if model.gated else None, None, None), "bfloat16", {"kind": model.activation})
    said = f"{model.activation}{' gated' if model.gated else ''} {rows}x{model.ffn}"
    return with_op("activation", name, said, "activation", case, grad,
                  peers={"plain": peers.activation(model.activation)},
                  torch=peers.torch_activation(model.activation))  # fmt: skip


def rounding(name: str, model: Model, draw: Draw, grad: bool) -> Workload:
    """What fp8 products round: what enters a layer, a gated activation, or, with `grad`, the gradients of its parts."""
    assert model.hidden
    assert model.ffn
    rows = draw.rows()
    if draw.chance(0.4) and not grad:
        case = Case(name, ((rows, model.hidden), (1,)), "bfloat16", {}, NO_TAGS, {1: "float32"}, {1: _eights})
        return with_op("fp8 rounding", name, f"{rows}x{model.hidden}", "round_fp8", case, False,
                      peers={"plain": peers.round_fp8})  # fmt: skip
    operands = 3 if grad else 2
    shapes = (*((rows, model.ffn),) * operands, (2 if grad else 1,))
    params = {"kind": model.activation}
    case = Case(name, shapes, "bfloat16", params, NO_TAGS, {operands: "float32"}, {operands: _eights})
    op, plain = ("gated_fp8_grad", peers.gated_fp8_grad) if grad else ("gated_fp8", peers.gated_fp8)
    said = f"{'gradients of ' if grad else ''}{model.activation} gated {rows}x{model.ffn}"
    # Gradients are what it computes, and nothing asks for theirs.
    return with_op("fp8 rounding", name, said, op, case, False, peers={"plain": plain(model.activation)})


def _eights(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.full(shape, 8.0, np.float32)


def _mean_loss_cost(call: Any) -> Cost:
    hidden, weights = call.need("hidden"), call.need("weights")
    work = 2.0 * hidden.shape[0] * math.prod(weights.shape)
    return Cost(matrix_flops=work, bytes=2.0 * (math.prod(hidden.shape) + math.prod(weights.shape)))


def entropy(name: str, model: Model, draw: Draw, grad: bool) -> Workload:
    """The loss of the public function with its gradients, which is how it is used."""
    assert model.hidden
    assert model.vocab
    vocab, depth = model.vocab, model.hidden
    tokens = draw.tokens(10, 14)
    while tokens > 64 and tokens * vocab > 1 << 30:
        tokens //= 2
    scale = 3 / math.sqrt(depth)

    def complete(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
        return ((arrays[0] * scale).astype(arrays[0].dtype), *arrays[1:])

    def labels(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return generator.integers(0, vocab, shape, dtype=np.int32)

    shapes = ((tokens, depth), (depth, vocab), (tokens,))
    case = Case(name, shapes, "bfloat16", {}, NO_TAGS, {2: "int32"}, {2: labels}, complete)
    op = Op(
        "mean_cross_entropy", family="layers", reference=peers.mean_cross_entropy,
        operands=("hidden", "weights", "labels"), cost=_mean_loss_cost, tolerance=lambda call: 2.0**-7,
    )  # fmt: skip

    def ours(hidden: Any, weights: Any, labels: Any, form: str | None = None) -> Any:
        return cross_entropy(hidden, weights, labels, gradient=form)

    return Workload(
        "cross-entropy", name, f"{tokens}x{depth}x{vocab}", op, case, True, ours, GRADIENTS,
        {"plain": peers.mean_cross_entropy}, peers.torch_entropy(),
    )  # fmt: skip


def codes(name: str, model: Model, draw: Draw, grad: bool) -> Workload:
    assert model.codes
    assert model.code_width
    assert model.code_rows
    rows = model.code_rows * max(1, int(2 ** draw.generator.uniform(4, 10)) // draw.shrink)
    rows = min(rows, 1 << 20)
    case = Case(name, ((rows, model.code_width), (model.codes, model.code_width)), "float32")
    return with_op("nearest code", name, f"{rows} rows of {model.code_width}, {model.codes} codes", "nearest_code",
                  case, False, peers={"plain": peers.nearest_code}, torch=peers.torch_nearest_code())  # fmt: skip


# Sequences and images


def selective(name: str, model: Model, draw: Draw, grad: bool) -> Workload:
    assert model.inner
    assert model.state
    batch, length, _ = draw.batch_of(draw.length())
    # The reference keeps every state for its gradient.
    while batch > 1 and batch * length * model.inner > 1 << (25 if grad else 26):
        batch //= 2
    case = selective_case(name, batch, length, model.inner, model.state, NO_TAGS, z=True, bias=True, dt_softplus=True)
    fits = batch * length * model.inner * model.state <= 1 << 29
    return with_op("selective scan", name, f"B{batch} T{length} {model.inner} channels, {model.state} states",
                  "selective_scan", case, grad,
                  peers={"associative scan": peers.selective_scan} if fits else {})  # fmt: skip


def dual(name: str, model: Model, draw: Draw, grad: bool) -> Workload:
    assert model.dual_heads
    assert model.dual_head_dim
    assert model.state
    batch, length, _ = draw.batch_of(draw.length())
    while batch > 1 and batch * length * model.dual_heads * model.dual_head_dim > 1 << 26:
        batch //= 2
    if grad:  # the reference keeps every state for it
        batch = 1
        length = min(length, (1 << 30) // (model.dual_heads * model.dual_head_dim * model.state))
    case = dual_case(
        name, batch, length, model.dual_heads, model.dual_head_dim, model.dual_groups, model.state, NO_TAGS
    )
    said = f"B{batch} T{length}, {model.dual_heads} heads of {model.dual_head_dim}, {model.state} states"
    return with_op("state space dual", name, said, "ssd", case, grad, peers={"chunked einsum": peers.chunked_dual})


def recurrence(name: str, model: Model, draw: Draw, grad: bool) -> Workload:
    assert model.recurrence
    batch, length, _ = draw.batch_of(draw.length())
    shape = (batch, length, model.recurrence)

    def complete(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
        return (jax.nn.sigmoid(arrays[0] + 3), *arrays[1:])

    case = Case(name, (shape, shape, None), "float32", complete=complete)
    return with_op("linear recurrence", name, f"B{batch} T{length} {model.recurrence} channels", "linear_recurrence",
                  case, grad, peers={"associative scan": peers.linear_recurrence})  # fmt: skip


def conv1d(name: str, model: Model, draw: Draw, grad: bool) -> Workload:
    assert model.conv_width
    channels = model.inner or model.recurrence or model.hidden
    assert channels
    if model.dual_heads and model.state:
        channels += 2 * model.dual_groups * model.state
    batch, length, _ = draw.batch_of(draw.length())
    activation = "silu" if model.inner else None
    params: dict[str, Any] = {} if activation is None else {"activation": activation}
    case = conv1d_case(name, (batch, length, channels), model.conv_width, NO_TAGS, **params)
    return with_op("causal conv1d", name, f"B{batch} T{length} {channels} channels, {model.conv_width} taps",
                  "causal_conv1d", case, grad, peers=peers.causal_conv1d(activation),
                  torch=peers.torch_conv1d(activation))  # fmt: skip


def long_conv(name: str, model: Model, draw: Draw, grad: bool) -> Workload:
    assert model.long_filter
    assert model.hidden
    length = max(8, draw.pick((model.long_filter, model.long_filter // 2, draw.length())))
    taps = min(length, model.long_filter)
    batch = max(1, round(draw.tokens() / length))
    while batch > 1 and batch * length * model.hidden > 1 << 26:
        batch //= 2
    case = Case(name, ((batch, length, model.hidden), (taps, model.hidden)), "float32")
    return with_op("long conv", name, f"B{batch} T{length} {model.hidden} channels, {taps} taps", "long_conv", case,
                  grad, peers={"jnp.fft": peers.long_conv}, torch=peers.torch_long_conv())  # fmt: skip


def conv2d(name: str, model: Model, draw: Draw, grad: bool) -> Workload:
    side, channels, filters, window, stride = draw.pick(model.images)
    side = max(window, side // (4 if draw.shrink > 1 else 1))
    images = max(1, int(2 ** draw.generator.uniform(2, 6)) // draw.shrink)
    while images > 1 and images * (side // stride) ** 2 * channels * filters * window**2 * 2 > MOST_FLOPS / 4:
        images //= 2
    # A patch embedding has windows side by side.
    params: dict[str, Any] = {} if stride == 1 else {"strides": (stride, stride)}
    if window == stride:
        params["padding"] = "VALID"
    case = conv2d_case(name, (images, side, side, channels), (window, window), filters, NO_TAGS, **params)
    return with_op("conv2d", name, f"{images}x{side}x{side}x{channels}, {filters} of {window}x{window} /{stride}",
                  "conv2d", case, grad, peers={"plain": peers.conv2d(stride, params.get("padding", "SAME"))},
                  torch=peers.torch_conv2d(stride, window))  # fmt: skip


def transform(name: str, model: Model, draw: Draw, grad: bool) -> Workload:
    assert model.hidden
    points, _ = draw.pick(model.transforms) if model.transforms else (2 * (model.long_filter or 512), 1)
    signals = max(1, draw.tokens(12, 15) * 256 // points)
    case = Case(name, ((signals, points), (signals, points)), "float32")
    return with_op("fft", name, f"{signals} of {points} points", "fft", case, False,
                  peers={"jnp.fft": peers.fft}, torch=peers.torch_fft())  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Family:
    """How often a family comes in a round, which models have it, and how often its gradient is asked for."""

    make: Callable[[str, Model, Draw, bool], Workload]
    turns: int
    has: Callable[[Model], Any]
    gradients: float


FAMILIES: Mapping[str, Family] = {
    "attention": Family(attention, 5, lambda m: m.heads, 0.5),
    "gemm": Family(gemm, 3, _products, 0.3),
    "grouped gemm": Family(grouped, 3, lambda m: m.experts, 0.4),
    "norm": Family(norm, 2, lambda m: m.hidden and (m.heads or m.inner), 0.5),
    "activation": Family(activation, 2, lambda m: m.ffn, 0.5),
    "cross-entropy": Family(entropy, 2, lambda m: m.vocab and m.hidden, 1.0),
    "nearest code": Family(codes, 2, lambda m: m.codes, 0.0),
    "causal conv1d": Family(conv1d, 1, lambda m: m.conv_width, 0.5),
    "selective scan": Family(selective, 1, lambda m: m.inner and not m.dual_heads, 0.4),
    "state space dual": Family(dual, 1, lambda m: m.dual_heads, 0.4),
    "paged decode": Family(paged, 1, lambda m: m.heads and not m.tokens, 0.0),
    "conv2d": Family(conv2d, 1, lambda m: m.images, 0.2),
    "long conv": Family(long_conv, 1, lambda m: m.long_filter, 0.3),
    "router": Family(router, 1, lambda m: m.experts, 0.0),
    "rope": Family(rotary, 1, lambda m: m.heads and not m.tokens, 0.0),
    "fft": Family(transform, 1, lambda m: m.transforms or m.long_filter, 0.0),
    "fp8 rounding": Family(rounding, 1, lambda m: m.ffn and m.gated, 0.4),
    "linear recurrence": Family(recurrence, 1, lambda m: m.recurrence, 0.4),
}


def _round(families: Sequence[str]) -> list[str]:
    """One round: each family as often as it has turns, spread out."""
    placed = [
        ((turn + 0.5) / FAMILIES[name].turns, order, name)
        for order, name in enumerate(families)
        for turn in range(FAMILIES[name].turns)
    ]
    return [name for *_, name in sorted(placed)]


def draw(seed: int = 0, families: Sequence[str] | None = None, shrink: int = 1) -> Iterator[Workload]:
    """Workloads without end, the same for the same seed: family after family, and of each one in four held back.

    Args:
      seed: other seeds give other models, batches and lengths.
      families: names of `FAMILIES`; all of them by default.
      shrink: other than 1 divides lengths and tokens by it, and takes narrow models: a host computes in seconds what
        an accelerator does in milliseconds.

    >>> [workload.family for workload in itertools.islice(draw(families=["norm", "gemm"]), 5)]
    ['gemm', 'norm', 'gemm', 'norm', 'gemm']
    """
    for name in families or ():
        if name not in FAMILIES:
            raise unknown_name("family of the lattice", name, FAMILIES)
    chosen = list(FAMILIES) if families is None else list(families)
    seen: dict[str, int] = dict.fromkeys(chosen, 0)
    order: dict[tuple[str, bool], list[str]] = {}
    for family in chosen:
        # Generators of their own, here and below: what else is drawn does not move a family's rows.
        generator = np.random.default_rng((seed, zlib.crc32(family.encode())))
        for kept in (False, True):
            names = [n for n, m in models().items() if FAMILIES[family].has(m) and held_back(n) == kept]
            order[family, kept] = [str(n) for n in generator.permutation(names)]
    for family in itertools.cycle(_round(chosen)):
        count = seen[family]
        seen[family] += 1
        kept = bool(order[family, True]) and count % 4 == 1
        names = order[family, kept] or order[family, not kept]
        turn = count // 4 if kept else count - (count + 2) // 4
        model = names[turn % len(names)]
        own = np.random.default_rng((seed, zlib.crc32(f"{family}:{model}".encode()), count))
        sizes = models()[model] if shrink == 1 else _small(models()[model])
        yield _affordable(functools.partial(FAMILIES[family].make, model, sizes), own, family, shrink)


_WIDTHS = ("hidden", "ffn", "expert_ffn", "inner", "recurrence", "vocab", "codes", "long_filter")


def _small(model: Model) -> Model:
    """The same parts, a thirty-second as wide."""
    widths: dict[str, Any] = {
        name: max(16, getattr(model, name) // 256 * 8) for name in _WIDTHS if getattr(model, name) is not None
    }
    if model.heads and model.kv_heads:
        group = model.heads // model.kv_heads
        widths |= {"heads": group, "kv_heads": 1}
    if model.experts:
        widths["experts"] = max(model.top_k, model.experts // 8)
    if model.dual_heads:
        widths |= {"dual_heads": model.dual_groups, "state": 16}
    if model.images:
        widths["images"] = tuple((side, min(ch, 16), min(out, 16), *rest) for side, ch, out, *rest in model.images)
    return dataclasses.replace(model, **widths)


def _affordable(
    make: Callable[[Draw, bool], Workload], generator: np.random.Generator, family: str, shrink: int
) -> Workload:
    """Drawn again, a few times, where one call would take too long."""
    sized = Draw(generator, shrink)
    made = make(sized, sized.chance(FAMILIES[family].gradients))
    for _ in range(20):
        cost = made.cost
        scale = 3 if made.grad else 1
        if scale * cost.flops <= MOST_FLOPS and cost.bytes <= MOST_BYTES:
            break
        made = make(sized, made.grad)
    return made
