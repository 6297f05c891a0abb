"""Optimizers by name: what they keep for each parameter is most of a training step's memory.

A plan takes `optimizer_named`, whose numbers do not matter; a trainer takes `make_optimizer`, optax's with a schedule
and clipping.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from capibara.errors import rule_error, unknown_name

__all__ = ["OPTIMIZERS", "check_decays", "make_optimizer", "optimizer_named", "planned_optimizer", "schedule_named"]

Init = Callable[[Any], Any]
Update = Callable[[Any, Any, Any], tuple[Any, Any]]

# The usual ones for language models. A plan depends on what is kept and computed, not on these numbers.
_RATE, _B1, _B2, _EPSILON, _DECAY = 3e-4, 0.9, 0.95, 1e-8, 0.1


def _adamw(mixed: bool) -> tuple[Init, Update]:
    def init(params: Any) -> Any:
        def zeros(p: Any) -> Any:
            return jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32) if mixed else p.dtype)

        return {"count": jnp.int32(0), "mean": jax.tree.map(zeros, params), "square": jax.tree.map(zeros, params)}

    def update(params: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
        count = state["count"] + 1
        # The moments start at zero; this takes out what that pulls them down by.
        first, second = 1 - _B1**count, 1 - _B2**count

        def moved(p: Any, m: Any, v: Any, g: Any) -> tuple[Any, Any, Any]:
            m = (_B1 * m + (1 - _B1) * g).astype(m.dtype)
            v = (_B2 * v + (1 - _B2) * g * g).astype(v.dtype)
            way = (m / first) / (jnp.sqrt(v / second) + _EPSILON)
            return (p - _RATE * (way + _DECAY * p)).astype(p.dtype), m, v

        # All of one parameter before the next one's: moments that lie with the host can come and go one after another.
        made = jax.tree.map(moved, params, state["mean"], state["square"], gradients)
        params, mean, square = jax.tree.transpose(jax.tree.structure(params), jax.tree.structure((0, 0, 0)), made)
        return params, {"count": count, "mean": mean, "square": square}

    return init, update


def _sgd(mixed: bool) -> tuple[Init, Update]:
    del mixed  # it keeps nothing, so there is no type to choose

    def update(params: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
        return jax.tree.map(lambda p, g: (p - _RATE * g).astype(p.dtype), params, gradients), state

    return lambda params: (), update


def _like_optax(optimizer: Any) -> tuple[Init, Update]:
    def update(params: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
        changes, state = optimizer.update(gradients, state, params)
        return jax.tree.map(lambda p, u: (p + u).astype(p.dtype), params, changes), state

    return optimizer.init, update


def _of_optax(name: str) -> Callable[[bool], tuple[Init, Update]]:
    def planned(mixed: bool) -> tuple[Init, Update]:
        del mixed  # optax keeps what it keeps in the gradients' type
        return _like_optax(make_optimizer(name, _RATE, b1=_B1, b2=_B2, eps=_EPSILON, weight_decay=_DECAY))

    return planned


OPTIMIZERS: dict[str, Callable[[bool], tuple[Init, Update]]] = {
    "adamw": _adamw,
    "sgd": _sgd,
    **{name: _of_optax(name) for name in ("adafactor", "lion", "muon")},
}


_TAKES = {
    "adamw": ("b1", "b2", "eps"),
    "adafactor": (),
    "lion": ("b1", "b2"),
    "muon": ("b1", "b2", "eps"),
    "sgd": ("b1",),
}
"""Which of the decays and eps an optimizer has a use for. Adafactor's own are a power of the step and 1e-30."""


def check_decays(name: str, *, b1: float = _B1, b2: float = _B2, eps: float = _EPSILON) -> None:
    """Refuse a value that the optimizer would not read; the defaults are nobody's wish."""
    if name not in OPTIMIZERS:
        raise unknown_name("optimizer", name, OPTIMIZERS)
    for key, value, usual in (("b1", b1, _B1), ("b2", b2, _B2), ("eps", eps, _EPSILON)):
        if value != usual and key not in _TAKES[name]:
            takes = " and ".join(_TAKES[name]) or "none of them"
            raise rule_error(
                f"Of b1, b2 and eps the optimizer {name!r} takes {takes}", f"{key} = {value}", f"leave {key} out"
            )


class Momentum:
    """Gradient descent that keeps a momentum, for a plan, which does without optax."""

    def init(self, params: Any) -> Any:
        return jax.tree.map(jnp.zeros_like, params)

    def update(self, gradients: Any, state: Any, params: Any) -> tuple[Any, Any]:
        state = jax.tree.map(lambda m, g, p: (_B1 * m + g + _DECAY * p).astype(m.dtype), state, gradients, params)
        return jax.tree.map(lambda m: -_RATE * m, state), state


def planned_optimizer(name: str, b1: float = _B1) -> Any:
    """What a plan takes for a trainer's optimizer: its name, but for gradient descent with momentum, which keeps one
    where "sgd" keeps nothing."""
    return Momentum() if name == "sgd" and b1 else name


