"""What users run without this library, on the same arrays: plain JAX, cuDNN by jax.nn, tokamax, and torch.

A JAX peer takes the op's arrays in their order, None for an absent one. A torch peer takes the module and the tensors
that are there. tokamax and torch are peers where they can be imported.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

f32 = jnp.float32
Peers = dict[str, Callable[..., Any]]

_ACTIVATIONS: Mapping[str, Callable[..., Any]] = {
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
}


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


# Attention, in [batch, length, heads, head_dim]


def attention(params: Mapping[str, Any], all_pairs: bool) -> Peers:
    """`all_pairs`: whether the scores of every query and key fit in memory at once."""
    causal, window, cap = bool(params.get("causal")), params.get("window"), params.get("softcap")
    made: Peers = {}
    if cap is None:
        named: dict[str, Any] = {"is_causal": causal, "local_window_size": window}

        def by(implementation: Any, q: Any, k: Any, v: Any, *_: Any) -> Any:
            return jax.nn.dot_product_attention(q, k, v, implementation=implementation, **named)

        if jax.default_backend() == "gpu":
            made["cudnn"] = functools.partial(by, "cudnn")
        if all_pairs:
            made["plain"] = functools.partial(by, "xla")
    if _installed("tokamax") and jax.default_backend() == "gpu":

        def by_tokamax(q: Any, k: Any, v: Any, *_: Any) -> Any:
            import tokamax

            return tokamax.dot_product_attention(
                q, k, v, is_causal=causal, local_window_size=window, logits_soft_cap=cap, implementation="mosaic"
            )

        made["tokamax"] = by_tokamax
    return made


def torch_attention(params: Mapping[str, Any]) -> Peers:
    if set(params) - {"causal"}:
        return {}
    causal = bool(params.get("causal"))

    def fn(torch: Any, q: Any, k: Any, v: Any) -> Any:
        kinds = torch.nn.attention.SDPBackend
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with torch.nn.attention.sdpa_kernel([kinds.CUDNN_ATTENTION, kinds.FLASH_ATTENTION], set_priority=True):
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
            )
        return out.transpose(1, 2)

    return {"torch": fn}


def gathered_pages(query: Any, key_pages: Any, value_pages: Any, table: Any, lengths: Any, starts: Any = None) -> Any:
    """Every sequence's pages side by side, then attention of one query with a mask."""
    keys, values = (x[table].reshape(table.shape[0], -1, *x.shape[2:]) for x in (key_pages, value_pages))
    heads, kv_heads = query.shape[1], keys.shape[2]
    grouped = query.reshape(query.shape[0], kv_heads, heads // kv_heads, query.shape[2])
    scores = jnp.einsum("shgd,sthd->shgt", grouped, keys, preferred_element_type=f32) * query.shape[2] ** -0.5
    seen = jnp.arange(keys.shape[1]) < lengths[:, None]
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -jnp.inf)).astype(query.dtype)
    return jnp.einsum("shgt,sthd->shgd", weights, values).reshape(query.shape)


def rope(x: Any) -> Any:
    half = x.shape[-1] // 2
    turns = 10000.0 ** (-jnp.arange(half, dtype=f32) / half)
    angles = jnp.arange(x.shape[1], dtype=f32)[:, None] * turns
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    left, right = x[..., :half].astype(f32), x[..., half:].astype(f32)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1).astype(x.dtype)


# Products


def gemm(params: Mapping[str, Any]) -> Callable[..., Any]:
    def fn(a: Any, b: Any, bias: Any, residual: Any) -> Any:
        out = a @ b
        out = out if bias is None else out + bias
        out = _ACTIVATIONS["gelu"](out) if params.get("activation") else out
        return out if residual is None else out + residual

    return fn


def torch_gemm(params: Mapping[str, Any]) -> Peers:
    def fn(torch: Any, a: Any, b: Any, extra: Any = None) -> Any:
        if params.get("activation"):
            return torch.nn.functional.gelu(torch.addmm(extra, a, b))
        return a @ b if extra is None else torch.addmm(extra, a, b)

    return {"torch": fn}


# lax.ragged_dot multiplies every row by every group on a GPU: beyond some rows it would take the run's time.
_RAGGED_ROWS = 2048


