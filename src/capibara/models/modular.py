"""`ModularCapibaraModel`: a config with its parameters, and what one does with a model."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from capibara.errors import rule_error
from capibara.hardware.facts import GiB
from capibara.mesh import context as optimisation
from capibara.mesh import shard_params
from capibara.models import decoder, generation, step_hooks
from capibara.models.config import ModularModelConfig
from capibara.models.tokenizer import Tokenizer, load_tokenizer
from capibara.models.weights.generation_config import GenerationDefaults
from capibara.parallel import trainer_step
from capibara.parallel.optimizers import make_optimizer
from capibara.precision import Fp8Settings

__all__ = ["ModularCapibaraModel", "as_batch"]

_RATE = 3e-4


def as_batch(batch: Any) -> dict[str, Any]:
    """A training batch as a dict: a bare array of ids is inputs shifted against itself.

    >>> {name: ids.tolist() for name, ids in as_batch(np.array([[1, 2, 3]])).items()}
    {'inputs': [[1, 2]], 'targets': [[2, 3]]}
    """
    if isinstance(batch, Mapping):
        missing = [name for name in ("inputs", "targets") if name not in batch]
        if missing:
            raise rule_error(
                'A batch has "inputs" and "targets"', f"keys {sorted(batch)}", f"add {missing[0]!r}, or pass bare ids"
            )
        known = ("inputs", "targets", "segment_ids", "positions", "mask")
        for name in batch:
            if name not in known:
                raise rule_error(f"A batch's keys are {', '.join(known)}", repr(name), "leave it out")
        return dict(batch)
    ids = jnp.asarray(batch) if isinstance(batch, jax.Array) else np.asarray(batch)
    if ids.ndim != 2 or not np.issubdtype(ids.dtype, np.integer) or ids.shape[1] < 2:
        raise rule_error(
            "A batch is a dict, or token ids [rows, length of 2 or more]",
            f"{ids.dtype}{list(ids.shape)}",
            "pass whole numbers of two axes",
        )
    return {"inputs": ids[:, :-1], "targets": ids[:, 1:]}


class ModularCapibaraModel:
    """A decoder of this config. Making one allocates nothing: `params` start when they are first asked for.

    Called with token ids [batch, length], or embeddings [batch, length, hidden], it gives logits. `apply` does so with
    other parameters, and is what belongs under jit and grad.

    >>> from capibara.models import load_preset
    >>> model = ModularCapibaraModel(load_preset("dev").model)
    >>> model(np.zeros((1, 8), np.int32)).shape
    (1, 8, 259)
    """

    def __init__(
        self,
        config: ModularModelConfig,
        *,
        params: Any = None,
        precision: str = "mixed",
        seed: int = 0,
        fp8: Fp8Settings | None = None,
    ) -> None:
        if not isinstance(config, ModularModelConfig):
            raise rule_error(
                "A model is made of a ModularModelConfig",
                type(config).__name__,
                'use ModularModelConfig.from_toml("dev")',
            )
        if fp8 is not None and precision != "fp8":
            raise rule_error(
                'fp8= is for precision="fp8"', f'precision="{precision}"', 'leave fp8 out, or use precision="fp8"'
            )
        self.config = config
        self.precision = precision
        self.fp8 = fp8
        """How the operands of fp8 products are scaled in training, where precision is "fp8"; by default as
        `Fp8Settings()`. Logits and generated text are made by bfloat16 products."""
        self.seed = seed
        self._params = params
        self._training: dict[str, Any] | None = None
        self.prompt_bos = True
        """Whether a prompt of text begins with bos, where the tokenizer has one, as training documents do."""
        self.generation = GenerationDefaults()
        """What a Hugging Face folder says of the end of text, and of sampling where nobody says otherwise."""

    def __repr__(self) -> str:
        name = self.config.name or "unnamed"
        return f"ModularCapibaraModel({name}, {self.config.parameters:,} parameters)"

    # Parameters.

    @property
    def params(self) -> Any:
        """The weights, a plain pytree. At first use they are drawn by the seed, laid out on the active mesh."""
        if self._params is None:
            self._params = self.init()
        return self._params

    @params.setter
    def params(self, params: Any) -> None:
        wanted = decoder.param_shapes(self.config)
        same: Any = jax.tree.structure(params)  # jax's stubs do not compare it
        if same != jax.tree.structure(wanted):
            raise rule_error(
                "Parameters are a tree like `decoder.param_shapes(config)`",
                str(jax.tree.structure(params))[:200],
                "start from model.params",
            )
        for (path, have), want in zip(
            jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(wanted), strict=True
        ):
            if have.shape != want.shape:
                raise rule_error(
                    f"params{jax.tree_util.keystr(path)} is {list(want.shape)}",
                    list(have.shape),
                    "use the parameters of this config",
                )
        self._params = params
        self._training = None

    def init(self, key: jax.Array | None = None) -> Any:
        """Parameters to start from, made where they lie: nothing is first made whole on one device."""
        key = jax.random.key(self.seed) if key is None else key
        dtype = trainer_step.param_dtype(self.precision)
        shapes = decoder.param_shapes(self.config, dtype)
        mesh = jax.sharding.get_mesh() if not jax.sharding.get_abstract_mesh().empty else None
        self._check_memory(shapes, 1 if mesh is None else mesh.size)
        make = functools.partial(decoder.init, self.config, dtype=dtype)
        if mesh is None:
            return jax.jit(make)(key)
        laid_out = shard_params(shapes, decoder.axes(self.config), mesh)
        return jax.jit(make, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, laid_out))(key)

    def _check_memory(self, shapes: Any, devices: int) -> None:
        from capibara.hardware.devices import attached

        here = attached()[0]
        if here.memory_limit_bytes is None:
            return
        needed = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
        # Virtual devices of a CPU share the host's memory.
        room = here.memory_limit_bytes * (1 if here.platform == "cpu" else devices)
        if needed > room:
            raise rule_error(
                "A model's weights fit the memory of the devices",
                f"{needed / GiB:.1f} GiB of weights for {room / GiB:.1f} GiB on {devices} device(s)",
                "use more devices (jax.set_mesh), a smaller preset, or `capibara plan` to see what would do",
            )

    # What it is meant for.

    @property
    def is_tpu_optimized(self) -> bool:
        """Whether calls run inside of the TPU optimisation context: by the config's [tpu], or one that is active."""
        return optimisation.active() or (self.config.tpu is not None and self.config.tpu.optimized)

    @property
    def tpu_mesh_shape(self) -> tuple[int, ...] | None:
        """The mesh that the config is made for; None where it says nothing of TPUs."""
        return None if self.config.tpu is None else self.config.tpu.mesh_shape

    @property
    def tpu_memory_limit_gb(self) -> float | None:
        """GiB of a chip that the config reckons with; None where it says nothing of TPUs."""
        return None if self.config.tpu is None else self.config.tpu.memory_limit_gb

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.config.tokenizer)

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end a text: the tokenizer's, and those that the model's makers name."""
        own = self.tokenizer.eos_id
        return frozenset([*self.generation.eos_ids, *([] if own is None else [own])])

    # Running it.

    def _surroundings(self) -> contextlib.AbstractContextManager[Any]:
        """The optimisation context where the config asks for it; an active one stays as it is."""
        if optimisation.active() or not self.is_tpu_optimized:
            return contextlib.nullcontext()
        return optimisation.tpu_v4_optimization_context(
            precision="float32" if self.precision == "float32" else "bfloat16"
        )

    @property
    def _dtype(self) -> Any:
        return trainer_step.compute_dtype(self.precision)

    def apply(self, params: Any, inputs: Any, **sequences: Any) -> jax.Array:
        """Logits, float32 [batch, length, vocab], of these parameters. `segment_ids` and `positions` as in a batch."""
        inputs = jnp.asarray(inputs)
        self._check_length(inputs.shape[1] if inputs.ndim > 1 else 1)
        with self._surroundings():
            x, _, _ = decoder.hidden_states(self.config, params, inputs, dtype=self._dtype, **sequences)
            return decoder.logits(self.config, params, x)

    def forward(self, inputs: Any, **sequences: Any) -> jax.Array:
        """`apply` with the model's own parameters, compiled."""
        return self._forward(self.params, jnp.asarray(inputs), **sequences)

    __call__ = forward

    @functools.cached_property
    def _forward(self) -> Any:
        return jax.jit(self.apply)

    def _check_length(self, length: int) -> None:
        if length > self.config.max_length:
            raise rule_error(
                f"{self.config.name or 'This model'} takes {self.config.max_length} tokens of context",
                f"{length}",
                "cut the input, or set model.max_length and train it for that",
            )

    def loss(self, params: Any, batch: Any, key: jax.Array | None = None) -> tuple[jax.Array, dict[str, jax.Array]]:
        """(what training minimises, metrics) of a batch."""
        batch = as_batch(batch)
        self._check_length(batch["inputs"].shape[1])
        params, history = params if isinstance(params, trainer_step.WithHistory) else (params, None)
        return decoder.loss(self.config, params, batch, key=key, dtype=self._dtype, fp8=self._fp8, fp8_history=history)

    @property
    def _fp8(self) -> Fp8Settings | None:
        return (self.fp8 or Fp8Settings()) if self.precision == "fp8" else None

    def train_step(self, batch: Any) -> dict[str, float]:
        """One step of AdamW on the batch; the new weights are in `params`, and the metrics are returned.

        The optimizer's state stays with the model between calls. Whoever listens (a recovery manager, an autoscaler)
        is told, and whoever guards steps (a recovery manager) runs it, again after a device's failure.
        """
        batch = as_batch(batch)
        self._check_length(batch["inputs"].shape[1])
        self._begin_training()
        return step_hooks.guarded(self, functools.partial(self._train_step, batch))

    def _begin_training(self) -> None:
        if self._training is None:
            optimizer = make_optimizer("adamw", _RATE, weight_decay=0.1, clip=1.0)
            options = trainer_step.StepOptions(precision=self.precision, seed=self.seed)
            build = trainer_step.step_function(self.loss, optimizer, options)
            history = None if self._fp8 is None else decoder.fp8_history_shapes(self.config, self._fp8)
            begin = functools.partial(trainer_step.initial_state, optimizer, options=options, fp8_history=history)
            state = jax.jit(begin)(self.params)
            self._training = {"state": state, "step": jax.jit(build, donate_argnums=(0, 1))}

    def _train_step(self, batch: Any) -> dict[str, float]:
        assert self._training is not None
        with self._surroundings():
            params, state, metrics = self._training["step"](self.params, self._training["state"], batch)
        self._params, self._training["state"] = params, state
        step_hooks.report(int(state["step"]), {"params": params, "state": state})
        return {name: float(value) for name, value in metrics.items() if value.ndim == 0}

    @property
    def steps_done(self) -> int:
        """How many steps `train_step` has done."""
        return 0 if self._training is None else int(self._training["state"]["step"])

    def get_state(self) -> dict[str, Any]:
        """What `train_step` changes: the weights and the optimizer's state."""
        self._begin_training()
        assert self._training is not None
        return {"params": self.params, "state": self._training["state"]}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that `get_state` gave."""
        self._begin_training()
        assert self._training is not None
        self._params, self._training["state"] = state["params"], state["state"]

    def generate(
        self,
        prompt: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        *,
        max_tokens: int = 64,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        stop: Sequence[int] = (),
    ) -> Any:
        """The continuation of a prompt: text for text, ids for ids, a list for a list of prompts."""
        several = not isinstance(prompt, str) and len(prompt) > 0 and not isinstance(prompt[0], int | np.integer)
        prompts: list[Any] = list(prompt) if several else [prompt]
        texts = [isinstance(one, str) for one in prompts]
        ids: list[Any] = [self.encode_prompt(one) if isinstance(one, str) else list(one) for one in prompts]
        words = self.tokenizer.vocab_size if any(texts) else None
        rows: list[list[int]] = [[] for _ in ids]
        for tokens, _ in self.stream(
            ids,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop=stop,
            words=words,
        ):
            for row, token in zip(rows, tokens.tolist(), strict=True):
                if token >= 0:
                    row.append(token)
        out = [self.tokenizer.decode(row) if text else row for row, text in zip(rows, texts, strict=True)]
        return out if several else out[0]

    def encode_prompt(self, text: str) -> list[int]:
        """The ids to go on from: bos, where documents began with it in training, and the text's."""
        bos = self.tokenizer.bos_id
        return [*([bos] if self.prompt_bos and bos is not None else []), *self.tokenizer.encode(text)]

    def stream(self, prompts: Sequence[Sequence[int]], **options: Any) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(tokens, log-probabilities) of all rows, a step at a time, as `capibara.models.generation.generate` does."""
        steps = generation.generate(self.config, self.params, prompts, dtype=self._dtype, **options)
        while True:
            with self._surroundings():  # and not around the yield, where other code runs
                step = next(steps, None)
            if step is None:
                return
            yield step

    def to_hf(self, folder: str | Path, **options: Any) -> None:
        """Write weights and config.json in the Hugging Face layout of the model's family.

        `capibara.models.weights.save_hf` has the options: dtype, shard_bytes, extra, overwrite.
        """
        from capibara.models.weights import save_hf

        save_hf(folder, self.config, self.params, **options)