def make_optimizer(
    name: str,
    learning_rate: Any,
    *,
    b1: float = _B1,
    b2: float = _B2,
    eps: float = _EPSILON,
    weight_decay: float = 0.0,
    clip: float = 0.0,
) -> Any:
    """optax's optimizer of this name; `learning_rate` is a number or a schedule of the step.

    Weight decay is taken off weights of two dimensions and more a layer, not off norms, biases and the decays of a
    state space. With `clip` the gradients' global norm is at most that. Of `b1`, `b2` and `eps` AdamW and Muon take
    all (Muon's part for embeddings, head and norms is Adam), Lion the first two, and gradient descent the first as its
    momentum; Adafactor takes none.
    """
    import optax

    def is_matrix(params: Any) -> Any:
        # A scan's weights are stacked on a leading axis, so a norm's scale has two dimensions there.
        return jax.tree_util.tree_map_with_path(
            lambda path, p: not _is_offset(path) and p.ndim - ("layers" in _names(path)) > 1, params
        )

    check_decays(name, b1=b1, b2=b2, eps=eps)
    if name == "adamw":
        made = optax.adamw(learning_rate, b1, b2, eps, weight_decay=weight_decay, mask=is_matrix)
    elif name == "lion":
        made = optax.lion(learning_rate, b1, b2, weight_decay=weight_decay, mask=is_matrix)
    elif name == "adafactor":
        # Its own decay is a share of the weights a step, whatever the rate: here the rate comes last, and takes both.
        made = optax.chain(
            optax.adafactor(None),
            optax.scale(-1.0),
            optax.add_decayed_weights(weight_decay, is_matrix),
            optax.scale_by_learning_rate(learning_rate),
        )
    elif name == "muon":
        # Its part for embeddings, head and norms, Adam, takes no mask for the decay: so it is added to both here, and
        # the rate comes last. At a rate of 1 its own scaling is a change of sign.
        both = optax.contrib.muon(1.0, eps=eps, adam_b1=b1, adam_b2=b2, muon_weight_dimension_numbers=_muon_dimensions)
        made = optax.chain(
            both,
            optax.scale(-1.0),
            optax.add_decayed_weights(weight_decay, is_matrix),
            optax.scale_by_learning_rate(learning_rate),
        )
    else:
        descent = optax.sgd(learning_rate, momentum=b1 or None)  # a momentum of 0 would still be kept
        made = optax.chain(optax.add_decayed_weights(weight_decay, is_matrix), descent)
    return optax.chain(optax.clip_by_global_norm(clip), made) if clip else made


def _names(path: Any) -> list[Any]:
    return [getattr(key, "key", None) for key in path]


def _is_offset(path: Any) -> bool:
    """Biases, of heads too, which have two dimensions; and the logarithms of a state space's decays."""
    name = str(_names(path)[-1])
    return name == "decay" or name.endswith("bias")


def _muon_dimensions(params: Any) -> Any:
    """Which dimensions of a weight Muon orthogonalises: a layer's matrices, apart from embedding and head.

    The taps of a convolution are no matrix: each channel has its own.
    A weight of three dimensions a layer is heads in or out: the two of the heads are one side of the matrix.
    """
    from optax.contrib import MuonDimensionNumbers

    def of(path: Any, p: Any) -> Any:
        names = _names(path)
        if "layers" not in names or p.ndim < 3 or _is_offset(path) or str(names[-1]).endswith("conv"):
            return None
        if p.ndim == 3:
            return MuonDimensionNumbers(reduction_axis=1, output_axis=2)
        if names[-1] == "out":
            return MuonDimensionNumbers(reduction_axis=(1, 2), output_axis=3)
        if names[-1] in ("query", "key", "value"):
            return MuonDimensionNumbers(reduction_axis=1, output_axis=(2, 3))
        return MuonDimensionNumbers(reduction_axis=2, output_axis=3)  # a stack of experts

    return jax.tree_util.tree_map_with_path(of, params)


def schedule_named(name: str, learning_rate: float, *, steps: int, warmup_steps: int = 0, final: float = 0.0) -> Any:
    """The rate as a function of the step: up by a line over `warmup_steps`, then as the name says down to `final` of
    it at `steps`.

    >>> rate = schedule_named("linear", 1.0, steps=10, warmup_steps=2)
    >>> [round(float(rate(step)), 3) for step in (0, 1, 2, 6, 10)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    if name not in ("cosine", "linear", "constant", "wsd"):
        raise unknown_name("schedule", name, ("cosine", "linear", "constant", "wsd"))
    warmup, rest = min(warmup_steps, steps), max(1, steps - warmup_steps)

    def rate(step: Any) -> Any:
        step = jnp.asarray(step, jnp.float32)
        up = jnp.minimum(1.0, (step + 1) / max(1, warmup))
        gone = jnp.clip((step - warmup) / rest, 0.0, 1.0)
        if name == "cosine":
            down = final + (1 - final) * 0.5 * (1 + jnp.cos(jnp.pi * gone))
        elif name == "linear":
            down = 1 - (1 - final) * gone
        elif name == "wsd":
            down = 1 - (1 - final) * jnp.clip((gone - 0.8) / 0.2, 0.0, 1.0)
        else:
            down = jnp.float32(1)
        return learning_rate * up * down

    return rate


def optimizer_named(optimizer: Any, mixed: bool) -> tuple[Init, Update]:
    """(init, update) of an optimizer by name, or of an object with `init` and `update` as optax makes them."""
    if isinstance(optimizer, str):
        if optimizer not in OPTIMIZERS:
            raise unknown_name("optimizer", optimizer, OPTIMIZERS)
        return OPTIMIZERS[optimizer](mixed)
    if hasattr(optimizer, "init") and hasattr(optimizer, "update"):
        return _like_optax(optimizer)
    raise rule_error(
        "An optimizer is a name or has init(params) and update(gradients, state, params)",
        type(optimizer).__name__,
        f"use one of {', '.join(map(repr, OPTIMIZERS))}, or an optax transformation",
    )