def grouped(rows: int) -> Peers:
    def plain(lhs: Any, rhs: Any, sizes: Any) -> Any:
        return lax.ragged_dot(lhs, rhs, sizes)

    def by_tokamax(lhs: Any, rhs: Any, sizes: Any) -> Any:
        import tokamax

        return tokamax.ragged_dot(lhs, rhs, sizes, implementation="mosaic")

    made: Peers = {"ragged_dot": plain} if rows <= _RAGGED_ROWS else {}
    return made | ({"tokamax": by_tokamax} if _installed("tokamax") and jax.default_backend() == "gpu" else {})


def grouped_gated(rows: int) -> Peers:
    def twice(product: Callable[..., Any], lhs: Any, gate: Any, up: Any, sizes: Any) -> Any:
        return jax.nn.silu(product(lhs, gate, sizes)) * product(lhs, up, sizes)

    return {name: functools.partial(twice, product) for name, product in grouped(rows).items()}


def _grouped_mm(torch: Any, lhs: Any, rhs: Any, sizes: Any) -> Any:
    ends = torch.cumsum(sizes, 0, dtype=torch.int32)
    return torch._grouped_mm(lhs, rhs, offs=ends)


def torch_grouped() -> Peers:
    return {"torch": _grouped_mm}


def torch_grouped_gated() -> Peers:
    def fn(torch: Any, lhs: Any, gate: Any, up: Any, sizes: Any) -> Any:
        return torch.nn.functional.silu(_grouped_mm(torch, lhs, gate, sizes)) * _grouped_mm(torch, lhs, up, sizes)

    return {"torch": fn}


def router(gate: str, top_k: int) -> Callable[..., Any]:
    def fn(logits: Any, bias: Any = None) -> Any:
        wide = logits.astype(f32)
        if gate == "softmax_topk":
            chosen, indices = lax.top_k(wide, top_k)
            return jax.nn.softmax(chosen), indices
        scores = jax.nn.sigmoid(wide) if gate == "sigmoid" else jax.nn.softmax(wide)
        _, indices = lax.top_k(scores if bias is None else scores + bias, top_k)
        weights = jnp.take_along_axis(scores, indices, -1)
        return weights / weights.sum(-1, keepdims=True), indices

    return fn


def torch_router(gate: str, top_k: int) -> Peers:
    def fn(torch: Any, logits: Any, bias: Any = None) -> Any:
        wide = logits.float()
        if gate == "softmax_topk":
            chosen, indices = torch.topk(wide, top_k)
            return torch.softmax(chosen, -1), indices.int()
        scores = torch.sigmoid(wide) if gate == "sigmoid" else torch.softmax(wide, -1)
        indices = torch.topk(scores if bias is None else scores + bias, top_k)[1]
        weights = torch.gather(scores, -1, indices)
        return weights / weights.sum(-1, keepdim=True), indices.int()

    return {"torch": fn}


# Layers


def norm(kind: str) -> Callable[..., Any]:
    def fn(x: Any, scale: Any, bias: Any, residual: Any = None) -> Any:
        wide = x.astype(f32)
        if kind == "layer":
            wide = wide - wide.mean(-1, keepdims=True)
        unit = wide * lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-6) * scale.astype(f32)
        return (unit if bias is None else unit + bias.astype(f32)).astype(x.dtype)

    return fn


def torch_norm(kind: str) -> Peers:
    def fn(torch: Any, x: Any, scale: Any, bias: Any = None) -> Any:
        if kind == "layer":
            return torch.nn.functional.layer_norm(x, x.shape[-1:], scale, bias, 1e-6)
        return torch.nn.functional.rms_norm(x, x.shape[-1:], scale, 1e-6)

    return {"torch": fn}


def activation(kind: str) -> Callable[..., Any]:
    def fn(x: Any, up: Any, *_: Any) -> Any:
        return _ACTIVATIONS[kind](x) if up is None else _ACTIVATIONS[kind](x) * up

    return fn


def torch_activation(kind: str) -> Peers:
    def fn(torch: Any, x: Any, up: Any = None) -> Any:
        functions = torch.nn.functional
        if kind.startswith("gelu"):
            y = functions.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")
        else:
            y = getattr(functions, kind)(x)
        return y if up is None else y * up

    return {"torch": fn}


def round_fp8(x: Any, factor: Any, dtype: Any = jnp.float8_e4m3fn) -> Any:
    """As it is, transposed, and the largest magnitude."""
    top = float(jnp.finfo(dtype).max)
    values = jnp.clip(x.astype(f32) * factor, -top, top).astype(dtype)
    return values, values.T, jnp.abs(x).max().astype(f32).reshape(1)


