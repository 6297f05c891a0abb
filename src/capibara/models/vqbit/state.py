"""What a VQbit layer remembers, and how a batch changes it: moving averages, and codes brought back to life."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

SMOOTHING = 1e-5  # what Laplace smoothing adds to every code's count


class VQbitState(NamedTuple):
    """A pytree: pass it through jit, checkpoint it, shard it by `VQbitLayer.specs`."""

    codebook: Any
    """[K, D] float32: the parameter where the codebook is learned by gradient."""
    counts: Any
    """[K] float32: moving average of how many rows of a batch each code has."""
    sums: Any
    """[K, D] float32: moving average of the sum of those rows."""
    idle: Any
    """[K] int32: training steps since a code last had a row."""
    key: Any
    """Where the random choices of the next step come from."""
    started: Any
    """Whether the codebook has been given its first codes; k-means gives them at the first training step else."""


def fresh(codebook: jax.Array, counts: jax.Array, key: jax.Array, started: bool) -> VQbitState:
    """The state of a codebook that no batch has changed yet."""
    codebook = codebook.astype(jnp.float32)
    return VQbitState(
        codebook=codebook,
        counts=counts,
        sums=codebook * counts[:, None],
        idle=jnp.zeros(codebook.shape[:1], jnp.int32),
        key=key,
        started=jnp.asarray(started),
    )


def averaged(state: VQbitState, counts: jax.Array, sums: jax.Array, decay: float) -> VQbitState:
    """The moving averages after a batch, and the codebook they make.

    Laplace smoothing keeps the count of a code that has no rows away from zero; the total stays what it is.
    """
    kept_counts = decay * state.counts + (1 - decay) * counts
    kept_sums = decay * state.sums + (1 - decay) * sums
    total, codes = kept_counts.sum(), counts.shape[0]
    smooth = (kept_counts + SMOOTHING) / (total + codes * SMOOTHING) * total
    # A batch without any valid row, at the very start, leaves nothing to divide by: the codes stay.
    codebook = jnp.where((smooth > 0)[:, None], kept_sums / jnp.where(smooth > 0, smooth, 1)[:, None], state.codebook)
    return state._replace(codebook=codebook, counts=kept_counts, sums=kept_sums)


def revived(
    state: VQbitState, rows: jax.Array, valid: jax.Array, dead: jax.Array, key: jax.Array
) -> tuple[VQbitState, jax.Array]:
    """Every dead code replaced by a random row of the batch; (the state, how many were).

    A row that is no number replaces nothing: its code waits for the next batch.
    """
    if rows.shape[0] == 0:
        return state, jnp.int32(0)
    chosen = jax.random.randint(key, dead.shape, 0, rows.shape[0])
    given = dead & valid[chosen]
    codes = jnp.where(given[:, None], rows[chosen].astype(jnp.float32), state.codebook)
    changed = state._replace(
        codebook=codes,
        # As if it had had one row for long: the next rows it gets decide where it goes.
        counts=jnp.where(given, 1.0, state.counts),
        sums=jnp.where(given[:, None], codes, state.sums),
        idle=jnp.where(given, 0, state.idle),
    )
    return changed, given.sum(dtype=jnp.int32)
