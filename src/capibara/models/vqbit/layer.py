"""VQbitLayer: rows to their nearest codes, and a codebook that learns from them."""

from __future__ import annotations

import logging
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from capibara.errors import rule_error, say_once, unknown_name
from capibara.kernels.core.context import current_target
from capibara.kernels.core.operands import as_array
from capibara.kernels.core.spec import FLOATS, describe
from capibara.kernels.ops.vq import look_up, nearest_code, straight_through
from capibara.models.vqbit.kmeans import kmeans
from capibara.models.vqbit.state import VQbitState, averaged, fresh, revived

logger = logging.getLogger("capibara.vq")

KMEANS_STEPS = 10


class VQbitLayer:
    """A codebook of `codebook_size` codes of `embedding_dim` numbers; calling it quantizes rows.

    `layer(x)` returns (quantized, indices, metrics). The gradient passes through to x.

    The layer has a `state`: the codes and their averages. Called on arrays, in training, it goes on with each call, and
    the first call makes it of its batch. Inside jit, grad or vmap it is a constant: a function that is traced reads the
    codes as they are then, a compiled one keeps those, and neither updates them nor can learn them by gradient, which
    is said once. A first call there makes the state of the sizes and the seed alone: random codes, which is said too,
    since k-means then waits for the first training call on arrays. `layer.state = layer.init(x=batch)` before gives
    better ones. To train inside of jit use the functional form, whose state goes in and comes out:

        state = layer.init()
        (quantized, indices, metrics), state = jax.jit(layer.apply)(state, x)

    Args:
      codebook_size, embedding_dim: K and D, both 1 or more.
      use_jax_native: True lets capibara's dispatch choose the implementation; False keeps to plain XLA operations.
      use_tpu_optimizations: on a TPU, search with bfloat16 operands, one pass of the matrix units instead of six.
        Elsewhere it changes nothing, which is said once.
      decay: of the moving averages that the codebook follows. None: the codebook is a parameter, learned by the
        gradient of `metrics["loss"]`.
      commitment: weight of the loss that pulls x to its code.
      kmeans_start: the first codes are the k-means centres of the first batch, instead of random numbers.
      revive_after: a code that had no row for so many training steps becomes a random row of the batch. None: never.
      seed: of the first codes and of the random rows.
      mesh, codebook_axis_name: keep the state split over this axis of this mesh, each device with some of the codes.

    Metrics: perplexity (of the batch's use of codes), usage (share of codes with a row in the batch), commitment_loss,
    codebook_loss (both the mean square of a number's error), loss (what to add to the model's), dead_codes (codes
    without a row for `revive_after` steps, or in this batch where that is None), revived, invalid_rows (NaN or
    infinite: index -1, quantized to NaN, in no loss and no average).

    >>> layer = VQbitLayer(codebook_size=2, embedding_dim=1)
    >>> quantized, indices, metrics = layer(jnp.array([[0.0], [0.2], [5.0], [5.2]]))
    >>> quantized.round(1).ravel(), int(metrics["dead_codes"])
    (Array([0.1, 0.1, 5.1, 5.1], dtype=float32), 0)
    """

    def __init__(
        self,
        codebook_size: int,
        embedding_dim: int,
        use_jax_native: bool = True,
        use_tpu_optimizations: bool = False,
        *,
        decay: float | None = 0.99,
        commitment: float = 0.25,
        kmeans_start: bool = True,
        revive_after: int | None = 100,
        seed: int = 0,
        mesh: Mesh | None = None,
        codebook_axis_name: str | None = None,
    ) -> None:
        self.codebook_size = _whole("codebook_size", codebook_size, 1)
        self.embedding_dim = _whole("embedding_dim", embedding_dim, 1)
        self.use_jax_native = bool(use_jax_native)
        self.use_tpu_optimizations = bool(use_tpu_optimizations)
        if decay is not None and not (_is_number(decay) and 0 <= decay < 1):
            raise rule_error(
                "decay is from 0 to below 1, or None for a learned codebook", repr(decay), "use decay=0.99"
            )
        if not (_is_number(commitment) and math.isfinite(commitment) and commitment >= 0):
            raise rule_error("commitment is a finite weight, 0 or more", repr(commitment), "use commitment=0.25")
        self.decay = decay
        self.commitment = float(commitment)
        self.kmeans_start = bool(kmeans_start)
        self.revive_after = None if revive_after is None else _whole("revive_after", revive_after, 1)
        self.seed = _whole("seed", seed, 0)
        self._check_mesh(mesh, codebook_axis_name)
        self.mesh, self.codebook_axis_name = mesh, codebook_axis_name
        self._state: VQbitState | None = None
        self._name = object()  # tells this layer's sayings from another's
        self._step = jax.jit(self._pure_step, static_argnames=("training", "start"))

    def __repr__(self) -> str:
        return f"VQbitLayer({self.codebook_size}, {self.embedding_dim}, decay={self.decay})"

    @property
    def state(self) -> VQbitState:
        """What the layer has learned; assign one that `apply` returned to go on from it."""
        if self._state is None:
            raise rule_error(
                "A layer has a state after its first batch",
                "none yet",
                "call the layer, or set layer.state = layer.init()",
            )
        return self._state

    @state.setter
    def state(self, state: VQbitState) -> None:
        self._check_codebook(state.codebook)
        self._state = state

    @property
    def codebook(self) -> jax.Array:
        return self.state.codebook

    def init(self, key: Any = None, x: Any = None, *, codebook: Any = None) -> VQbitState:
        """A first state: with these codes, from the k-means centres of x, or random, to be started by the first batch.

        `key` stands for the layer's seed. Where k-means is not wanted, x is not needed. An x without a single row of
        numbers is as none.
        """
        key = jax.random.key(self.seed) if key is None else key
        own, later = jax.random.split(key)
        shape = (self.codebook_size, self.embedding_dim)
        ones = jnp.ones(shape[:1], jnp.float32)
        if codebook is not None:
            codebook = as_array("VQbitLayer.init", "codebook", codebook)
            self._check_codebook(codebook)
            state = fresh(codebook, ones, later, True)
        else:
            drawn = jax.random.normal(own, shape, jnp.float32)
            state = fresh(drawn, ones, later, not self.kmeans_start)
            if x is not None and self.kmeans_start:
                rows = self._rows(as_array("VQbitLayer.init", "x", x))
                state = self._started(state, rows, _valid(rows), own, later)
        return state if self.mesh is None else jax.device_put(state, self.shardings())

    def specs(self) -> VQbitState:
        """A PartitionSpec for each part of the state: codes are split over `codebook_axis_name`, the rest is whole."""
        one, two = PartitionSpec(self.codebook_axis_name), PartitionSpec(self.codebook_axis_name, None)
        return VQbitState(two, one, two, one, PartitionSpec(), PartitionSpec())

    def shardings(self) -> VQbitState:
        """`specs` on the layer's mesh, for `jax.device_put` and jit's in_shardings."""
        if self.mesh is None:
            raise rule_error("Shardings are on the layer's mesh", "mesh=None", "pass mesh= to the layer")
        mesh = self.mesh
        return VQbitState(*(NamedSharding(mesh, spec) for spec in self.specs()))

    def __call__(self, x: Any, *, training: bool = True) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """(quantized, indices, metrics) of x [..., D]; in training the layer's own state goes on."""
        x = as_array("VQbitLayer", "x", x)
        self._rows(x)
        # An array that a jitted function closes over is no tracer, and what is computed of it there is one.
        traced = any(isinstance(one, jax.core.Tracer) for one in (x, jnp.zeros(())))
        if self._state is None and traced:
            # Numbers, whatever is being traced and over which axes: a tracer kept here would outlive its trace, and so
            # would the type of an array made inside shard_map.
            with jax.core.eval_context(), jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
                self._state = self.init()
        elif self._state is None:
            self._state = self.init(x=x)
        made, state = self.apply(self._state, x, training=training and not traced)
        if traced and not bool(self._state.started):
            say_once(
                UserWarning,
                self._name,
                "This VQbitLayer is called inside jit, grad or vmap before any batch has given it codes: they are the "
                "random ones of its seed. Set layer.state = layer.init(x=batch) before for the k-means centres of one.",
                stacklevel=3,
            )
        if traced and training:
            say_once(
                UserWarning,
                self._name,
                "A VQbitLayer called inside jit, grad or vmap does not update its codebook, which is a constant there. "
                "Use layer.apply(state, x, training=True), which returns the new state.",
                stacklevel=3,
            )
        elif training:
            self._state = state
        return made

    def apply(
        self, state: VQbitState, x: Any, training: bool = True
    ) -> tuple[tuple[jax.Array, jax.Array, dict[str, jax.Array]], VQbitState]:
        """((quantized, indices, metrics), new state): a pure function, for jit and for training steps.

        A state that `init` made without x is started here, in training, by the k-means centres of x.
        """
        x = as_array("VQbitLayer.apply", "x", x)
        rows = self._rows(x)
        start: bool | None = False
        if training and self.kmeans_start and rows.shape[0]:
            # Known where the state is: else the program has both ways.
            start = None if isinstance(state.started, jax.core.Tracer) else not bool(state.started)
        return self._step(state, x, training=bool(training), start=start)

    def _pure_step(self, state: VQbitState, x: jax.Array, *, training: bool, start: bool | None) -> Any:
        """`apply`, compiled as a whole; `start` says whether k-means gives the first codes, None asks the state."""
        rows = self._rows(x)
        valid = _valid(rows)
        clean = lax.stop_gradient(rows)
        if start:
            state = self._started(state, clean, valid, *jax.random.split(state.key))
        elif start is None:
            state = lax.cond(
                state.started,
                lambda state: state,
                lambda state: self._started(state, clean, valid, *jax.random.split(state.key)),
                state,
            )
        codebook = state.codebook if self.decay is None else lax.stop_gradient(state.codebook)
        indices, counts, sums = self._search(clean, lax.stop_gradient(codebook), training)
        codes = look_up(codebook, indices)
        found = (indices >= 0)[:, None]
        numbers = jnp.maximum(found.sum() * self.embedding_dim, 1)

        def mean_square(left: jax.Array, right: jax.Array) -> jax.Array:
            difference = jnp.where(found, left.astype(jnp.float32), 0) - jnp.where(found, right, 0)
            return jnp.square(difference).sum() / numbers

        commitment_loss = mean_square(rows, lax.stop_gradient(codes))
        codebook_loss = mean_square(clean, codes)
        quantized = straight_through(x, codes.astype(x.dtype).reshape(x.shape))

        idle = jnp.where(counts > 0, 0, state.idle + 1)
        dead = idle >= (1 if self.revive_after is None else self.revive_after)
        new, brought_back = state, jnp.int32(0)
        if training:
            key, later = jax.random.split(state.key)
            new = state._replace(idle=idle, key=later)
            if self.decay is not None:
                new = averaged(new, counts, sums, self.decay)
            if self.revive_after is not None:
                new, brought_back = revived(new, clean, valid, dead, key)
        share = counts / jnp.maximum(counts.sum(), 1)
        entropy = -jnp.where(share > 0, share * jnp.log(jnp.where(share > 0, share, 1)), 0).sum()
        learned = codebook_loss if self.decay is None else 0.0
        metrics = {
            "perplexity": jnp.exp(entropy),
            "usage": (counts > 0).mean(),
            "commitment_loss": commitment_loss,
            "codebook_loss": codebook_loss,
            "loss": self.commitment * commitment_loss + learned,
            "dead_codes": dead.sum(dtype=jnp.int32),
            "revived": brought_back,
            "invalid_rows": (~valid).sum(dtype=jnp.int32),
        }
        return (quantized, indices.reshape(x.shape[:-1]), metrics), new

    @property
    def _implementation(self) -> str | None:
        return None if self.use_jax_native else "xla"

    def _kmeans(self, key: jax.Array, rows: jax.Array, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
        return kmeans(
            key, rows, valid, codes=self.codebook_size, steps=KMEANS_STEPS, implementation=self._implementation
        )

    def _started(
        self, state: VQbitState, rows: jax.Array, valid: jax.Array, own: jax.Array, later: jax.Array
    ) -> VQbitState:
        """The state, its first codes from this batch; as it is, for the next batch to start, where no row is valid."""
        if rows.shape[0] == 0:
            return state
        made = fresh(*self._kmeans(own, rows, valid), later, True)
        return jax.tree.map(lambda new, old: jnp.where(valid.any(), new, old), made, state)

    def _search(self, rows: jax.Array, codebook: jax.Array, training: bool) -> tuple[Any, Any, Any]:
        """Indices, and how many rows of the batch each code has; in training their sums too."""
        if self.use_tpu_optimizations:
            if current_target().platform == "tpu":
                # Sums keep the rows as they came: only the search is in bfloat16.
                indices = nearest_code(
                    rows.astype(jnp.bfloat16), codebook.astype(jnp.bfloat16), implementation=self._implementation
                )
                return self._tallied(indices, rows)
            text = "use_tpu_optimizations=True changes nothing on %s: it is for TPUs"
            say_once(logger, self._name, text, current_target().platform)
        return nearest_code(rows, codebook, return_stats=True, implementation=self._implementation)

    def _tallied(self, indices: jax.Array, rows: jax.Array) -> tuple[Any, Any, Any]:
        from capibara.kernels.ops.vq.nearest.statistics import statistics

        return (indices, *statistics(rows, indices, self.codebook_size, jnp.float32))

    def _rows(self, x: jax.Array) -> jax.Array:
        """x as rows [N, D]; an error where it has none."""
        if np.dtype(x.dtype).name not in FLOATS:
            raise rule_error(
                f"A VQbitLayer quantizes {', '.join(FLOATS)}", describe(x), "convert x with .astype(jnp.float32)"
            )
        if x.ndim == 0 or x.shape[-1] != self.embedding_dim:
            raise rule_error(
                f"The last axis of x is embedding_dim = {self.embedding_dim}", describe(x), "check the layer's sizes"
            )
        return x.reshape(-1, self.embedding_dim)

    def _check_codebook(self, codebook: Any) -> None:
        wanted = (self.codebook_size, self.embedding_dim)
        if codebook.shape != wanted or np.dtype(codebook.dtype).name not in FLOATS:
            raise rule_error(
                f"The codebook of this layer is {wanted} numbers of {', '.join(FLOATS)}", describe(codebook),
                "check codebook_size and embedding_dim",
            )  # fmt: skip
        if not isinstance(codebook, jax.core.Tracer) and not bool(jnp.isfinite(codebook).all()):
            wrong = int((~jnp.isfinite(codebook).all(-1)).sum())
            raise rule_error("A codebook is finite numbers", f"{wrong} codes with NaN or infinity", "load another")

    def _check_mesh(self, mesh: Mesh | None, axis: str | None) -> None:
        if axis is None:
            return
        if mesh is None:
            raise rule_error("codebook_axis_name is an axis of the mesh", f"{axis!r} and mesh=None", "pass mesh= too")
        if axis not in mesh.shape:
            raise unknown_name("axis of the mesh", axis, mesh.shape)
        if self.codebook_size % mesh.shape[axis]:
            raise rule_error(
                "Every device has as many codes",
                f"{self.codebook_size} codes over {mesh.shape[axis]} devices",
                "choose a codebook_size that divides",
            )


def _valid(rows: jax.Array) -> jax.Array:
    return jnp.square(lax.stop_gradient(rows).astype(jnp.float32)).sum(-1) < jnp.inf


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def _whole(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise rule_error(f"{name} is a whole number, {least} or more", repr(value), f"use {name}={max(least, 1)}")
    return int(value)
