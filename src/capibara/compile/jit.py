"""jit with a level: compiler options, bfloat16, memory and the cache on disk chosen by one small config.

`create_tpu_optimized_jit` decorates a function; its `.compile(...)` makes the program ahead of time, where every shape
is known. `create_jitted_forward` does both for a model's forward pass. The names are the documents'; nothing here is a
TPU's alone (`options.py` has what a level means to each platform).

- `use_bfloat16`: floating arguments become bfloat16 inside of the program, whole numbers stay; what the function closes
  over keeps its type, and products of float32 numbers round their operands to bfloat16 and add up in float32 (which a
  CPU's compiler, allowed to be more exact, leaves as float32).
- `memory_optimization`: the compiler's own options, and the function's backward pass computes its inner values again
  instead of keeping them (`jax.checkpoint`). Nothing is donated: the arrays stay the caller's.
- `cache_compiled_functions`: programs are kept on disk (`persistent.py`), for the next process.

Inside of another jit, grad or vmap the function is a part of the outer program, whose compiler options hold.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from capibara.compile.options import Level, check_level, compiler_options
from capibara.compile.persistent import current_persistent_cache, persistent_cache, stable_key
from capibara.errors import rule_error
from capibara.lru import LRU
from capibara.precision import policy

__all__ = [
    "CompiledFunction",
    "JittedForward",
    "OptimizedFunction",
    "TpuCompilationConfig",
    "create_jitted_forward",
    "create_tpu_optimized_jit",
]

_PROGRAMS = 64
"""Programs that one function keeps that were made ahead of time."""


@dataclass(frozen=True)
class TpuCompilationConfig:
    """How functions are compiled.

    Attributes:
      optimization_level: "none" (compiles fastest), "basic", "balanced" (the compiler's own choice) or "aggressive".
      use_bfloat16: compute in bfloat16.
      enable_async_collective: let work go on while collectives run; a CPU has none that do.
      memory_optimization: keep less for the backward pass, and ask the compiler for smaller programs.
      cache_compiled_functions: keep programs on disk for the next process.
    """

    optimization_level: Level = "balanced"
    use_bfloat16: bool = False
    enable_async_collective: bool = False
    memory_optimization: bool = False
    cache_compiled_functions: bool = True

    def __post_init__(self) -> None:
        check_level(self.optimization_level)
        for name in ("use_bfloat16", "enable_async_collective", "memory_optimization", "cache_compiled_functions"):
            if not isinstance(getattr(self, name), bool):
                raise rule_error(f"{name} is True or False", repr(getattr(self, name)), f"use {name}=True or False")

    def options(self, device: Any = None) -> dict[str, Any]:
        """The compiler options of this config for a device; the machine's first by default."""
        return compiler_options(
            self.optimization_level,
            async_collectives=self.enable_async_collective,
            memory=self.memory_optimization,
            device=device,
        )


def create_tpu_optimized_jit(
    config: TpuCompilationConfig | None = None,
) -> Callable[[Callable[..., Any]], OptimizedFunction]:
    """A decorator: the function jitted as the config says.

    >>> import jax.numpy as jnp
    >>> @create_tpu_optimized_jit(config=TpuCompilationConfig(use_bfloat16=True, cache_compiled_functions=False))
    ... def forward(params, inputs):
    ...     return inputs @ params
    >>> forward(jnp.ones((3, 4)), jnp.ones((2, 3))).dtype
    dtype(bfloat16)
    """
    if config is not None and not isinstance(config, TpuCompilationConfig):
        raise rule_error("config is a TpuCompilationConfig", type(config).__name__, "use TpuCompilationConfig(...)")
    return functools.partial(OptimizedFunction, config=config or TpuCompilationConfig())


class OptimizedFunction:
    """A function, jitted as a config says. Called, it compiles for what arrives; `compile` does so before."""

    def __init__(self, fn: Callable[..., Any], config: TpuCompilationConfig) -> None:
        if not callable(fn):
            raise rule_error("What is jitted is a function", type(fn).__name__, "decorate a function of arrays")
        functools.update_wrapper(self, fn)
        self.fn = fn
        self.config = config
        self._jitted: dict[tuple[str, str], Any] = {}  # a platform and chip of this machine each
        self._inside: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        import jax

        leaves = jax.tree.leaves((args, kwargs))
        if _traced(leaves):
            if self._inside is None:
                self._inside = jax.jit(self._as_configured(self.fn))
            return self._inside(*args, **kwargs)
        with self._keeping():
            return self._for_device(_device_of(leaves))(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """As `jax.jit(...).lower`, with the config's compiler options."""
        import jax

        return self._for_device(_device_of(jax.tree.leaves((args, kwargs)))).lower(*args, **kwargs)

    def compile(
        self, input_shapes: Sequence[Any], static_argnums: Sequence[int] | int = (), static_args: Sequence[Any] = ()
    ) -> CompiledFunction:
        """The program for these shapes: made now where every argument is known, else at the first call.

        Args:
          input_shapes: one for each argument that is not static, in order: a tuple of sizes, for float32, or arrays,
            `jax.ShapeDtypeStruct`s and trees of them.
          static_argnums: arguments that are no inputs. One of arrays (parameters) is bound by its shapes at the first
            call and handed over at each; any other is a constant of the program, which is made anew for another value.
          static_args: values of those, where they are known: the program is then made now.
        """
        static = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
        shapes = tuple(_shaped(shape) for shape in input_shapes)
        _check_arguments(self.fn, len(shapes), static)
        if static_args and len(static_args) != len(static):
            raise rule_error(
                "static_args has a value for each of static_argnums",
                f"{len(static_args)} for {len(static)}",
                "give all of them, or none",
            )
        compiled = CompiledFunction(self, shapes, static)
        if not static or static_args:
            compiled.make(static_args)
        return compiled

    def _program(self, args: Sequence[Any], constants: dict[int, Any]) -> Any:
        """Compiled for arguments of these shapes, with these values for those of `constants` (left out of `args`)."""
        import jax

        fn = _bound(self.fn, constants) if constants else self.fn
        with self._keeping():
            lowered = jax.jit(self._as_configured(fn)).lower(*args)
            with stable_key(lowered):
                return lowered.compile(compiler_options=self.config.options(_device_of(jax.tree.leaves(args))))

    def _for_device(self, device: Any) -> Any:
        import jax

        key = (device.platform, device.device_kind)
        if key not in self._jitted:
            options = self.config.options(device)
            self._jitted[key] = jax.jit(self._as_configured(self.fn), compiler_options=options or None)
        return self._jitted[key]

    def _as_configured(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """The function that is traced."""
        import jax

        config = self.config

        @functools.wraps(self.fn)
        def configured(*args: Any, **kwargs: Any) -> Any:
            if not config.use_bfloat16:
                return fn(*args, **kwargs)
            args, kwargs = policy("bfloat16").cast_to_compute((args, kwargs))
            with jax.default_matmul_precision("BF16_BF16_F32"):
                return fn(*args, **kwargs)

        return jax.checkpoint(configured) if config.memory_optimization else configured

    def _keeping(self) -> contextlib.AbstractContextManager[Any]:
        """What programs are made in: with a cache on disk, or with nothing written to one that is on."""
        if self.config.cache_compiled_functions:
            if current_persistent_cache() is None:
                persistent_cache()
            return contextlib.nullcontext()
        from jax._src.config import persistent_cache_min_compile_time_secs  # of this thread, which jax.config is not

        return persistent_cache_min_compile_time_secs(math.inf)


class CompiledFunction:
    """A function compiled for certain shapes. Called with others it makes another program, and keeps both."""

    def __init__(self, function: OptimizedFunction, shapes: tuple[Any, ...], static: tuple[int, ...]) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.shapes = shapes
        self.static = static
        self._programs: LRU[Any, Any] = LRU(2 * _PROGRAMS)
        self._last: Any = None

    @property
    def ready(self) -> bool:
        """Whether there is a program."""
        return self._last is not None

    @property
    def executable(self) -> Any:
        """The program that ran or was made last: `as_text()`, `memory_analysis()`, `cost_analysis()`."""
        if self._last is None:
            raise rule_error(
                "A program is made once the static arguments are known",
                "none yet",
                "call the function, or give static_args",
            )
        return self._last

    def make(self, static_args: Sequence[Any] = ()) -> None:
        """Make the program for the shapes it was declared for."""
        args: list[Any] = list(self.shapes)
        for position, value in sorted(zip(self.static, static_args, strict=True)):
            args.insert(position, value)
        self._of(args)

    def __call__(self, *args: Any) -> Any:
        import jax

        if _traced(jax.tree.leaves(args)):
            return self.function(*args)
        program, operands = self._of(args)
        return program(*operands)

    def _of(self, args: Sequence[Any]) -> tuple[Any, list[Any]]:
        """(the program for such arguments, those that it takes)."""
        import jax

        constants = {at: args[at] for at in self.static if at < len(args) and not _is_arrays(args[at])}
        operands = [value for at, value in enumerate(args) if at not in constants]
        leaves, tree = jax.tree.flatten(operands)
        key = (tuple(constants.items()), tree, tuple(map(_signature, leaves)))
        program = self._programs.get(key)
        if program is None:
            program = self.function._program(jax.tree.map(_described, operands), constants)
            self._programs[key] = program
        self._last = program
        return program, operands


def create_jitted_forward(
    model_fn: Callable[..., Any],
    input_shapes: Sequence[Any],
    optimization_level: Level = "balanced",
    use_bfloat16: bool = False,
    enable_async_collective: bool = False,
) -> JittedForward:
    """A forward pass, compiled ahead of time for the shapes it will see.

    >>> import jax.numpy as jnp
    >>> forward = create_jitted_forward(jnp.tanh, input_shapes=[(2, 3), (4, 3)])
    >>> forward.programs, forward(jnp.ones((4, 3))).shape
    (2, (4, 3))

    Args:
      model_fn: a function of arrays. The `forward` of a model that has `params` and `apply(params, ...)` is compiled
        as that: the weights are operands and not constants of the program, and are those that the model has when it is
        called.
      input_shapes: of each call to be ready for: a tuple of sizes for a function of one array, or a list of one for
        each argument. Of float32, unless a `jax.ShapeDtypeStruct` or an array says otherwise.
    """
    config = TpuCompilationConfig(
        optimization_level=optimization_level,
        use_bfloat16=use_bfloat16,
        enable_async_collective=enable_async_collective,
    )
    return JittedForward(model_fn, input_shapes, config)


class JittedForward:
    """A forward pass that is compiled for some shapes; others are compiled when they come."""

    def __init__(self, model_fn: Callable[..., Any], input_shapes: Sequence[Any], config: TpuCompilationConfig) -> None:
        functools.update_wrapper(self, model_fn)
        self.model, apply = _model_of(model_fn)
        self._function = OptimizedFunction(apply, config)
        self._compiled = CompiledFunction(self._function, (), ())
        for call in input_shapes:
            shapes = [_shaped(call)] if _is_shape(call) or not isinstance(call, (list, tuple)) else map(_shaped, call)
            operands = [*self._params(), *shapes]
            _check_arguments(apply, len(operands), ())
            self._compiled._of(operands)
        self.programs = len(self._compiled._programs)
        """Made ahead of time."""

    @property
    def executable(self) -> Any:
        """The program that ran or was made last: `as_text()`, `memory_analysis()`, `cost_analysis()`."""
        return self._compiled.executable

    def __call__(self, *inputs: Any) -> Any:
        return self._compiled(*self._params(), *inputs)

    def _params(self) -> tuple[Any, ...]:
        return () if self.model is None else (self.model.params,)


def _model_of(model_fn: Callable[..., Any]) -> tuple[Any, Callable[..., Any]]:
    """(the model whose parameters are operands, the function of them and the inputs), or (None, the function)."""
    owner: Any = getattr(model_fn, "__self__", model_fn)
    is_forward = owner is model_fn or getattr(model_fn, "__name__", "") in ("forward", "__call__")
    if is_forward and hasattr(owner, "params") and callable(getattr(owner, "apply", None)):
        return owner, owner.apply
    return None, model_fn


def _bound(fn: Callable[..., Any], constants: dict[int, Any]) -> Callable[..., Any]:
    def with_constants(*args: Any) -> Any:
        every = list(args)
        for position, value in sorted(constants.items()):
            every.insert(position, value)
        return fn(*every)

    return with_constants


def _traced(leaves: Sequence[Any]) -> bool:
    import jax
    from jax._src import core  # whether anything is being traced, also around a call with arrays alone

    return any(isinstance(leaf, jax.core.Tracer) for leaf in leaves) or not core.trace_state_clean()


def _device_of(leaves: Sequence[Any]) -> Any:
    """That a call with these arguments runs on."""
    import jax

    for leaf in leaves:
        sharding = getattr(leaf, "sharding", None)
        if sharding is not None and (devices := getattr(sharding, "device_set", None)):
            return next(iter(devices))
    default = jax.config.jax_default_device  # type: ignore[attr-defined]
    return jax.devices(default)[0] if isinstance(default, str) else default or jax.devices()[0]


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(size, int) for size in value)


def _shaped(value: Any) -> Any:
    """A tuple of sizes as an array of float32 would be; trees of arrays as their shapes."""
    import jax
    import jax.numpy as jnp

    if _is_shape(value):
        if any(size < 0 for size in value):
            raise rule_error("The sizes of a shape are 0 or more", value, "give the shape that arrives")
        return jax.ShapeDtypeStruct(value, jnp.float32)
    if isinstance(value, list) and all(isinstance(size, int) for size in value):
        return _shaped(tuple(value))
    if not jax.tree.leaves(value) or not all(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(value)):
        raise rule_error(
            "A shape is a tuple of sizes, an array, a jax.ShapeDtypeStruct, or a tree of these",
            repr(value),
            "use (32, 512, 768), or jax.ShapeDtypeStruct((32, 512), 'int32')",
        )
    return jax.tree.map(_described, value)


def _described(leaf: Any) -> Any:
    import jax
    import numpy as np

    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if isinstance(leaf, jax.Array):
        sharding = leaf.sharding if len(leaf.sharding.device_set) > 1 or leaf.committed else None
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=leaf.aval.weak_type)
    if isinstance(leaf, np.ndarray | np.generic):
        return jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))
    return leaf  # a number of Python's


