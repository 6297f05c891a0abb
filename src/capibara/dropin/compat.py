"""Names that older code uses and jax no longer has: where each lives now, or what stands in for it.

A row is used only when the installed jax lacks the name; one that jax still has is jax's own object. Each
name warns once a process. Releases are those of jax's change log; "0.10.2 or before" where it does not say.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["MODULES", "NAMES", "Gone"]

_BEFORE = "0.10.2 or before"
_BY_NEWEST = "0.12.0 or before"
_NEVER = ""


@dataclass(frozen=True)
class Gone:
    """One name below jax, or one module, that is no more."""

    old: str
    new: str
    """What to load in its place (see `targets`); empty for a module that has only the names listed."""
    since: str
    """The first release without it; empty when no release had it and other documents use it."""
    use: str = ""
    """What to write instead, where it is not `new` itself."""

    def __str__(self) -> str:
        instead = self.use or self.new.replace(":", ".")
        gone = f"is gone from jax since {self.since}" if self.since else "is not a name of jax"
        return f"jax.{self.old} {gone}; use {instead}."


def _adapted(old: str, since: str, use: str, adapter: str = "") -> Gone:
    return Gone(old, f"capibara.dropin.adapters:{adapter or old.rpartition('.')[2]}", since, use)


def _moved(old: str, new: str, since: str, names: str) -> Iterable[Gone]:
    """Names that moved from one module to another as they are."""
    prefix = f"{old}." if old else ""
    return (Gone(prefix + name, f"{new}:{name}", since) for name in names.split())


def _internal(old: str, new: str, names: str, since: str = _BEFORE) -> Iterable[Gone]:
    """Names that jax has kept to itself: the same objects, with the parameters that they had in 0.4.30."""
    return (Gone(f"{old}.{name}", f"{new}:{name}", since, f"{new}.{name}, internal to jax") for name in names.split())


_NAMES = (
    # the top level
    *_moved("", "jax.tree_util", "0.6.0", "tree_map tree_leaves tree_flatten tree_unflatten tree_structure"),
    *_moved("", "jax.tree_util", "0.6.0", "tree_transpose treedef_is_leaf"),
    *_moved("", "jax.tree_util", _BEFORE, "tree_all tree_reduce"),
    Gone("tree_multimap", "jax.tree_util:tree_map", "0.3.16"),
    Gone("tree_util.tree_multimap", "jax.tree_util:tree_map", "0.3.16"),
    _adapted("pjit", _NEVER, "jax.jit with in_shardings and out_shardings"),
    *_moved("", "jax.core", "0.4.14", "ShapedArray"),
    Gone("xla", "jax.interpreters.xla", "0.4.14"),
    Gone("pxla", "jax.interpreters.pxla", "0.4.14"),
    Gone("partial_eval", "jax.interpreters.partial_eval", "0.4.14"),
    _adapted("curry", "0.4.14", "functools.partial"),
    *_moved("", "jax.api_util", _BEFORE, "flatten_fun_nokwargs"),
    _adapted("xla_computation", "0.4.34", 'jax.jit(f).lower(...).compiler_ir("hlo")'),
    *_moved("", "jax.extend.backend", "0.4.36", "clear_backends"),
    _adapted("device_put_replicated", "0.10.0", "jax.device_put with a NamedSharding"),
    _adapted("device_put_sharded", "0.10.0", "jax.device_put with a NamedSharding"),
    _adapted("device_memory_allocated", _NEVER, "jax.local_devices()[i].memory_stats()"),
    _adapted("device_memory_peak", _NEVER, "jax.local_devices()[i].memory_stats()"),
    # modules that are also attributes of today's jax
    Gone("config.config", "capibara.dropin.config:config", "0.4.25", "capibara.jax.config"),
    *_moved("checkpoint", "jax", _NEVER, "checkpoint remat checkpoint_policies"),
    *_moved("checkpoint", "jax.ad_checkpoint", _NEVER, "checkpoint_name"),
    *_moved("experimental.checkpoint", "jax", _NEVER, "checkpoint remat checkpoint_policies"),
    *_moved("experimental.checkpoint", "jax.ad_checkpoint", _NEVER, "checkpoint_name"),
    *_moved("ad_checkpoint", "jax", "0.10.0", "checkpoint remat"),
    _adapted("cloud_tpu_init.cloud_tpu_init", "0.11.0", "nothing: jax does it by itself"),
    # jax.numpy
    Gone("numpy.random", "jax.random", _NEVER),
    Gone("numpy.trapz", "jax.numpy:trapezoid", "0.4.24"),
    Gone("numpy.row_stack", "jax.numpy:vstack", "0.4.24"),
    _adapted("numpy.in1d", "0.4.24", "jax.numpy.isin"),
    _adapted("numpy.issubsctype", "0.4.24", "jax.numpy.issubdtype(x.dtype, t)"),
    _adapted("numpy.NINF", "0.4.24", "-jax.numpy.inf"),
    _adapted("numpy.PZERO", "0.4.24", "0.0"),
    _adapted("numpy.NZERO", "0.4.24", "-0.0"),
    Gone("numpy.product", "jax.numpy:prod", "0.4.16"),
    Gone("numpy.cumproduct", "jax.numpy:cumprod", "0.4.16"),
    Gone("numpy.alltrue", "jax.numpy:all", "0.4.16"),
    Gone("numpy.sometrue", "jax.numpy:any", "0.4.16"),
    Gone("numpy.round_", "jax.numpy:round", "0.4.38"),
    Gone("numpy.fix", "jax.numpy:trunc", "0.10.0"),
    _adapted("numpy.msort", "0.4.9", "jax.numpy.sort(a, axis=0)"),
    Gone("numpy.DeviceArray", "jax:Array", "0.4.14"),
    # jax.core
    *_moved(
        "core",
        "jax.extend.core",
        "0.6.0",
        "ClosedJaxpr Jaxpr JaxprEqn Literal Primitive Token Var jaxpr_as_fun",
    ),
    Gone("core.get_aval", "jax:typeof", "0.10.0"),
    _adapted("core.raise_to_shaped", "0.6.0", "the aval as it is"),
    *_moved("core", "jax.extend.core", "0.10.0", "AbstractToken TraceTag mapped_aval unmapped_aval subjaxprs"),
    *_moved("core", "jax.extend.core", "0.10.0", "set_current_trace take_current_trace"),
    *_moved("core", "jax.extend.core", "0.11.0", "DebugInfo DropVar Effect Effects check_jaxpr concrete_or_error"),
    *_moved("core", "jax.extend.core", "0.11.0", "find_top_trace gensym get_opaque_trace_state jaxprs_in_params"),
    *_moved("core", "jax.extend.core", "0.11.0", "new_jaxpr_eqn no_effects valid_jaxtype"),
    *_moved("core", "jax.extend.core", "0.11.0", "primal_dtype_to_tangent_dtype"),
    *_moved("core", "jax.errors", "0.11.0", "InconclusiveDimensionOperation JaxprTypeError"),
    *_moved("core", "jax.errors", "0.4.24", "TracerArrayConversionError TracerIntegerConversionError"),
    *_moved("core", "jax.errors", "0.4.24", "UnexpectedTracerError"),
    *_moved("core", "jax.errors", _BEFORE, "ConcretizationTypeError"),
    *_moved("core", "jax._src.util", "0.4.24", "safe_map safe_zip"),
    *_internal("core", "jax._src.core", "EvalTrace TRACER_LEAK_DEBUGGER_WARNING call_p canonicalize_shape check_eqn"),
    *_internal("core", "jax._src.core", "check_type closed_call_p dedup_referents definitely_equal dimension_as_value"),
    *_internal("core", "jax._src.core", "escaped_tracer_error full_lower get_referent join_effects reset_trace_state"),
    *_internal("core", "jax._src.core", "leaked_tracer_error typecheck typecompat pp_aval pp_eqn pp_eqn_rules pp_eqns"),
    *_internal("core", "jax._src.core", "pp_jaxpr pp_jaxpr_eqn_range pp_jaxpr_skeleton pp_jaxprs pp_kv_pair"),
    *_internal("core", "jax._src.core", "pp_kv_pairs pp_var pp_vars AxisSize DimSize InputType Shape"),
    *_internal("core", "jax._src.core", "JaxprPpContext JaxprPpSettings OutputType abstract_token", _BY_NEWEST),
    *_internal("core", "jax._src.core", "aval_mapping_handlers concretization_function_error", _BY_NEWEST),
    *_internal("core", "jax._src.core", "custom_typechecks is_constant_dim is_constant_shape", _BY_NEWEST),
    *_internal("core", "jax._src.core", "literalable_types no_axis_name", _BY_NEWEST),
    *_moved("core", "jax._src.core", _BEFORE, "trace_state_clean"),
    *_moved("abstract_arrays", "jax.core", "0.4.17", "ShapedArray"),
    _adapted("abstract_arrays.raise_to_shaped", "0.4.17", "the aval as it is"),
    # jax.interpreters and jax.lib
    Gone("interpreters.xla.DeviceArray", "jax:Array", "0.4.11"),
    *_moved("interpreters.xla", "jax", "0.4.11", "Device device_put"),
    *_moved("interpreters.xla", "jax.core", "0.4.24", "ShapedArray"),
    *_moved("interpreters.xla", "jax.core", _BEFORE, "pytype_aval_mappings"),
    Gone("interpreters.xla.abstractify", "jax:typeof", _BEFORE),
    # It took a value, not a type.
    Gone(
        "interpreters.xla.canonicalize_dtype",
        "jax._src.dtypes:canonicalize_value",
        _BEFORE,
        "jax.numpy.asarray of the value, or jax.dtypes.canonicalize_dtype of a type",
    ),
    *_internal("interpreters.ad", "jax._src.interpreters.ad", "CustomVJPException bilinear_transpose call_transpose"),
    *_internal("interpreters.ad", "jax._src.interpreters.ad", "custom_lin_p defjvp_zero jvp_jaxpr linear_jvp zero_jvp"),
    *_internal("interpreters.ad", "jax._src.interpreters.ad", "linear_transpose linear_transpose2 rearrange_binders"),
    *_internal("interpreters.ad", "jax._src.interpreters.ad", "reducing_transposes standard_jvp standard_jvp2"),
    *_internal("interpreters.ad", "jax._src.ad_util", "zeros_like_jaxval zeros_like_p"),
    _adapted("interpreters.batching.not_mapped", _BEFORE, "None"),
    *(
        row
        for names in (
            "AxisSize BatchTrace BatchTracer Elt MapSpec NotMapped Vmappable Zero ZeroIfMapped batch_subtrace",
            "batch_custom_jvp_subtrace flatten_fun_for_vmap from_elt_handlers is_vmappable make_iota moveaxis to_elt",
            "make_iota_handlers spec_types to_elt_handlers vmappables zero_if_mapped",
            "FromEltHandler GetIdx MakeIotaHandler ToEltHandler",
        )
        for row in _internal("interpreters.batching", "jax._src.interpreters.batching", names)
    ),
    *(
        row
        for names in (
            "Const ConstVar DynamicJaxprTrace FreeVar JaxprEqnRecipe JaxprStackFrame JaxprTrace LambdaBinding",
            "TracerAsName TracerId call_partial_eval_custom_rule closed_call_partial_eval_custom_rule const_fold_rules",
            "custom_staging_rules forwarding_rules make_jaxpr_effects move_binders_to_back move_binders_to_front",
            "partial_eval_jaxpr_custom partial_eval_jaxpr_nounits partial_eval_wrapper_nounits partition_pvals",
            "trace_to_subjaxpr_nounits trace_to_subjaxpr_nounits_fwd ConstFoldRule DCERule ForwardingRule",
            "ParamsUpdater PartialEvalCustomResult PartialEvalCustomRule ResAvalUpdater",
        )
        for row in _internal("interpreters.partial_eval", "jax._src.interpreters.partial_eval", names)
    ),
    *_moved("interpreters.partial_eval", "jax.extend.core", _BEFORE, "Jaxpr"),
    *_internal(
        "interpreters.pxla",
        "jax._src.interpreters.pxla",
        "MeshAxisName MeshExecutable global_aval_to_result_handler global_result_handlers ArrayMapping Index",
        _BY_NEWEST,
    ),
    *_internal("interpreters.pxla", "jax._src.sharding_impls", "array_mapping_to_axis_resources", _BY_NEWEST),
    *_internal("interpreters.pxla", "jax._src.op_shardings", "op_sharding_to_indices", _BY_NEWEST),
    *_moved("interpreters.pxla", "jax.sharding", "0.4.11", "Mesh PartitionSpec"),
    *_moved("interpreters.pxla", "jax", "0.4.14", "device_put"),
    Gone("interpreters.pxla.ShardedDeviceArray", "jax:Array", "0.4.14"),
    *_moved("lib.xla_bridge", "jax", _BEFORE, "default_backend devices local_devices device_count"),
    *_moved("lib.xla_bridge", "jax", _BEFORE, "local_device_count process_count process_index"),
    Gone("lib.xla_client.Device", "jax:Device", "0.5.0"),
    Gone("lib.xla_client.ArrayImpl", "jax:Array", "0.6.0"),
    Gone("lib.xla_client.XlaRuntimeError", "jax.errors:JaxRuntimeError", "0.5.0"),
    Gone("lib.xla_extension.ArrayImpl", "jax:Array", "0.6.0"),
    Gone("lib.xla_extension.XlaRuntimeError", "jax.errors:JaxRuntimeError", "0.6.0"),
    # jax.random
    Gone("random.KeyArray", "jax:Array", "0.4.24"),
    Gone("random.PRNGKeyArray", "jax:Array", "0.4.24"),
    *_moved("random", "jax.extend.random", "0.4.24", "threefry_2x32 threefry2x32_p"),
    _adapted("random.threefry2x32_key", "0.4.24", 'jax.random.PRNGKey(seed, impl="threefry2x32")'),
    _adapted("random.rbg_key", "0.4.24", 'jax.random.PRNGKey(seed, impl="rbg")'),
    _adapted("random.unsafe_rbg_key", "0.4.24", 'jax.random.PRNGKey(seed, impl="unsafe_rbg")'),
    _adapted("random.shuffle", _BEFORE, "jax.random.permutation(key, x, axis, independent=True)"),
    # jax.lax, jax.nn, jax.ops, jax.scipy, jax.sharding and others
    _adapted("lax.tie_in", "0.4.29", "the second argument as it is"),
    Gone("lax.prod", "math:prod", "0.4.16"),
    Gone("lax.zeros_like_array", "jax.numpy:zeros_like", _BEFORE),
    _adapted("lax.pvary", "0.10.0", 'jax.lax.pcast(x, axis_name, to="varying")'),
    Gone("lax.dtypes", "jax.dtypes", "0.4.24"),
    Gone("nn.normalize", "jax.nn:standardize", "0.4.29"),
    *(_adapted(f"ops.index{how}", "0.3.2", "x.at[...]") for how in ("", "_update", "_add", "_mul", "_min", "_max")),
    Gone("scipy.linalg.tril", "jax.numpy:tril", "0.4.24"),
    Gone("scipy.linalg.triu", "jax.numpy:triu", "0.4.24"),
    _adapted("scipy.special.sph_harm", "0.10.0", "jax.scipy.special.sph_harm_y"),
    Gone("sharding.MeshPspecSharding", "jax.sharding:NamedSharding", _BEFORE),
    Gone("sharding.XLACompatibleSharding", "jax.sharding:Sharding", "0.4.34"),
    Gone("sharding.use_mesh", "jax:set_mesh", "0.7.1"),
    *_internal("sharding", "jax._src.sharding_impls", "GSPMDSharding"),
    _adapted("tree_util.build_tree", _BEFORE, "jax.tree.unflatten(treedef, leaves)"),
    *_internal("errors", "jax._src.traceback_util", "SimplifiedTraceback"),
    *_internal("custom_derivatives", "jax._src.custom_derivatives", "custom_jvp_call_jaxpr_p"),
    *_internal("extend.core.primitives", "jax._src.ad_util", "zeros_like_p"),
    *_internal("dlpack", "jax._src.dlpack", "SUPPORTED_DTYPES"),
    _adapted("dlpack.to_dlpack", _BEFORE, "x.__dlpack__()"),
    Gone("stages.OutInfo", "jax:ShapeDtypeStruct", "0.7.0"),
    Gone("extend.core.primitives.pjit_p", "jax.extend.core.primitives:jit_p", "0.7.0"),
    # jax.experimental
    *_moved("experimental", "jax.sharding", "0.4.11", "PartitionSpec"),
    *_moved("experimental.maps", "jax.sharding", "0.4.11", "Mesh"),
    *_internal("experimental.maps", "jax._src.mesh", "EMPTY_ENV ResourceEnv thread_resources"),
    *_moved("experimental.pjit", "jax.sharding", "0.4.11", "PartitionSpec NamedSharding"),
    *_moved("experimental.pjit", "jax.lax", _BEFORE, "with_sharding_constraint"),
    _adapted("experimental.pjit.pjit", _BEFORE, "jax.jit with in_shardings and out_shardings"),
    Gone("experimental.pjit.pjit_p", "jax.extend.core.primitives:jit_p", _BEFORE),
    *_moved("experimental.shard_map", "jax.sharding", _BEFORE, "Mesh NamedSharding PartitionSpec"),
    Gone("experimental.shard_map.P", "jax.sharding:PartitionSpec", _BEFORE),
    *_moved("experimental.x64_context", "jax", _BEFORE, "enable_x64"),
    _adapted("experimental.x64_context.disable_x64", _BEFORE, "jax.enable_x64(False)"),
    *_internal(
        "experimental.compilation_cache.compilation_cache",
        "jax._src.compilation_cache",
        "initialize_cache is_initialized",
    ),
    *_internal("experimental.jet", "jax._src.core", "shaped_abstractify"),
    _adapted("experimental.shard_map.shard_map", _BEFORE, "jax.shard_map with check_vma"),
    *_moved("experimental.shard", "jax.sharding", "0.7.0", "reshard auto_axes explicit_axes"),
    *_moved("experimental", "jax", _BEFORE, "enable_x64"),
    _adapted("experimental.disable_x64", _BEFORE, "jax.enable_x64(False)"),
    Gone("experimental.layout.DeviceLocalLayout", "jax.experimental.layout:Layout", "0.7.0"),
    Gone("experimental.global_device_array.GlobalDeviceArray", "jax:Array", _BEFORE),
    _adapted("experimental.host_callback.call", "0.4.35", "jax.pure_callback or jax.experimental.io_callback"),
    _adapted("experimental.host_callback.id_print", "0.4.35", "jax.debug.print"),
    _adapted("experimental.host_callback.id_tap", "0.4.35", "jax.debug.callback"),
    Gone("experimental.pallas.tpu.TPUCompilerParams", "jax.experimental.pallas.tpu:CompilerParams", _BEFORE),
    Gone("experimental.pallas.tpu.TPUMemorySpace", "jax.experimental.pallas.tpu:MemorySpace", _BEFORE),
    Gone("experimental.pallas.tpu.ANY", "jax.experimental.pallas:ANY", _BEFORE),
    *_moved("experimental.pallas.tpu", "jax.experimental.pallas", _BEFORE, "CostEstimate delay run_scoped"),
    *_moved("experimental.pallas.tpu", "jax.experimental.pallas", _BY_NEWEST, "DeviceIdType semaphore semaphore_read"),
    *_moved("experimental.pallas.tpu", "jax.experimental.pallas", _BY_NEWEST, "semaphore_signal semaphore_wait"),
    *(
        row
        for names in (
            "atomic_add atomic_and atomic_cas atomic_max atomic_min atomic_or atomic_xchg atomic_xor",
            "max_contiguous dot",
        )
        for row in _moved("experimental.pallas", "jax.experimental.pallas.triton", _BEFORE, names)
    ),
    _adapted("experimental.pallas.load", _BEFORE, "ref[idx]; with a mask, load of pallas.triton or pallas.tpu"),
    _adapted(
        "experimental.pallas.store", _BEFORE, "ref[idx] = value; with a mask, store of pallas.triton or pallas.tpu"
    ),
    _adapted("experimental.pallas.swap", _BEFORE, "ref[idx], then ref[idx] = value"),
    Gone("experimental.pallas.tpu.HOST", "jax.experimental.pallas:HOST", "0.12.0"),
)

_MODULES = (
    Gone("api", "jax", "0.2.21"),
    Gone("util", "jax._src.util", "0.8.0", "functions of your own: it is internal to jax"),
    Gone("prng", "jax.extend.random", "0.4.24"),
    Gone("linear_util", "jax.extend.linear_util", "0.4.24"),
    Gone("extend.ffi", "jax.ffi", _BEFORE),
    Gone("lib.xla_bridge", "jax.extend.backend", _BEFORE),
    Gone("lib.xla_client", "", _BEFORE, "jax's own names for Device, Array and errors"),
    Gone("lib.xla_extension", "", _BEFORE, "jax's own names for Array and errors"),
    Gone("config", "", "0.4.29", "the object jax.config"),
    Gone("checkpoint", "", _NEVER, "the function jax.checkpoint"),
    Gone("abstract_arrays", "", "0.4.17", "jax.core"),
    Gone("cloud_tpu_init", "", "0.11.0", "nothing: jax does it by itself"),
    Gone("experimental.checkpoint", "", _NEVER, "the function jax.checkpoint"),
    Gone("experimental.maps", "", "0.4.31", "jax.sharding and jax.shard_map"),
    Gone("experimental.shard", "", "0.7.0", "jax.sharding"),
    Gone("experimental.stax", "jax.example_libraries.stax", "0.3.16"),
    Gone("experimental.optimizers", "jax.example_libraries.optimizers", "0.3.16"),
    Gone("experimental.export", "jax.export", "0.4.36"),
    Gone("experimental.array_api", "jax.numpy", "0.5.0"),
    Gone("experimental.gda_serialization", "jax.experimental.array_serialization", _BEFORE),
    Gone("experimental.global_device_array", "", _BEFORE, "jax.Array"),
    Gone(
        "experimental.host_callback",
        "",
        "0.4.35",
        "jax.debug, jax.pure_callback, jax.experimental.io_callback",
    ),
    Gone("experimental.pallas.gpu", "jax.experimental.pallas.triton", _BEFORE),
    Gone("experimental.pjit", "", _BEFORE, "jax.jit"),
    Gone("experimental.shard_map", "", _BEFORE, "jax.shard_map"),
    Gone("experimental.x64_context", "", _BEFORE, "jax.enable_x64"),
)

NAMES: dict[str, Gone] = {one.old: one for one in _NAMES}
"""Path below jax -> its row."""
MODULES: dict[str, Gone] = {one.old: one for one in _MODULES}
"""The same for modules that are gone as a whole."""
