"""What type checkers and editors see of the public functions. Read by mypy (tests/test_types.py), never run."""

from __future__ import annotations

from typing import assert_type

import jax
from jax.sharding import Mesh

import capibara.plan
from capibara.kernels import (
    Rope,
    all_reduce_tree,
    attention,
    bucketed,
    causal_conv1d,
    compressed_all_reduce,
    cross_entropy,
    fast_svd,
    fft,
    gated_linear_attention,
    gelu,
    gemm,
    layer_norm,
    lif_neurons,
    linear_recurrence,
    nearest_code,
    paged_attention,
    paged_write,
    parallel_scan,
    quantize,
    rms_norm,
    rope,
    selective_scan,
    sequence_parallel_attention,
    state_space_dual,
)
from capibara.mesh import with_sharding_constraint
from capibara.parallel import pipeline, pipelined
from capibara.plan import Plan

Pair = tuple[jax.Array, jax.Array]
Three = tuple[jax.Array, jax.Array, jax.Array]


def functions(x: jax.Array, flag: bool, params: dict[str, jax.Array], mesh: Mesh) -> None:
    assert_type(attention(x, x, x), jax.Array)
    assert_type(attention(x, x, x, is_causal=True, rope=Rope(), softcap=30.0), jax.Array)
    assert_type(attention(x, x, x, return_lse=True), Pair)
    assert_type(attention(x, x, x, return_lse=flag), jax.Array | Pair)
    attention(x, x, x, return_lse="yes")  # type: ignore[call-overload]
    attention(x, x, x, is_casual=True)  # type: ignore[call-overload]
    assert_type(sequence_parallel_attention(x, x, x, axis_name="sequence", mesh=mesh, return_lse=True), Pair)
    assert_type(paged_attention(x, x, x, x, x), jax.Array)
    assert_type(paged_write(x, x, x, x, x, x, x), Three)
    assert_type(rope(x), jax.Array)
    assert_type(gemm(x, x, activation="gelu"), jax.Array)
    assert_type(layer_norm(x), jax.Array)
    assert_type(rms_norm(x, return_residual=True), Pair)
    assert_type(gelu(x, dropout_rate=0.1, key=jax.random.key(0)), jax.Array)
    gelu(x, dropout=0.1)  # type: ignore[call-arg]
    assert_type(cross_entropy(x, x, x), jax.Array)
    assert_type(linear_recurrence(x, x, return_state=True), Pair)
    assert_type(selective_scan(x, x, x, x, x), jax.Array)
    assert_type(state_space_dual(x, x, x, x, x, return_state=True), Pair)
    assert_type(gated_linear_attention(x, x, x, x, return_state=True), Pair)
    assert_type(causal_conv1d(x, x, return_state=True), Pair)
    assert_type(lif_neurons(x, return_state=True), Three)
    assert_type(quantize(x, x, return_indices=True), Pair)
    assert_type(nearest_code(x, x), jax.Array)
    assert_type(nearest_code(x, x, return_distances=True), Pair)
    assert_type(nearest_code(x, x, return_stats=True), Three)
    assert_type(fast_svd(x, rank=4), Three)
    assert_type(fast_svd(x, compute_uv=False), jax.Array)
    assert_type(fft(x, precision="bfloat16"), jax.Array)
    assert_type(all_reduce_tree(params), dict[str, jax.Array])
    assert_type(all_reduce_tree(params, compress=True, state=params), tuple[dict[str, jax.Array], dict[str, jax.Array]])
    assert_type(compressed_all_reduce(params, "data")[0], dict[str, jax.Array])
    assert_type(bucketed(params)[0], list[jax.Array])
    assert_type(with_sharding_constraint(params, ("batch",)), dict[str, jax.Array])


def programs(loss: capibara.plan.Recipe, x: jax.Array, w: jax.Array) -> None:
    def step(carry: jax.Array, item: int) -> tuple[jax.Array, float]:
        return carry, float(item)

    def scored(w: jax.Array, x: jax.Array) -> float:
        return float((w * x).sum())

    assert_type(capibara.plan.plan(loss, on="v4-32"), Plan)
    assert_type(parallel_scan(step, x, 3), tuple[jax.Array, float])
    assert_type(pipeline(lambda x, w: x, w, x, microbatches=2), jax.Array)
    assert_type(pipelined(scored, microbatches=2)(w, x), float)
