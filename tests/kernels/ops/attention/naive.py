"""Attention in numpy and float64, written from the definition, sharing nothing with the library."""

from __future__ import annotations

from typing import Any

import numpy as np


def visible(
    shape: tuple[int, int, int, int],
    *,
    causal: bool = False,
    q_offset: int = 0,
    window: Any = None,
    mask: Any = None,
    q_segments: Any = None,
    kv_segments: Any = None,
    block_mask: Any = None,
    block_size: Any = None,
) -> np.ndarray:
    """bool [B, H, T, S]."""
    _, _, rows, columns = shape
    i, j = np.arange(rows)[:, None], np.arange(columns)[None, :]
    ok = np.ones(shape, bool)
    if causal:
        ok &= j <= i + q_offset
    left, right = window or (None, None)
    if left is not None:
        ok &= j >= i + q_offset - left
    if right is not None:
        ok &= j <= i + q_offset + right
    if mask is not None:
        ok &= np.asarray(mask)
    if q_segments is not None:
        ok &= (np.asarray(q_segments)[:, :, None] == np.asarray(kv_segments)[:, None, :])[:, None]
    if block_mask is not None:
        bq, bk = block_size
        ok &= np.asarray(block_mask)[:, :, i // bq, j // bk]
    return ok


def attention(
    q: Any, k: Any, v: Any, ok: np.ndarray, *, bias: Any = None, scale: Any = None, softcap: Any = None,
    keep: Any = None, rate: float = 0.0, d_out: Any = None, d_lse: Any = None,
) -> dict[str, np.ndarray]:  # fmt: skip
    """out, lse and, with cotangents, dq, dk, dv and dbias (at the full shape [B, H, T, S])."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    # Only what is seen enters any product.
    seen = ok.any(2)
    full_k, full_v = (np.where(seen[..., None], np.repeat(x, groups, 1), 0) for x in (k, v))
    q = np.where(ok.any(3)[..., None], q, 0)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    raw = np.einsum("bhtd,bhsd->bhts", q, full_k) * scale
    if bias is not None:
        raw = raw + np.asarray(bias, np.float64)
    capped = raw if softcap is None else softcap * np.tanh(raw / softcap)
    scores = np.where(ok, capped, -np.inf)
    top = scores.max(-1, initial=-np.inf, keepdims=True)
    top = np.where(np.isneginf(top), 0, top)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    alive = total > 0
    p = np.where(alive, weights / np.where(alive, total, 1), 0)
    drop = 1.0 if keep is None else np.asarray(keep) / (1 - rate)
    made = {"out": np.einsum("bhts,bhsd->bhtd", p * drop, full_v)}
    made["lse"] = np.where(alive, top + np.log(np.where(alive, total, 1)), -np.inf)[..., 0]
    if d_out is None:
        return made
    d_out = np.asarray(d_out, np.float64)
    dp = np.einsum("bhtd,bhsd->bhts", d_out, full_v) * drop
    ds = p * (dp - (p * dp).sum(-1, keepdims=True))
    if d_lse is not None:
        ds = ds + p * np.asarray(d_lse, np.float64)[..., None]
    if softcap is not None:
        ds = ds * (1 - (capped / softcap) ** 2)

    def by_key_head(x: np.ndarray) -> np.ndarray:
        return x.reshape(x.shape[0], -1, groups, *x.shape[2:]).sum(2)

    made["dq"] = np.einsum("bhts,bhsd->bhtd", ds, full_k) * scale
    made["dk"] = by_key_head(np.einsum("bhts,bhtd->bhsd", ds, q)) * scale
    made["dv"] = by_key_head(np.einsum("bhts,bhtd->bhsd", p * drop, d_out))
    made["dbias"] = ds
    return made