def gated_fp8(kind: str) -> Callable[..., Any]:
    def fn(gate: Any, up: Any, factor: Any) -> Any:
        return round_fp8((_ACTIVATIONS[kind](gate.astype(f32)) * up.astype(f32)).astype(gate.dtype), factor)

    return fn


def gated_fp8_grad(kind: str) -> Callable[..., Any]:
    def fn(gate: Any, up: Any, flow: Any, factors: Any) -> Any:
        _, pull = jax.vjp(lambda gate, up: _ACTIVATIONS[kind](gate) * up, gate.astype(f32), up.astype(f32))
        (a, turned_a, most_a), (b, turned_b, most_b) = (
            round_fp8(d.astype(gate.dtype), factor, jnp.float8_e5m2)
            for d, factor in zip(pull(flow.astype(f32)), factors, strict=True)
        )
        return a, turned_a, b, turned_b, jnp.concatenate([most_a, most_b])

    return fn


def mean_cross_entropy(hidden: Any, weights: Any, labels: Any) -> Any:
    """All logits at once, in the operands' type as products give them; their softmax in float32."""
    each = jax.nn.log_softmax((hidden @ weights).astype(jnp.promote_types(hidden.dtype, f32)))
    return -jnp.take_along_axis(each, labels[:, None], axis=-1).mean()


def torch_entropy() -> Peers:
    def fn(torch: Any, hidden: Any, weights: Any, labels: Any) -> Any:
        return torch.nn.functional.cross_entropy((hidden @ weights).float(), labels.long())

    return {"torch": fn}


def nearest_code(x: Any, codebook: Any) -> Any:
    """Exact, as the op is."""
    product = jnp.matmul(x, codebook.T, precision=lax.Precision.HIGHEST)
    return jnp.argmin(jnp.square(codebook).sum(-1) - 2 * product, axis=-1).astype(jnp.int32)


def torch_nearest_code() -> Peers:
    def fn(torch: Any, x: Any, codebook: Any) -> Any:
        return torch.argmin(codebook.square().sum(-1) - 2 * (x @ codebook.T), -1).int()

    return {"torch": fn}


# Sequences and images


def linear_recurrence(a: Any, b: Any, initial: Any = None) -> Any:
    return lax.associative_scan(lambda x, y: (x[0] * y[0], y[0] * x[1] + y[1]), (a, b), axis=1)[1]


def selective_scan(
    x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, z: Any, dt_bias: Any, initial: Any = None
) -> Any:  # fmt: skip
    wide, B, C = (v.astype(f32) for v in (x, B, C))
    dt = jax.nn.softplus(dt.astype(f32) + dt_bias)
    h = linear_recurrence(jnp.exp(dt[..., None] * A), (dt * wide)[..., None] * B[:, :, None])
    y = jnp.einsum("btdn,btn->btd", h, C) + D * wide
    return (y * jax.nn.silu(z.astype(f32))).astype(x.dtype)


def chunked_dual(
    x: Any, log_decay: Any, B: Any, C: Any, dt: Any, D: Any, initial: Any = None, chunk: int = 128
) -> Any:  # fmt: skip
    """Chunks by einsum, states passed from chunk to chunk; the length is filled up to whole chunks."""
    batch, length, heads, width = x.shape
    rest = -length % chunk
    pad = lambda v: jnp.pad(v, ((0, 0), (0, rest), *((0, 0),) * (v.ndim - 2)))  # noqa: E731
    cut = lambda v: pad(v).reshape(batch, -1, chunk, *v.shape[2:])  # noqa: E731
    share = heads // B.shape[2]
    xs, decay, step = cut(x), jnp.cumsum(cut(log_decay.astype(f32)), axis=2), cut(dt.astype(f32))
    Bs, Cs = (jnp.repeat(cut(v), share, axis=3) for v in (B, C))
    seen = jnp.tril(jnp.ones((chunk, chunk), bool))[None, None, :, :, None]
    weights = jnp.exp(jnp.where(seen, decay[:, :, :, None] - decay[:, :, None], -jnp.inf))
    scores = jnp.einsum("bcqhn,bckhn->bcqkh", Cs, Bs, preferred_element_type=f32)
    scores = (scores * weights * step[:, :, None]).astype(x.dtype)
    inside = jnp.einsum("bcqkh,bckhp->bcqhp", scores, xs, preferred_element_type=f32)
    left = (jnp.exp(decay[:, :, -1:] - decay) * step).astype(x.dtype)
    added = jnp.einsum("bckhn,bckh,bckhp->bchpn", Bs, left, xs, preferred_element_type=f32)

    def pass_on(state: Any, given: Any) -> Any:
        shrink, more = given
        return state * shrink[..., None, None] + more, state

    zero = jnp.zeros(added.shape[:1] + added.shape[2:], f32)
    whole = jnp.exp(decay[:, :, -1])
    _, before = lax.scan(pass_on, zero, (whole.swapaxes(0, 1), added.swapaxes(0, 1)))
    carried = jnp.einsum("bcqhn,cbhpn->bcqhp", Cs, before.astype(x.dtype), preferred_element_type=f32)
    y = (inside + carried * jnp.exp(decay)[..., None]).reshape(batch, -1, heads, width)[:, :length]
    return (y + D[:, None] * x.astype(f32)).astype(x.dtype)


