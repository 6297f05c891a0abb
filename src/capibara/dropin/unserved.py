"""Names that jax removed and that nothing serves here, each with the reason: today's jax has no such thing."""

from __future__ import annotations

from capibara.dropin.compat import MODULES, NAMES
from capibara.jax_releases import find

__all__ = ["UNSERVED", "serves", "why_not"]

_NAMED_SHAPES = "arrays with named axes are gone; use jax.shard_map or jax.vmap"
_INTERPRETER = "a part of how jax traces, differentiates or batches, which is another by now"
_PMAP = "a part of the old pmap; jax.pmap is made of jax.shard_map by now"
_OP_SHARDING = "shardings as protocol buffers are gone; an HloSharding is compared by =="
_INFEED = "devices have no infeed and outfeed in jax any more; use jax.experimental.io_callback"
_EXPERIMENT = "an experiment that jax ended"
_JAXLIB = "a name of jaxlib, whose interface is not kept; use jax.ffi, jax.stages or jax.extend.backend"
_SHARD_MAP = "what shard_map was made of before it became jax.shard_map"
_KERNELS = "belongs to a kernel or a compiler for kernels of that release"
_OWN_USE = "a module's own helper, which it happened to show"
_BUILD = "a tool for building or starting a jax of that release"
_DYNAMIC = "shapes that change while a program runs were an experiment that jax ended"

UNSERVED: dict[str, str] = {
    # Modules, with all below them; a name's own row goes before its module's.
    "jax.core": _INTERPRETER,
    "jax.extend.core": _INTERPRETER,
    "jax.extend.backend": _INTERPRETER,
    "jax.interpreters": _INTERPRETER,
    "jax.interpreters.pxla": _PMAP,
    "jax.custom_derivatives": _INTERPRETER,
    "jax.lib": _JAXLIB,
    "jax.extend.mlir": _JAXLIB,
    "jax.experimental.attrs": _EXPERIMENT,
    "jax.experimental.compute_on": _EXPERIMENT,
    "jax.experimental.control_deps": _EXPERIMENT,
    "jax.experimental.custom_dce": _EXPERIMENT,
    "jax.experimental.hijax": _EXPERIMENT,
    "jax.experimental.overlap": _EXPERIMENT,
    "jax.experimental.scheduling_groups": _OWN_USE,
    "jax.experimental.shard_alike": "XLA's partitioner has no such hint any more; use jax.lax.with_sharding_constraint",
    "jax.experimental.sparse.nm": _EXPERIMENT,
    "jax.experimental.sparse": _OWN_USE,
    "jax.experimental.host_callback": _INFEED,
    "jax.experimental.jax2tf": "it converts by native serialization alone; converters of single operations are gone",
    "jax.experimental.maps": _NAMED_SHAPES,
    "jax.experimental.shard_map": _SHARD_MAP,
    "jax.experimental.mosaic": _KERNELS,
    "jax.experimental.pallas": _KERNELS,
    "jax.experimental.array_serialization": _OWN_USE,
    "jax.experimental.ode": _OWN_USE,
    "jax.experimental.mesh_utils": _OWN_USE,
    "jax.tools": _BUILD,
    # Names.
    "jax.util.as_hashable_function": _OWN_USE,
    "jax.util.split_dict": _OWN_USE,
    "jax.util.split_merge": _OWN_USE,
    "jax.custom_transpose": _EXPERIMENT,
    "jax.custom_remat": _EXPERIMENT,
    "jax.enable_custom_vjp_by_custom_transpose": _EXPERIMENT,
    "jax.spmd_mode": "arrays over several processes need no mode any more",
    "jax.core.NamedShape": _NAMED_SHAPES,
    "jax.core.as_named_shape": _NAMED_SHAPES,
    "jax.core.join_named_shapes": _NAMED_SHAPES,
    "jax.core.DShapedArray": _DYNAMIC,
    "jax.core.InDBIdx": _DYNAMIC,
    "jax.core.OutDBIdx": _DYNAMIC,
    "jax.core.jaxpr_uses_outfeed": _INFEED,
    "jax.core.outfeed_primitives": _INFEED,
    "jax.core.primitive_uses_outfeed": _INFEED,
    "jax.experimental.cur_qdd": _EXPERIMENT,
    "jax.experimental.saved_input_vjp": _EXPERIMENT,
    "jax.experimental.si_vjp": _EXPERIMENT,
    "jax.experimental.layout.with_dll_constraint": "use jax.experimental.layout.with_layout_constraint, with a Format",
    "jax.experimental.pjit.AUTO": "shardings are not chosen by the compiler through pjit any more",
    "jax.ffi.register_ffi_type_id": "it raises by now; use jax.ffi.register_ffi_type",
    "jax.lax.DotAlgorithmLike": "a type for annotations alone",
    "jax.lax.DotTransposeAlgorithmLike": "a type for annotations alone",
    "jax.lax.all_gather_done": _EXPERIMENT,
    "jax.lax.all_gather_invariant": _EXPERIMENT,
    "jax.lax.dce_sink_p": _INTERPRETER,
    "jax.lax.infeed": _INFEED,
    "jax.lax.infeed_p": _INFEED,
    "jax.lax.outfeed": _INFEED,
    "jax.lax.outfeed_p": _INFEED,
    "jax.lax.pdot": _NAMED_SHAPES,
    "jax.lax.xeinsum": _NAMED_SHAPES,
    "jax.lax.random_gamma_grad_p": _INTERPRETER,
    "jax.lax.scan_bind": _INTERPRETER,
    "jax.interpreters.pxla.are_op_shardings_equal": _OP_SHARDING,
    "jax.interpreters.pxla.is_op_sharding_replicated": _OP_SHARDING,
    "jax.sharding.PmapSharding": _PMAP,
    "jax.sharding.PositionalSharding": "it had methods of an array; use jax.sharding.NamedSharding over a Mesh",
}
"""Full path of a name, or of a module for all that is below it -> why nothing serves it."""


def serves(path: str) -> bool:
    """Whether `capibara.jax` gives a name that jax removed: by a row of its own, or by what stands in for its module.

    Examples:
        >>> from capibara.dropin.unserved import serves
        >>> serves("jax.tree_map"), serves("jax.lax.infeed")
        (True, False)
    """
    below = path.removeprefix("jax.")
    if below in NAMES or below in MODULES:
        return True
    module, _, name = below.rpartition(".")
    stand_in = MODULES[module].new if module in MODULES else ""
    if stand_in.startswith("jax._src."):  # not in the table; a test asks the module itself
        return path not in UNSERVED
    history = find(f"{stand_in}.{name}") if stand_in else None
    return history is not None and history.removed is None


def why_not(path: str) -> str | None:
    """Why nothing serves a name that jax removed; None where nobody has said."""
    while path not in UNSERVED and "." in path:
        path = path.rpartition(".")[0]
    return UNSERVED.get(path)