def _signature(leaf: Any) -> Any:
    """What tells the programs of two leaves apart. A weak type is none of it: a program takes either."""
    import jax
    import numpy as np

    if isinstance(leaf, (bool, int, float, complex)):
        return type(leaf)
    sharding = getattr(leaf, "sharding", None)
    placed = sharding is not None and (len(sharding.device_set) > 1 or getattr(leaf, "committed", True))
    return np.shape(leaf), jax.dtypes.canonicalize_dtype(leaf.dtype), sharding if placed else None


def _is_arrays(value: Any) -> bool:
    """Whether it is a tree of arrays with one or more in it, which cannot be constants: they have no hash."""
    import jax

    leaves = jax.tree.leaves(value)
    return bool(leaves) and all(hasattr(leaf, "dtype") and hasattr(leaf, "shape") for leaf in leaves)


def _check_arguments(fn: Callable[..., Any], shapes: int, static: tuple[int, ...]) -> None:
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):  # a function of C's
        return
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [parameter for parameter in parameters if parameter.kind in kinds]
    least = sum(parameter.default is inspect.Parameter.empty for parameter in positional)
    most = math.inf if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters) else len(positional)
    given = shapes + len(static)
    if not least <= given <= most or any(not 0 <= at < given for at in static):
        takes = ", ".join(parameter.name for parameter in positional)
        raise rule_error(
            f"Each argument of {getattr(fn, '__name__', 'the function')}({takes}) has a shape or is static",
            f"{shapes} shapes, static_argnums {list(static)}",
            "give a shape for each argument that static_argnums does not name, in their order",
        )