def causal_conv1d(activation: str | None) -> Peers:
    def finished(total: Any, bias: Any) -> Any:
        total = total if bias is None else total + bias
        return total if activation is None else _ACTIVATIONS[activation](total)

    def depthwise(x: Any, w: Any, bias: Any, initial: Any = None) -> Any:
        total = lax.conv_general_dilated(
            x, w[:, None], (1,), [(w.shape[0] - 1, 0)], dimension_numbers=("NWC", "WIO", "NWC"),
            feature_group_count=w.shape[1],
        )  # fmt: skip
        return finished(total, bias)

    def shifted(x: Any, w: Any, bias: Any, initial: Any = None) -> Any:
        width = w.shape[0]
        seen = jnp.pad(x, ((0, 0), (width - 1, 0), (0, 0))).astype(f32)
        total = sum(seen[:, i : i + x.shape[1]] * w[i].astype(f32) for i in range(width))
        return finished(total, None if bias is None else bias.astype(f32)).astype(x.dtype)

    return {"depthwise": depthwise, "shifted": shifted}


def torch_conv1d(activation: str | None) -> Peers:
    def fn(torch: Any, x: Any, w: Any, bias: Any = None) -> Any:
        seen = torch.nn.functional.pad(x.transpose(1, 2), (w.shape[0] - 1, 0))
        y = torch.nn.functional.conv1d(seen, w.T[:, None], bias, groups=w.shape[1]).transpose(1, 2)
        return y if activation is None else torch.nn.functional.silu(y)

    return {"torch": fn}


def long_conv(x: Any, h: Any) -> Any:
    size = x.shape[1] + h.shape[0]
    product = jnp.fft.rfft(x, size, axis=1) * jnp.fft.rfft(h, size, axis=0)
    return jnp.fft.irfft(product, size, axis=1)[:, : x.shape[1]]


def torch_long_conv() -> Peers:
    def fn(torch: Any, x: Any, h: Any) -> Any:
        size = x.shape[1] + h.shape[0]
        product = torch.fft.rfft(x, size, dim=1) * torch.fft.rfft(h, size, dim=0)
        return torch.fft.irfft(product, size, dim=1)[:, : x.shape[1]]

    return {"torch": fn}


def conv2d(stride: int, padding: str) -> Callable[..., Any]:
    def fn(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(x, w, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))

    return fn


def torch_conv2d(stride: int, window: int) -> Peers:
    if stride not in (1, window):  # SAME pads the two sides differently there
        return {}

    def fn(torch: Any, x: Any, w: Any) -> Any:
        image, filters = x.permute(0, 3, 1, 2), w.permute(3, 2, 0, 1)
        filters = filters.contiguous(memory_format=torch.channels_last)
        padding = "same" if stride == 1 else 0
        return torch.nn.functional.conv2d(image, filters, stride=stride, padding=padding).permute(0, 2, 3, 1)

    return {"torch": fn}


def fft(re: Any, im: Any) -> Any:
    made = jnp.fft.fft(lax.complex(re, im))
    return made.real, made.imag


def torch_fft() -> Peers:
    def fn(torch: Any, re: Any, im: Any) -> Any:
        made = torch.fft.fft(torch.complex(re, im))
        # Arrays of their own, as the others give them, and no views.
        return made.real.contiguous(), made.imag.contiguous()

    return {"torch": fn}
