"""What can be trained: a capibara model, a Flax NNX or Equinox module, or any pure `loss(params, batch)`.

A `Trainable` has parameters as a pytree and a loss as a function of them; the adapters make one of what a user has.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from capibara.errors import rule_error
from capibara.models import decoder
from capibara.models.modular import ModularCapibaraModel
from capibara.parallel.trainer_step import Loss, WithHistory, compute_dtype, param_dtype
from capibara.precision import Fp8Settings

__all__ = ["LossTrainable", "ModelTrainable", "Trainable", "as_trainable"]


class Trainable(Protocol):
    """What the trainer asks of what it trains."""

    name: str

    def shapes(self) -> Any:
        """The parameters' shapes and types."""
        ...

    def init(self, key: jax.Array) -> Any:
        """Parameters to start from; it is traced."""
        ...

    def loss(self, unroll: int | bool = 1) -> Loss:
        """`loss(params, batch, key) -> (value, metrics)`, with so many repeats of the layers written out."""
        ...

    def flops_per_token(self, length: int) -> float | None:
        """Of a training step; None where it is not known."""
        ...

    def publish(self, params: Any) -> None:
        """Give the user's own object these parameters."""
        ...


class ModelTrainable:
    """A `ModularCapibaraModel`."""

    def __init__(
        self,
        model: ModularCapibaraModel,
        precision: str = "mixed",
        z_loss: float = 0.0,
        load: Callable[[Any], Any] | None = None,
        fp8: Fp8Settings | None = None,
    ) -> None:
        """`load(mesh)` gives weights to start from; the model's own, where it has some, come first. `fp8` says how
        products are scaled in precision "fp8"."""
        self._load = load
        self.fp8 = (fp8 or Fp8Settings()) if precision == "fp8" else None
        self.model = model
        self.precision = precision
        self.z_loss = z_loss
        self.name = model.config.name
        self.repeats = model.config.repeats

    def shapes(self) -> Any:
        return decoder.param_shapes(self.model.config, param_dtype(self.precision))

    def init(self, key: jax.Array) -> Any:
        return decoder.init(self.model.config, key, param_dtype(self.precision))

    def starting_params(self, mesh: Any = None) -> Any:
        """Weights to start from, on this mesh: the model's own where it has some, else what `load` gives."""
        if self.model._params is None and self._load is not None:
            self.model._params = self._load(mesh)
        return self.model._params

    def loss(self, unroll: int | bool = 1) -> Loss:
        def run(params: Any, batch: Any, key: Any) -> tuple[jax.Array, Mapping[str, jax.Array]]:
            params, history = params if isinstance(params, WithHistory) else (params, None)
            return decoder.loss(
                self.model.config,
                params,
                batch,
                z_loss=self.z_loss,
                key=key if self._draws else None,
                dtype=compute_dtype(self.precision),
                unroll=unroll,
                fp8=self.fp8,
                fp8_history=history,
            )

        return run

    def fp8_history_shapes(self) -> Any:
        """What fp8 products are scaled by; None where that is the tensors themselves."""
        return None if self.fp8 is None else decoder.fp8_history_shapes(self.model.config, self.fp8)

    @functools.cached_property
    def _draws(self) -> bool:
        """Whether anything in the model is drawn while it trains."""
        return any(getattr(block, "jitter", 0) > 0 for block in self.model.config.blocks.values())

    def flops_per_token(self, length: int) -> float | None:
        return self.model.config.flops_per_token(length)

    def publish(self, params: Any) -> None:
        self.model._params = params
        self.model.precision = self.precision
        self.model.fp8 = self.fp8


class LossTrainable:
    """Any `loss(params, batch)` that gives one number, or (number, metrics), and parameters to start from."""

    def __init__(
        self, loss: Callable[..., Any], params: Any, name: str = "", publish: Callable[[Any], None] | None = None
    ) -> None:
        self._loss = loss
        self._params = params
        self._publish = publish
        self.name = name or getattr(loss, "__name__", "loss")
        self.repeats = 1

    def shapes(self) -> Any:
        return jax.eval_shape(lambda tree: tree, self._params)

    def init(self, key: jax.Array) -> Any:
        del key  # they are the caller's
        return self._params

    def starting_params(self, mesh: Any = None) -> Any:
        return self._params

    def loss(self, unroll: int | bool = 1) -> Loss:
        def run(params: Any, batch: Any, key: Any) -> tuple[jax.Array, Mapping[str, jax.Array]]:
            out = self._loss(params, batch)
            value, metrics = out if isinstance(out, tuple) else (out, {})
            if jnp.shape(value) != ():
                raise rule_error("A loss gives one number", f"shape {jnp.shape(value)}", "return loss.mean()")
            return value, {"loss": value, **metrics}

        return run

    def flops_per_token(self, length: int) -> float | None:
        return None

    def publish(self, params: Any) -> None:
        self._params = params
        if self._publish is not None:
            self._publish(params)


def as_trainable(
    model: Any,
    *,
    loss: Callable[..., Any] | None = None,
    precision: str = "mixed",
    z_loss: float = 0.0,
    fp8: Fp8Settings | None = None,
) -> Trainable:
    """A trainable of a model, of an NNX or Equinox module with `loss(module, batch)`, or of (loss, params)."""
    if isinstance(model, ModularCapibaraModel):
        if loss is not None:
            raise rule_error("A capibara model brings its loss", "loss=", "leave it out")
        return ModelTrainable(model, precision, z_loss, fp8=fp8)
    if precision == "fp8":
        raise rule_error(
            'precision="fp8" is for the products of a capibara model',
            type(model).__name__,
            'use capibara.kernels.fp8_products in your own loss, and precision="mixed"',
        )
    if z_loss:
        raise rule_error("z_loss is part of a capibara model's loss", f"z_loss={z_loss}", "add it to your own loss")
    if all(hasattr(model, name) for name in ("shapes", "init", "loss", "publish")):
        return model
    if isinstance(model, tuple) and len(model) == 2 and callable(model[0]):
        return LossTrainable(model[0], model[1])
    if loss is None:
        raise rule_error(
            "The trainer takes a capibara model, (loss, params), or an NNX or Equinox module with loss=",
            type(model).__name__,
            "pass loss=a function of the module and a batch",
        )
    kinds = {base.__module__.split(".")[0] for base in type(model).__mro__}
    if "flax" in kinds:
        return _of_nnx(model, loss)
    if "equinox" in kinds:
        return _of_equinox(model, loss)
    return LossTrainable(loss, model)


def _of_nnx(module: Any, loss: Callable[..., Any]) -> Trainable:
    """An NNX module: its Param variables are trained, all other state is as it was."""
    from flax import nnx

    graph, params, rest = nnx.split(module, nnx.Param, ...)  # type: ignore[misc]  # its stubs give a tuple of any length

    def of_params(params: Any, batch: Any) -> Any:
        return loss(nnx.merge(graph, params, rest), batch)

    return LossTrainable(of_params, params, type(module).__name__, lambda params: nnx.update(module, params))


def _of_equinox(module: Any, loss: Callable[..., Any]) -> Trainable:
    """An Equinox module: its floating arrays are trained. A module is frozen: the trained one is `.module`."""
    import equinox

    params, static = equinox.partition(module, equinox.is_inexact_array)

    def of_params(params: Any, batch: Any) -> Any:
        return loss(equinox.combine(params, static), batch)

    trainable = LossTrainable(of_params, params, type(module).__name__)

    def publish(params: Any) -> None:
        trainable.module = equinox.combine(params, static)  # type: ignore[attr-defined]

    trainable._publish = publish
    publish(params)
    return trainable
