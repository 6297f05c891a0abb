"""State spaces: Mamba's selective scan, or the dual form of Mamba-2, in which time is matrix products."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from capibara.errors import rule_error, unknown_name
from capibara.kernels.ops.conv.causal1d.api import causal_conv1d
from capibara.kernels.ops.layers.norm.api import rms_norm
from capibara.kernels.ops.scan import selective_scan, state_space_dual
from capibara.mesh import with_sharding_constraint
from capibara.models.blocks.spec import (
    LORA_SCALE,
    Block,
    BlockOutput,
    PagedBatch,
    Projected,
    Sequences,
    Unsummed,
    Weight,
    product,
    products,
)

if TYPE_CHECKING:
    from capibara.models.config import ModularModelConfig

__all__ = ["Ssm"]

FORMS = ("dual", "selective")
# Step sizes start between these, evenly on a logarithmic scale: from nearly all of the past to nearly none.
_SHORTEST, _LONGEST = 1e-3, 1e-1


def _step_bias(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """What softplus turns into step sizes between the shortest and the longest."""
    step = jnp.exp(jax.random.uniform(key, shape) * math.log(_LONGEST / _SHORTEST) + math.log(_SHORTEST))
    return step + jnp.log(-jnp.expm1(-step))


def _decay_of_heads(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jnp.log(jax.random.uniform(key, shape, minval=1.0, maxval=16.0))


def _decay_of_states(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    del key  # state n fades n times as fast as the first
    return jnp.broadcast_to(jnp.log(jnp.arange(1, shape[-1] + 1, dtype=jnp.float32)), shape)


@dataclass(frozen=True)
class Ssm(Block):
    """A recurrence whose step sizes and projections hang on the input."""

    form: str = "dual"
    expand: int = 2
    """Inner width over hidden."""
    state: int = 128
    """Numbers of state: a channel's in the selective form (usually 16), a head column's in the dual one."""
    head_dim: int = 64
    """Dual form: channels of a head."""
    groups: int = 1
    """Dual form: heads of a group share B and C."""
    conv: int = 4
    """Taps of the causal convolution before the scan."""
    dt_rank: int = 0
    """Selective form: rank of the step sizes' projection; hidden / 16 when 0."""

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise unknown_name("form of a state space", self.form, FORMS)
        for name in ("expand", "state", "head_dim", "groups", "conv"):
            if getattr(self, name) < 1:
                raise rule_error(f"{name} of a state space is 1 or more", getattr(self, name), f"use {name} = 1")
        if self.dt_rank < 0:
            raise rule_error("dt_rank of a state space is 0 or more", self.dt_rank, "leave it out")

    def check(self, model: ModularModelConfig, where: str) -> None:
        inner = self.inner(model)
        if self.form == "dual" and inner % self.head_dim:
            raise rule_error(
                "head_dim divides the inner width, expand · hidden",
                f"{inner} and {where}.head_dim = {self.head_dim}",
                f"use head_dim = {math.gcd(inner, 64)}",
            )
        if self.form == "dual" and self.heads(model) % self.groups:
            raise rule_error(
                "groups divide the heads", f"{self.heads(model)} heads, {where}.groups = {self.groups}", "use 1"
            )

    def inner(self, model: ModularModelConfig) -> int:
        return self.expand * model.hidden

    def heads(self, model: ModularModelConfig) -> int:
        return self.inner(model) // self.head_dim

    def _rank(self, model: ModularModelConfig) -> int:
        return self.dt_rank or -(-model.hidden // 16)

    def weights(self, model: ModularModelConfig) -> dict[str, Weight]:
        wide, inner, state = model.hidden, self.inner(model), self.state
        weights = {
            "gate": Weight((wide, inner), (None, "mlp")),
            "in": Weight((wide, inner), (None, "mlp")),
            "conv": Weight((self.conv, inner), (None, "mlp"), fan_in=self.conv),
            "conv_bias": Weight((inner,), ("mlp",), "zeros"),
            "out": Weight((inner, wide), ("mlp", None), fan_in=inner, gain=model.residual_gain),
        }
        if self.form == "dual":
            heads, mixed = self.heads(model), 2 * self.groups * state
            return weights | {
                "mix": Weight((wide, mixed), (None, None)),
                "mix_conv": Weight((self.conv, mixed), (None, None), fan_in=self.conv),
                "mix_conv_bias": Weight((mixed,), (None,), "zeros"),
                "step": Weight((wide, heads), (None, "heads")),
                "step_bias": Weight((heads,), ("heads",), _step_bias, keep_float32=True),
                "decay": Weight((heads,), ("heads",), _decay_of_heads, keep_float32=True),
                "skip": Weight((heads,), ("heads",), "ones", keep_float32=True),
                "norm": Weight((inner,), ("mlp",), "ones"),
            }
        rank = self._rank(model)
        return weights | {
            "mix": Weight((inner, rank + 2 * state), ("mlp", None)),
            "step": Weight((rank, inner), (None, "mlp")),
            "step_bias": Weight((inner,), ("mlp",), _step_bias, keep_float32=True),
            "decay": Weight((inner, state), ("mlp", None), _decay_of_states, keep_float32=True),
            "skip": Weight((inner,), ("mlp",), "ones", keep_float32=True),
        }

    def products(self) -> dict[str, int]:
        return {"gate": 1, "in": 1, "out": 1}

    def joint_products(self) -> tuple[tuple[str, ...], ...]:
        return (("gate", "in"),)

    def __call__(
        self, model: ModularModelConfig, params: Mapping[str, jax.Array], x: jax.Array, sequences: Sequences
    ) -> BlockOutput:
        y, _ = self._run(model, params, x, sequences.segment_ids, None)
        return BlockOutput(y)

    def new_cache(self, model: ModularModelConfig, batch: int, length: int, dtype: Any) -> dict[str, jax.Array]:
        inner = self.inner(model)
        cache = {"conv": jnp.zeros((batch, self.conv - 1, inner), dtype)}
        if self.form == "dual":
            cache["mix_conv"] = jnp.zeros((batch, self.conv - 1, 2 * self.groups * self.state), dtype)
            cache["state"] = jnp.zeros((batch, self.heads(model), self.head_dim, self.state), jnp.float32)
        else:
            cache["state"] = jnp.zeros((batch, inner, self.state), jnp.float32)
        return cache

    def decode(
        self,
        model: ModularModelConfig,
        params: Mapping[str, jax.Array],
        x: jax.Array,
        cache: Mapping[str, jax.Array],
        start: jax.Array,
        lengths: jax.Array,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        return self._run(model, params, x, None, cache, lengths)

    keeps_state = True

    def new_paged_cache(
        self, model: ModularModelConfig, pages: int, page_size: int, slots: int, dtype: Any
    ) -> dict[str, jax.Array]:
        # Of one state a sequence no 8-bit numbers are kept: it is small, and its errors would add up token by token.
        whole = jnp.issubdtype(dtype, jnp.integer)
        return self.new_cache(model, slots, 0, jnp.float32 if whole else dtype)

    def paged(
        self,
        model: ModularModelConfig,
        params: Mapping[str, jax.Array],
        x: jax.Array | Unsummed | Projected,
        cache: Mapping[str, jax.Array],
        batch: PagedBatch,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        assert not isinstance(x, Unsummed | Projected)
        sequences = batch.context_lengths.shape[0]
        if batch.query_starts is None:
            starts, lengths = jnp.arange(sequences), (batch.context_lengths > 0).astype(jnp.int32)
        else:
            starts, lengths = batch.query_starts[:-1], jnp.diff(batch.query_starts)
        # A scan needs a row a sequence: rows as long as the longest, whose rest is padding that leaves no trace.
        step = jnp.arange(batch.longest)
        real = step < lengths[:, None]
        token = jnp.where(real, starts[:, None] + step, x.shape[1])
        fresh = batch.context_lengths == lengths  # begins here, whatever the slot's last sequence left

        def before(kept: jax.Array) -> jax.Array:
            state = kept.at[batch.slots].get(mode="fill", fill_value=0)
            return jnp.where(fresh.reshape(-1, *[1] * (state.ndim - 1)), jnp.zeros_like(state), state)

        rows = x[0].at[token].get(mode="fill", fill_value=0)
        if batch.adapters is not None:  # a token's own scales of low-rank changes go where the token goes
            params = {
                name: own[0].at[token].get(mode="fill", fill_value=0) if name.endswith(LORA_SCALE) else own
                for name, own in params.items()
            }
        y, after = self._run(model, params, rows, None, {name: before(kept) for name, kept in cache.items()}, lengths)
        kept = {
            name: cache[name].at[batch.slots].set(new.astype(cache[name].dtype), mode="drop")
            for name, new in after.items()
        }
        return jnp.zeros_like(x).at[0, token].set(y, mode="drop"), kept

    def _run(
        self,
        model: ModularModelConfig,
        params: Mapping[str, jax.Array],
        x: jax.Array,
        segments: jax.Array | None,
        cache: Mapping[str, jax.Array] | None,
        lengths: jax.Array | None = None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The block, from a cache and to the next one where there is one."""
        inner_axes = ("batch", "sequence", "mlp")
        inner = (self.inner(model),)
        gate, z = (with_sharding_constraint(y, inner_axes) for y in products(params, {"gate": inner, "in": inner}, x))
        # Padding takes no step: its step size is 0, which leaves the state as it is.
        real = None if lengths is None else jnp.arange(x.shape[1]) < lengths[:, None]
        after: dict[str, jax.Array] = {}

        def convolved(name: str, y: jax.Array) -> jax.Array:
            if cache is not None:
                after[name] = _last_inputs(cache[name], y, lengths)
            before = None if cache is None else cache[name].astype(y.dtype)
            return _convolution(y, params[name], params[f"{name}_bias"], segments, before)

        z = convolved("conv", z)
        if self.form == "dual":
            mixed = convolved("mix_conv", x @ params["mix"].astype(x.dtype))
            B, C = (part.reshape(*x.shape[:2], self.groups, self.state) for part in jnp.split(mixed, 2, axis=-1))
            steps = jnp.dot(x, params["step"].astype(x.dtype), preferred_element_type=jnp.float32)
            dt = _masked(jax.nn.softplus(steps + params["step_bias"]), real)
            out = state_space_dual(
                z.reshape(*x.shape[:2], self.heads(model), self.head_dim),
                dt,
                -jnp.exp(params["decay"]),
                B,
                C,
                params["skip"],
                resets=_starts(segments),
                initial_state=None if cache is None else cache["state"],
                return_state=cache is not None,
            )
        else:
            if segments is not None:
                raise rule_error(
                    "The selective form has no way to start over inside of a row",
                    "segment ids of packed documents",
                    'use form = "dual", or data.pack = "stream" or false',
                )
            rank = self._rank(model)
            mixed = z @ params["mix"].astype(z.dtype)
            low, B, C = jnp.split(mixed, (rank, rank + self.state), axis=-1)
            steps = low @ params["step"].astype(z.dtype)
            if real is not None:
                steps = jnp.where(real[..., None], steps, -jnp.inf)  # whose softplus is 0
            out = selective_scan(
                z,
                steps,
                -jnp.exp(params["decay"]),
                B,
                C,
                params["skip"],
                z=gate,
                dt_bias=params["step_bias"],
                dt_softplus=True,
                initial_state=None if cache is None else cache["state"],
                return_state=cache is not None,
            )
        if isinstance(out, tuple):
            y, after["state"] = out
        else:
            y = out
        if self.form == "dual":
            y = y.reshape(z.shape) * jax.nn.silu(gate)
            y = rms_norm(y, params["norm"], eps=model.norm_eps)
        return product(params, "out", with_sharding_constraint(y, inner_axes)), after

    def flops_per_token(self, model: ModularModelConfig, length: int) -> float:
        # Into the state and out of it again, a multiplication and an addition each.
        return 4.0 * self.inner(model) * self.state


def _masked(steps: jax.Array, real: jax.Array | None) -> jax.Array:
    return steps if real is None else jnp.where(real[..., None], steps, 0)


def _starts(segments: jax.Array | None) -> jax.Array | None:
    """[batch, length]: True where a document begins."""
    if segments is None:
        return None
    return jnp.concatenate([jnp.ones_like(segments[:, :1], bool), segments[:, 1:] != segments[:, :-1]], axis=1)


def _convolution(
    x: jax.Array, taps: jax.Array, bias: jax.Array, segments: jax.Array | None, before: jax.Array | None
) -> jax.Array:
    """Causal, with silu; within each document where there are several in a row."""
    if segments is None:
        return causal_conv1d(x, taps, bias, activation="silu", initial_state=before)
    # One shifted product a tap, which XLA makes one pass of, and in which a tap can be left out.
    total = x.astype(jnp.float32) * taps[-1].astype(jnp.float32)
    for back in range(1, taps.shape[0]):
        shifted = jnp.pad(x, ((0, 0), (back, 0), (0, 0)))[:, : x.shape[1]]
        earlier = jnp.pad(segments, ((0, 0), (back, 0)), constant_values=-1)[:, : x.shape[1]]
        shifted = jnp.where((earlier == segments)[..., None], shifted, 0)
        total += shifted.astype(jnp.float32) * taps[-1 - back].astype(jnp.float32)
    return jax.nn.silu(total + bias.astype(jnp.float32)).astype(x.dtype)


def _last_inputs(before: jax.Array, x: jax.Array, lengths: jax.Array | None) -> jax.Array:
    """The inputs that the next token's convolution meets: the last ones that are there."""
    width = before.shape[1]
    joined = jnp.concatenate([before, x.astype(before.dtype)], axis=1)
    if lengths is None:
        return joined[:, joined.shape[1] - width :]
    return jax.vmap(lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, width))(joined, lengths)
