"""Names that older code uses and jax no longer has: where each lives now, or what stands in for it.

A row is used only when the installed jax lacks the name; one that jax still has is jax's own object. Each
name warns once a process. Since when a name is gone, the table of releases says (`capibara.jax_releases`); what its
first release had no more is dated by jax's change log.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from capibara.jax_releases import find

__all__ = ["MODULES", "NAMES", "Gone"]

_LISTED = None
_OLDER = "0.4.30 or before"
_NEVER = ""


@dataclass(frozen=True)
class Gone:
    """One name below jax, or one module, that is no more."""

    old: str
    new: str
    """What to load in its place (see `targets`); empty for a module that has only the names listed."""
    before: str | None
    """The first release without it, of a name that is older than the table of releases; None where the table has the
    name, and empty when no release had it and other documents use it."""
    use: str = ""
    """What to write instead, where it is not `new` itself."""

    @property
    def since(self) -> str:
        """The first release without it; empty when no release had it."""
        if self.before is not None:
            return self.before
        history = find(f"jax.{self.old}")
        assert history is not None, f"the table of releases does not have jax.{self.old}"
        # A jax that lacks what the table's newest has is newer than the table.
        return history.removed or f"a release after {history.last}"

    def __str__(self) -> str:
        instead = self.use or self.new.replace(":", ".")
        gone = f"is gone from jax since {self.since}" if self.since else "is not a name of jax"
        return f"jax.{self.old} {gone}; use {instead}."


def _adapted(old: str, before: str | None, use: str, adapter: str = "") -> Gone:
    return Gone(old, f"capibara.dropin.adapters:{adapter or old.rpartition('.')[2]}", before, use)


def _moved(old: str, new: str, before: str | None, names: str) -> Iterable[Gone]:
    """Names that moved from one module to another as they are."""
    prefix = f"{old}." if old else ""
    return (Gone(prefix + name, f"{new}:{name}", before) for name in names.split())


def _internal(old: str, new: str, names: str, before: str | None = _LISTED) -> Iterable[Gone]:
    """Names that jax has kept to itself: the same objects, with the parameters that they had in 0.4.30."""
    return (Gone(f"{old}.{name}", f"{new}:{name}", before, f"{new}.{name}, internal to jax") for name in names.split())


_NAMES = (
    # the top level
    *_moved("", "jax.tree_util", _LISTED, "tree_map tree_leaves tree_flatten tree_unflatten tree_structure"),
    *_moved("", "jax.tree_util", _LISTED, "tree_transpose treedef_is_leaf"),
    *_moved("", "jax.tree_util", _OLDER, "tree_all tree_reduce"),
    Gone("tree_multimap", "jax.tree_util:tree_map", "0.3.16"),
    Gone("tree_util.tree_multimap", "jax.tree_util:tree_map", "0.3.16"),
    _adapted("pjit", _NEVER, "jax.jit with in_shardings and out_shardings"),
    *_moved("", "jax.core", "0.4.14", "ShapedArray"),
    Gone("xla", "jax.interpreters.xla", "0.4.14"),
    Gone("pxla", "jax.interpreters.pxla", "0.4.14"),
    Gone("partial_eval", "jax.interpreters.partial_eval", "0.4.14"),
    _adapted("curry", "0.4.14", "functools.partial"),
    *_moved("", "jax.api_util", _OLDER, "flatten_fun_nokwargs"),
    _adapted("xla_computation", _LISTED, 'jax.jit(f).lower(...).compiler_ir("hlo")'),
    *_moved("", "jax.extend.backend", _LISTED, "clear_backends"),
    Gone("get_ty", "jax:typeof", _LISTED),
    *(Gone(f"{where}ArrayRef", "jax:Ref", _LISTED) for where in ("", "ref.")),
    *(Gone(f"{where}array_ref", "jax:new_ref", _LISTED) for where in ("", "ref.")),
    Gone("experimental.MutableArray", "jax:Ref", _LISTED),
    Gone("experimental.mutable_array", "jax:new_ref", _LISTED),
    _adapted("device_put_replicated", _LISTED, "jax.device_put with a NamedSharding"),
    _adapted("device_put_sharded", _LISTED, "jax.device_put with a NamedSharding"),
    _adapted("device_memory_allocated", _NEVER, "jax.local_devices()[i].memory_stats()"),
    _adapted("device_memory_peak", _NEVER, "jax.local_devices()[i].memory_stats()"),
    # modules that are also attributes of today's jax
    Gone("config.config", "capibara.dropin.config:config", "0.4.25", "capibara.jax.config"),
    *_moved("checkpoint", "jax", _NEVER, "checkpoint remat checkpoint_policies"),
    *_moved("checkpoint", "jax.ad_checkpoint", _NEVER, "checkpoint_name"),
    *_moved("experimental.checkpoint", "jax", _NEVER, "checkpoint remat checkpoint_policies"),
    *_moved("experimental.checkpoint", "jax.ad_checkpoint", _NEVER, "checkpoint_name"),
    *_moved("ad_checkpoint", "jax", _LISTED, "checkpoint remat"),
    _adapted("cloud_tpu_init.cloud_tpu_init", _LISTED, "nothing: jax does it by itself"),
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
    Gone("numpy.round_", "jax.numpy:round", _LISTED),
    Gone("numpy.fix", "jax.numpy:trunc", _LISTED),
    _adapted("numpy.msort", "0.4.9", "jax.numpy.sort(a, axis=0)"),
    Gone("numpy.DeviceArray", "jax:Array", "0.4.14"),
    # jax.core
    *_moved(
        "core",
        "jax.extend.core",
        _LISTED,
        "ClosedJaxpr Jaxpr JaxprEqn Literal Primitive Token Var jaxpr_as_fun",
    ),
    Gone("core.get_aval", "jax:typeof", _LISTED),
    _adapted("core.raise_to_shaped", _LISTED, "the aval as it is"),
    *_moved("core", "jax.extend.core", _LISTED, "AbstractToken TraceTag mapped_aval unmapped_aval subjaxprs"),
    *_moved("core", "jax.extend.core", _LISTED, "set_current_trace take_current_trace"),
    *_moved("core", "jax.extend.core", _LISTED, "DebugInfo DropVar Effect Effects check_jaxpr concrete_or_error"),
    *_moved("core", "jax.extend.core", _LISTED, "find_top_trace gensym get_opaque_trace_state jaxprs_in_params"),
    *_moved("core", "jax.extend.core", _LISTED, "new_jaxpr_eqn no_effects valid_jaxtype"),
    *_moved("core", "jax.extend.core", _LISTED, "primal_dtype_to_tangent_dtype"),
    *_moved("core", "jax.errors", _LISTED, "InconclusiveDimensionOperation JaxprTypeError"),
    *_moved("core", "jax.errors", "0.4.24", "TracerArrayConversionError TracerIntegerConversionError"),
    *_moved("core", "jax.errors", "0.4.24", "UnexpectedTracerError"),
    *_moved("core", "jax.errors", _LISTED, "ConcretizationTypeError"),
    *_moved("core", "jax._src.util", "0.4.24", "safe_map safe_zip"),
    *_internal("core", "jax._src.core", "EvalTrace TRACER_LEAK_DEBUGGER_WARNING call_p canonicalize_shape check_eqn"),
    *_internal("core", "jax._src.core", "check_type closed_call_p dedup_referents definitely_equal dimension_as_value"),
    *_internal("core", "jax._src.core", "escaped_tracer_error full_lower get_referent join_effects reset_trace_state"),
    *_internal("core", "jax._src.core", "leaked_tracer_error typecheck typecompat pp_aval pp_eqn pp_eqn_rules pp_eqns"),
    *_internal("core", "jax._src.core", "pp_jaxpr pp_jaxpr_eqn_range pp_jaxpr_skeleton pp_jaxprs pp_kv_pair"),
    *_internal("core", "jax._src.core", "pp_kv_pairs pp_var pp_vars AxisSize InputType"),
    *_internal("core", "jax._src.core", "DimSize Shape", _OLDER),
    *_internal("core", "jax._src.core", "JaxprPpContext JaxprPpSettings OutputType abstract_token"),
    *_internal("core", "jax._src.core", "aval_mapping_handlers concretization_function_error"),
    *_internal("core", "jax._src.core", "custom_typechecks is_constant_dim is_constant_shape"),
    *_internal("core", "jax._src.core", "literalable_types no_axis_name"),
    *_moved("core", "jax._src.core", _LISTED, "trace_state_clean"),
    *_internal("core", "jax._src.core", "AxisName OpaqueTraceState axis_frame extend_axis_env_nd is_concrete"),
    *_internal("core", "jax._src.core", "maybe_find_leaked_tracers trace_ctx typematch"),
    *_moved("abstract_arrays", "jax.core", "0.4.17", "ShapedArray"),
    _adapted("abstract_arrays.raise_to_shaped", "0.4.17", "the aval as it is"),
    # jax.interpreters and jax.lib
    Gone("interpreters.xla.DeviceArray", "jax:Array", "0.4.11"),
    *_moved("interpreters.xla", "jax", "0.4.11", "Device device_put"),
    *_moved("interpreters.xla", "jax.core", "0.4.24", "ShapedArray"),
    *_moved("interpreters.xla", "jax.core", _LISTED, "pytype_aval_mappings"),
    Gone("interpreters.xla.abstractify", "jax:typeof", _LISTED),
    # It took a value, not a type.
    Gone(
        "interpreters.xla.canonicalize_dtype",
        "jax._src.dtypes:canonicalize_value",
        _LISTED,
        "jax.numpy.asarray of the value, or jax.dtypes.canonicalize_dtype of a type",
    ),
    *_internal("interpreters.ad", "jax._src.interpreters.ad", "CustomVJPException bilinear_transpose call_transpose"),
    *_internal("interpreters.ad", "jax._src.interpreters.ad", "custom_lin_p defjvp_zero jvp_jaxpr linear_jvp zero_jvp"),
    *_internal("interpreters.ad", "jax._src.interpreters.ad", "linear_transpose linear_transpose2 rearrange_binders"),
    *_internal("interpreters.ad", "jax._src.interpreters.ad", "reducing_transposes standard_jvp standard_jvp2"),
    *_internal("interpreters.ad", "jax._src.ad_util", "zeros_like_jaxval zeros_like_p"),
    _adapted("interpreters.batching.not_mapped", _LISTED, "None"),
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
    *_moved("interpreters.partial_eval", "jax.extend.core", _LISTED, "Jaxpr"),
    *_internal("interpreters.partial_eval", "jax._src.interpreters.partial_eval", "has_effects tracers_to_jaxpr"),
    *_internal("interpreters.batching", "jax._src.interpreters.batching", "batch batch_jaxpr batch_jaxpr2"),
    *_internal("interpreters.batching", "jax._src.interpreters.batching", "broadcast_batcher vectorized_batcher"),
    *_internal("interpreters.mlir", "jax._src.interpreters.mlir", "custom_call func_dialect hlo"),
    *_internal("interpreters.pxla", "jax._src.op_shardings", "are_hlo_shardings_equal is_hlo_sharding_replicated"),
    *_internal("interpreters.pxla", "jax._src.interpreters.pxla", "shard_args"),
    Gone("interpreters.xla.xb", "jax._src.xla_bridge", _LISTED, "jax.extend.backend"),
    Gone("interpreters.xla.xc", "jax._src.lib:xla_client", _LISTED, "jax's own names for Device, Array and errors"),
    Gone("interpreters.xla.xe", "jax._src.lib:_jax", _LISTED, "jax's own names for Array and errors"),
    *_internal(
        "interpreters.pxla",
        "jax._src.interpreters.pxla",
        "MeshAxisName MeshExecutable global_aval_to_result_handler global_result_handlers ArrayMapping Index",
        _LISTED,
    ),
    *_internal("interpreters.pxla", "jax._src.sharding_impls", "array_mapping_to_axis_resources"),
    *_internal("interpreters.pxla", "jax._src.op_shardings", "op_sharding_to_indices"),
    *_moved("interpreters.pxla", "jax.sharding", "0.4.11", "Mesh PartitionSpec"),
    *_moved("interpreters.pxla", "jax", "0.4.14", "device_put"),
    Gone("interpreters.pxla.ShardedDeviceArray", "jax:Array", "0.4.14"),
    *_moved("lib.xla_bridge", "jax", _LISTED, "default_backend"),
    *_moved("lib.xla_bridge", "jax", _OLDER, "devices local_devices device_count"),
    *_moved("lib.xla_bridge", "jax", _OLDER, "local_device_count process_count process_index"),
    Gone("lib.xla_client.Device", "jax:Device", _LISTED),
    Gone("lib.xla_client.ArrayImpl", "jax:Array", _LISTED),
    Gone("lib.xla_client.XlaRuntimeError", "jax.errors:JaxRuntimeError", _LISTED),
    Gone("lib.xla_extension.ArrayImpl", "jax:Array", _LISTED),
    Gone("lib.xla_extension.XlaRuntimeError", "jax.errors:JaxRuntimeError", _LISTED),
    *_moved("lib.xla_client", "jax.lax", _LISTED, "FftType"),
    *_moved("lib.xla_client", "jax.numpy", _LISTED, "bfloat16"),
    *_moved("lib.xla_extension", "jax", _LISTED, "Device"),
    # jax.random
    Gone("random.KeyArray", "jax:Array", "0.4.24"),
    Gone("random.PRNGKeyArray", "jax:Array", "0.4.24"),
    *_moved("random", "jax.extend.random", "0.4.24", "threefry_2x32 threefry2x32_p"),
    _adapted("random.threefry2x32_key", "0.4.24", 'jax.random.PRNGKey(seed, impl="threefry2x32")'),
    _adapted("random.rbg_key", "0.4.24", 'jax.random.PRNGKey(seed, impl="rbg")'),
    _adapted("random.unsafe_rbg_key", "0.4.24", 'jax.random.PRNGKey(seed, impl="unsafe_rbg")'),
    _adapted("random.shuffle", _LISTED, "jax.random.permutation(key, x, axis, independent=True)"),
    # jax.lax, jax.nn, jax.ops, jax.scipy, jax.sharding and others
    _adapted("lax.tie_in", "0.4.29", "the second argument as it is"),
    Gone("lax.prod", "math:prod", "0.4.16"),
    Gone("lax.zeros_like_array", "jax.numpy:zeros_like", _LISTED),
    _adapted("lax.pvary", _LISTED, 'jax.lax.pcast(x, axis_name, to="varying")'),
    Gone("lax.dtypes", "jax.dtypes", "0.4.24"),
    Gone("nn.normalize", "jax.nn:standardize", "0.4.29"),
    *(_adapted(f"ops.index{how}", "0.3.2", "x.at[...]") for how in ("", "_update", "_add", "_mul", "_min", "_max")),
    Gone("scipy.linalg.tril", "jax.numpy:tril", "0.4.24"),
    Gone("scipy.linalg.triu", "jax.numpy:triu", "0.4.24"),
    _adapted("scipy.special.sph_harm", _LISTED, "jax.scipy.special.sph_harm_y"),
    Gone("sharding.MeshPspecSharding", "jax.sharding:NamedSharding", _OLDER),
    Gone("sharding.XLACompatibleSharding", "jax.sharding:Sharding", _LISTED),
    Gone("sharding.use_mesh", "jax:set_mesh", _LISTED),
    Gone("sharding.AxisTypes", "jax.sharding:AxisType", _LISTED),
    *_internal("lax", "jax._src.lax.parallel", "all_gather_reduced all_gather_start preduced unreduced_psum"),
    *_internal("lax", "jax._src.lax.parallel", "unreduced_psum_scatter"),
    *_internal("extend.core.primitives", "jax._src.custom_derivatives", "custom_jvp_call_jaxpr_p"),
    *_internal("sharding", "jax._src.sharding_impls", "GSPMDSharding"),
    _adapted("tree_util.build_tree", _LISTED, "jax.tree.unflatten(treedef, leaves)"),
    *_internal("errors", "jax._src.traceback_util", "SimplifiedTraceback"),
    *_internal("custom_derivatives", "jax._src.custom_derivatives", "custom_jvp_call_jaxpr_p"),
    *_internal("extend.core.primitives", "jax._src.ad_util", "zeros_like_p"),
    *_internal("dlpack", "jax._src.dlpack", "SUPPORTED_DTYPES"),
    _adapted("dlpack.to_dlpack", _LISTED, "x.__dlpack__()"),
    _adapted("util.to_dlpack", _LISTED, "x.__dlpack__()"),
    Gone("stages.OutInfo", "jax:ShapeDtypeStruct", _LISTED),
    Gone("extend.core.primitives.pjit_p", "jax.extend.core.primitives:jit_p", _LISTED),
    # jax.experimental
    *_moved("experimental", "jax.sharding", "0.4.11", "PartitionSpec"),
    *_moved("experimental.maps", "jax.sharding", "0.4.11", "Mesh"),
    Gone("experimental.maps.xmap", "capibara.dropin.xmap:xmap", _LISTED, "jax.shard_map, or jax.vmap with axis_name"),
    *_internal("experimental.maps", "jax._src.mesh", "EMPTY_ENV ResourceEnv thread_resources"),
    *_moved("experimental.pjit", "jax.sharding", "0.4.11", "PartitionSpec NamedSharding"),
    *_moved("experimental.pjit", "jax.lax", _OLDER, "with_sharding_constraint"),
    _adapted("experimental.pjit.pjit", _LISTED, "jax.jit with in_shardings and out_shardings"),
    Gone("experimental.pjit.pjit_p", "jax.extend.core.primitives:jit_p", _LISTED),
    *_moved("experimental.shard_map", "jax.sharding", _LISTED, "Mesh NamedSharding PartitionSpec"),
    Gone("experimental.shard_map.P", "jax.sharding:PartitionSpec", _LISTED),
    *_moved("experimental.x64_context", "jax", _LISTED, "enable_x64"),
    _adapted("experimental.x64_context.disable_x64", _LISTED, "jax.enable_x64(False)"),
    *_internal(
        "experimental.compilation_cache.compilation_cache",
        "jax._src.compilation_cache",
        "initialize_cache is_initialized",
    ),
    *_internal("experimental.jet", "jax._src.core", "shaped_abstractify"),
    _adapted("experimental.shard_map.shard_map", _LISTED, "jax.shard_map with check_vma"),
    *_moved("experimental.shard", "jax.sharding", _LISTED, "reshard auto_axes explicit_axes"),
    *_moved("experimental", "jax", _LISTED, "enable_x64"),
    _adapted("experimental.disable_x64", _LISTED, "jax.enable_x64(False)"),
    Gone("experimental.layout.DeviceLocalLayout", "jax.experimental.layout:Layout", _LISTED),
    Gone("experimental.global_device_array.GlobalDeviceArray", "jax:Array", _OLDER),
    _adapted("experimental.host_callback.call", _LISTED, "jax.pure_callback or jax.experimental.io_callback"),
    _adapted("experimental.host_callback.id_print", _LISTED, "jax.debug.print"),
    _adapted("experimental.host_callback.id_tap", _LISTED, "jax.debug.callback"),
    _adapted("experimental.host_callback.barrier_wait", _LISTED, "jax.effects_barrier()"),
    _adapted("experimental.export.call", _LISTED, "exported.call", "exported_call"),
    _adapted("experimental.export.call_exported", _LISTED, "exported.call", "exported_call"),
    _adapted("experimental.export.serialize", _LISTED, "exported.serialize()", "exported_serialize"),
    Gone("experimental.export.default_lowering_platform", "jax.export:default_export_platform", _LISTED),
    *(
        Gone(
            f"experimental.export.{end}_supported_serialization_version",
            f"jax.export:{end}_supported_calling_convention_version",
            _LISTED,
        )
        for end in ("minimum", "maximum")
    ),
    *_moved(
        "experimental.array_serialization.serialization",
        "jax.experimental.array_serialization.tensorstore_impl",
        _LISTED,
        "estimate_read_memory_footprint",
    ),
    Gone("experimental.pallas.fuser.fusable", "jax.experimental.pallas.fuser:fusible", _LISTED),
    Gone("experimental.pallas.triton.TritonCompilerParams", "jax.experimental.pallas.triton:CompilerParams", _LISTED),
    Gone("experimental.pallas.tpu.KernelType", "jax.experimental.pallas.tpu:CoreType", _LISTED),
    *_internal("experimental.pallas.tpu", "jax._src.pallas.mosaic.primitives", "repeat"),
    *_internal("experimental.pallas", "jax._src.pallas.core", "debug_checks_enabled"),
    *_internal("experimental.shard_map", "jax._src.shard_map", "AxisName Specs get_mesh_from_args shard_map_p"),
    Gone("experimental.pallas.tpu.TPUCompilerParams", "jax.experimental.pallas.tpu:CompilerParams", _LISTED),
    Gone("experimental.pallas.tpu.TPUMemorySpace", "jax.experimental.pallas.tpu:MemorySpace", _LISTED),
    Gone("experimental.pallas.tpu.ANY", "jax.experimental.pallas:ANY", _LISTED),
    *_moved("experimental.pallas.tpu", "jax.experimental.pallas", _LISTED, "CostEstimate delay run_scoped"),
    *_moved("experimental.pallas.tpu", "jax.experimental.pallas", _LISTED, "DeviceIdType semaphore semaphore_read"),
    *_moved("experimental.pallas.tpu", "jax.experimental.pallas", _LISTED, "semaphore_signal semaphore_wait"),
    *(
        row
        for names in (
            "atomic_add atomic_and atomic_cas atomic_max atomic_min atomic_or atomic_xchg atomic_xor",
            "max_contiguous dot",
        )
        for row in _moved("experimental.pallas", "jax.experimental.pallas.triton", _LISTED, names)
    ),
    _adapted("experimental.pallas.load", _LISTED, "ref[idx]; with a mask, load of pallas.triton or pallas.tpu"),
    _adapted(
        "experimental.pallas.store", _LISTED, "ref[idx] = value; with a mask, store of pallas.triton or pallas.tpu"
    ),
    _adapted("experimental.pallas.swap", _LISTED, "ref[idx], then ref[idx] = value"),
    Gone("experimental.pallas.tpu.HOST", "jax.experimental.pallas:HOST", _LISTED),
)

_MODULES = (
    Gone("api", "jax", "0.2.21"),
    Gone("util", "jax._src.util", _LISTED, "functions of your own: it is internal to jax"),
    Gone("prng", "jax.extend.random", "0.4.24"),
    Gone("linear_util", "jax.extend.linear_util", "0.4.24"),
    Gone("extend.ffi", "jax.ffi", _LISTED),
    Gone("lib.xla_bridge", "jax.extend.backend", _LISTED),
    Gone("lib.xla_client", "", _LISTED, "jax's own names for Device, Array and errors"),
    Gone("lib.xla_extension", "", _LISTED, "jax's own names for Array and errors"),
    Gone("config", "", "0.4.29", "the object jax.config"),
    Gone("checkpoint", "", _NEVER, "the function jax.checkpoint"),
    Gone("abstract_arrays", "", "0.4.17", "jax.core"),
    Gone("cloud_tpu_init", "", _LISTED, "nothing: jax does it by itself"),
    Gone("experimental.checkpoint", "", _NEVER, "the function jax.checkpoint"),
    Gone("experimental.maps", "", _LISTED, "jax.sharding and jax.shard_map"),
    Gone("experimental.shard", "", _LISTED, "jax.sharding"),
    Gone("experimental.stax", "jax.example_libraries.stax", "0.3.16"),
    Gone("experimental.optimizers", "jax.example_libraries.optimizers", "0.3.16"),
    Gone("experimental.export", "jax.export", _LISTED),
    Gone("experimental.array_api", "jax.numpy", _LISTED),
    Gone("experimental.array_api.fft", "jax.numpy.fft", _LISTED),
    Gone("experimental.array_api.linalg", "jax.numpy.linalg", _LISTED),
    Gone("experimental.gda_serialization", "jax.experimental.array_serialization", _OLDER),
    Gone("experimental.global_device_array", "", _OLDER, "jax.Array"),
    Gone(
        "experimental.host_callback",
        "",
        _LISTED,
        "jax.debug, jax.pure_callback, jax.experimental.io_callback",
    ),
    Gone("experimental.pallas.gpu", "jax.experimental.pallas.triton", _LISTED),
    Gone("experimental.pjit", "", _LISTED, "jax.jit"),
    Gone("experimental.shard_map", "", _LISTED, "jax.shard_map"),
    Gone("experimental.x64_context", "", _LISTED, "jax.enable_x64"),
)

NAMES: dict[str, Gone] = {one.old: one for one in _NAMES}
"""Path below jax -> its row."""
MODULES: dict[str, Gone] = {one.old: one for one in _MODULES}
"""The same for modules that are gone as a whole."""
