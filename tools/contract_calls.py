"""A call of each documented name that is there: what tools/contract_table.py runs before it says so.

Each call has the documents' keywords and their values: a pair where they write a pair, a fresh layer first called
inside jit. Keywords that are this library's own come in a second call. Operands are small: what the documents would
make of 8192 x 8192 numbers, or of models, is a few kilobytes here; where a size is itself an argument it is theirs,
unless a comment says otherwise. The 32 devices that they count on are virtual ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

CALLS: dict[Callable[[], None], tuple[str, ...]] = {}
"""What runs -> the paths, as in docs/contract.toml, that it shows."""


def shows(*paths: str, of: str = "") -> Callable[[Callable[[], None]], Callable[[], None]]:
    """The function below runs these names; `of` is what all of the paths begin with."""

    def add(run: Callable[[], None]) -> Callable[[], None]:
        CALLS[run] = tuple(of + path for path in paths)
        return run

    return add


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


SQUARE = normal(32, 32)
ROWS = normal(8, 32)
ONES, ZEROS = np.ones(32, np.float32), np.zeros(32, np.float32)
HEADS = normal(1, 2, 32, 8)  # batch, heads, length, head_dim
CODES = normal(4, 32)
IMAGES, FILTERS = normal(1, 8, 8, 4), normal(3, 3, 4, 4)
SEQUENCE = normal(1, 8, 4)  # batch, time, channels


# The drop-in.

JAX = "capibara.jax"
MODULES = (
    "", ".numpy", ".numpy.linalg", ".numpy.fft", ".nn", ".lax", ".lax.linalg", ".random", ".experimental",
    ".experimental.array_serialization", ".experimental.checkpoint", ".experimental.mesh_utils",
    ".experimental.pallas", ".experimental.pjit", ".sharding", ".profiler", ".diagnostics", "._src.core", ".tpu_v4",
    ".tpu_v4.kernels", ".tpu_v4.backend", ".tpu_v4.optimizations", ".tpu_v4.recovery", ".tpu_v4.training",
    ".tpu_v4.inference", ".tpu_v4.monitoring", ".tpu_v4.cost", ".tpu_v4.autoscaling", ".tpu_v4.diagnostics",
    ".utils",
)  # fmt: skip


@shows(*MODULES, of=JAX)
def modules_by_dotted_imports() -> None:
    import capibara.jax.experimental.checkpoint

    import capibara.jax
    import capibara.jax._src.core
    import capibara.jax.diagnostics
    import capibara.jax.experimental
    import capibara.jax.experimental.array_serialization
    import capibara.jax.experimental.mesh_utils
    import capibara.jax.experimental.pallas
    import capibara.jax.experimental.pjit
    import capibara.jax.lax
    import capibara.jax.lax.linalg
    import capibara.jax.nn
    import capibara.jax.numpy
    import capibara.jax.numpy.fft
    import capibara.jax.numpy.linalg
    import capibara.jax.profiler
    import capibara.jax.random
    import capibara.jax.sharding
    import capibara.jax.tpu_v4
    import capibara.jax.tpu_v4.autoscaling
    import capibara.jax.tpu_v4.backend
    import capibara.jax.tpu_v4.cost
    import capibara.jax.tpu_v4.diagnostics
    import capibara.jax.tpu_v4.inference
    import capibara.jax.tpu_v4.kernels
    import capibara.jax.tpu_v4.monitoring
    import capibara.jax.tpu_v4.optimizations
    import capibara.jax.tpu_v4.recovery
    import capibara.jax.tpu_v4.training
    import capibara.jax.utils

    assert capibara.jax.lax.linalg.cholesky is not None


@shows(":__name__", ":__version__", ":tpu_v4_optimizations", ":jit", ":grad", ":vmap", of=JAX)
def as_jax() -> None:
    import capibara.jax as jax
    import capibara.jax.numpy as jnp

    assert jax.__name__ == "capibara.jax"
    assert jax.__version__[0].isdigit()
    assert hasattr(jax, "tpu_v4_optimizations")
    assert jax.tpu_v4_optimizations.create_mesh_sharding is not None

    @jax.jit
    def function(x: Any) -> Any:
        return jnp.square(x) + jnp.sin(x)

    x = jnp.arange(1000.0)
    assert function(x).shape == (1000,)
    assert jax.vmap(jax.grad(function))(x).shape == (1000,)


@shows(":PRNGKey", ":normal", of="capibara.jax.random")
def random_numbers() -> None:
    from capibara.jax import random

    assert random.normal(random.PRNGKey(42), (1000, 1000)).shape == (1000, 1000)


@shows("capibara.jax.numpy:random", "capibara.jax.numpy:matmul", "capibara.jax._src.core:tpu_v4_optimization_context")
def products_in_a_context() -> None:
    import capibara.jax as jax
    import capibara.jax.numpy as jnp
    from capibara.jax._src.core import tpu_v4_optimization_context

    with tpu_v4_optimization_context():
        x = jnp.random.normal(jax.random.PRNGKey(0), (64, 64))
        assert jnp.sum(jnp.matmul(x, x.T)).shape == ()


@shows(
    ".numpy:dot", ".numpy:einsum", ".numpy.fft:fft", ".nn:dot_product_attention", ".nn:standardize",
    ".lax:associative_scan", of=JAX,
)  # fmt: skip
def changed_functions_in_a_context() -> None:
    import capibara.jax.numpy as jnp
    from capibara.jax import lax, nn
    from capibara.jax._src.core import tpu_v4_optimization_context

    heads = jnp.asarray(HEADS)
    with tpu_v4_optimization_context():
        assert jnp.dot(SQUARE, SQUARE).shape == (32, 32)
        assert jnp.einsum("ij,kj->ik", SQUARE, SQUARE).shape == (32, 32)
        assert jnp.fft.fft(SQUARE).shape == (32, 32)
        assert nn.dot_product_attention(heads, heads, heads).shape == HEADS.shape
        assert nn.standardize(jnp.asarray(SQUARE)).shape == (32, 32)
        assert lax.associative_scan(jnp.add, jnp.arange(8.0))[-1] == 28


@shows(":tree_map", ":pjit", of=JAX)
def names_kept_for_older_code() -> None:
    import capibara.jax as jax
    from capibara.jax.sharding import PartitionSpec

    assert jax.tree_map(lambda x: x + 1, {"a": 1}) == {"a": 2}
    policy = jax.pjit(
        in_axis_resources=PartitionSpec("data", "model"), out_axis_resources=PartitionSpec("data", "model")
    )
    assert callable(policy)


@shows(":config.update", ":get_backend_info", ":get_optimization_status", of=JAX)
def settings_and_status() -> None:
    import capibara.jax as jax
    from capibara.jax import get_backend_info, get_optimization_status

    info = get_backend_info()
    assert {"name", "tpu_optimized", "custom_kernels", "memory_limit_gb"} <= set(info)
    assert {"flash_attention", "parallel_scan", "vq_kernels"} <= set(info["capabilities"])
    try:
        for name in ("jax_debug_mode", "jax_check_tracer_leaks", "jax_log_compiles"):
            jax.config.update(name, True)
            jax.config.update(name, False)
        assert {"tpu_optimized", "custom_kernels_active", "memory_optimized"} <= set(get_optimization_status())
        jax.config.update("enable_tpu_optimizations", True)
        assert get_optimization_status()["tpu_optimized"]
    finally:
        for name in ("jax_debug_mode", "jax_check_tracer_leaks", "jax_log_compiles", "enable_tpu_optimizations"):
            jax.config.update(name, False)


@shows("capibara.jax.diagnostics:check_installation")
def installation() -> None:
    from capibara.jax import diagnostics

    diagnosis = diagnostics.check_installation()
    assert diagnosis.jax_native_available, diagnosis.error_message


# Meshes and configurations.


@shows(
    "capibara.jax._src.core:TPUv4MeshConfigurations",
    "capibara.jax._src.core:create_tpu_mesh_config",
    "capibara.jax.tpu_v4:TPUv4MeshConfigurations",
    *(
        f"capibara.jax.tpu_v4:TPUv4MeshConfigurations().{name}"
        for name in (
            "CULTURAL_ANALYSIS.shape", "CULTURAL_ANALYSIS.axis_names", "CULTURAL_ANALYSIS.build",
            "QUANTUM_CLASSICAL.build", "SPIKING_NEURAL.build",
        )
    ),
)  # fmt: skip
def mesh_presets() -> None:
    import jax

    from capibara.jax._src import core
    from capibara.jax.tpu_v4 import TPUv4MeshConfigurations

    configs = TPUv4MeshConfigurations()
    assert core.TPUv4MeshConfigurations().CULTURAL_ANALYSIS == configs.CULTURAL_ANALYSIS
    assert configs.CULTURAL_ANALYSIS.shape == (4, 8)
    assert len(configs.CULTURAL_ANALYSIS.axis_names) == 2
    for config in (configs.CULTURAL_ANALYSIS, configs.QUANTUM_CLASSICAL, configs.SPIKING_NEURAL):
        assert config.build(devices=jax.devices()).devices.shape == config.shape
    made = core.create_tpu_mesh_config(mesh_shape=(4, 8), optimization_target="inference", memory_limit_gb=32.0)
    assert made.shape == (4, 8)


@shows("capibara.jax._src.core:with_sharding_constraint")
def constraints_by_name() -> None:
    import capibara.jax as jax
    import capibara.jax.numpy as jnp
    from capibara.jax._src.core import with_sharding_constraint

    def distributed(x: Any) -> Any:
        placed = with_sharding_constraint(x, ("batch", "hidden"))
        return jnp.matmul(placed, placed.T)

    assert jax.jit(distributed)(SQUARE).shape == (32, 32)


@shows("capibara.jax.utils:check_migration_compatibility")
def _check_migration_compatibility() -> None:
    import tempfile
    from pathlib import Path

    from capibara.jax.utils import check_migration_compatibility

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "mi_modelo.py"
        file.write_text("import jax\njax.tree_map(f, x)\n", encoding="utf-8")
        compatibility = check_migration_compatibility(
            source_code=str(file), check_imports=True, check_functions=True, check_performance=True
        )
    assert not compatibility.is_compatible
    assert [str(issue) for issue in compatibility.issues]


@shows("capibara.jax.experimental.mesh_utils:create_device_mesh")
def device_mesh() -> None:
    from capibara.jax.experimental import mesh_utils
    from capibara.jax.sharding import Mesh

    assert Mesh(mesh_utils.create_device_mesh((4, 8)), axis_names=("data", "model")).size == 32


@shows(":create_mesh_sharding", ":optimize_sharding_strategy", of="capibara.jax.tpu_v4.optimizations")
def sharding_of_a_model() -> None:
    from capibara.jax.tpu_v4.optimizations import create_mesh_sharding, optimize_sharding_strategy

    # Two small parameters stand for a model's.
    params = {"w": normal(768, 64), "b": normal(64)}
    mesh_sharding = create_mesh_sharding(
        mesh_shape=(4, 8), device_ids=list(range(32)), optimization_target="throughput"
    )
    strategy = optimize_sharding_strategy(
        model_params=params, input_shape=(32, 512, 768), mesh_shape=(4, 8), memory_limit_gb=32.0
    )
    placed = mesh_sharding.shard_model(params, strategy=strategy)
    assert placed["w"].sharding.mesh.size == mesh_sharding.mesh.size == 32


@shows(
    ":TpuMemoryManager", ":TpuMemoryManager.managed_context", ":TpuMemoryManager.register", ":TpuMemoryManager.get",
    ":TpuMemoryManager.stats", ":HBMOptimizer", ":TpuMemoryMonitor", ":create_optimized_cache",
    of="capibara.jax.tpu_v4.optimizations",
)  # fmt: skip
def memory_of_a_device() -> None:
    import jax.numpy as jnp

    from capibara.jax.tpu_v4.optimizations import (
        HBMOptimizer,
        TpuMemoryManager,
        TpuMemoryMonitor,
        create_optimized_cache,
    )

    manager = TpuMemoryManager(
        memory_limit_gb=32.0, cleanup_threshold=0.85, prefetch_enabled=True, compression_enabled=True
    )
    HBMOptimizer(access_pattern="sequential", cache_policy="lru", bandwidth_limit_gbps=900)
    TpuMemoryMonitor(memory_limit_gb=32.0, cleanup_threshold=0.85)
    with manager.managed_context():
        manager.register(name="weights", array=jnp.asarray(SQUARE), policy="offload")
        assert manager.get(name="weights").shape == (32, 32)
    assert manager.stats()["hits"] == 1
    cache = create_optimized_cache(cache_size_gb=4.0, use_hbm=True, prefetch_enabled=True)
    cache["rows"] = jnp.asarray(ROWS)
    assert cache.prefetch(["rows"]) == 0
    assert cache["rows"].shape == (8, 32)
    assert cache.stats()["hits"] == 1
    cache.close()


@shows(
    "HBMOptimizer.plan", "HBMOptimizer.stream", "TpuMemoryMonitor.usage", "TpuMemoryMonitor.peak",
    of="capibara.memory:",
)  # fmt: skip
def memory_planned_and_measured() -> None:
    from capibara.memory import HBMOptimizer, TpuMemoryMonitor

    optimizer = HBMOptimizer(access_pattern="sequential", cache_policy="lru", bandwidth_limit_gbps=900)
    planned = optimizer.plan(shapes={"a": (32, 32), "b": (32, 32)}, order=["a", "b", "a"])
    assert (planned.prefetch_distance, planned.evictions) == (1, ())
    assert planned.layout["a"].where == "resident"
    assert planned.seconds > 0
    assert [array.shape for array in optimizer.stream(arrays=[SQUARE, ROWS])] == [(32, 32), (8, 32)]
    monitor = TpuMemoryMonitor(memory_limit_gb=32.0, cleanup_threshold=0.85)
    assert 0 <= monitor.usage() <= monitor.peak()


@shows(
    ":TpuPerformanceProfiler", ":TpuPerformanceProfiler.profile_context", ":TpuPerformanceProfiler.get_metrics",
    ":TpuPerformanceProfiler.get_detailed_metrics", ":TpuProfiler", ":TpuProfiler.__enter__", ":TpuProfiler.__exit__",
    ":TpuProfiler.generate_report",
    of="capibara.jax.tpu_v4.optimizations",
)  # fmt: skip
def profilers() -> None:
    import jax

    from capibara.jax.tpu_v4.optimizations import TpuPerformanceProfiler, TpuProfiler

    model, inputs = jax.jit(lambda x: x @ x), SQUARE
    profiler = TpuPerformanceProfiler(
        capture_memory=True, capture_flops=True, capture_communication=True, capture_kernel_details=True
    )
    with profiler.profile_context("model_forward"):
        model(inputs)
    metrics = profiler.get_detailed_metrics()
    names = ("tflops", "peak_memory_gb", "memory_efficiency", "compute_efficiency", "comm_overhead_ms")
    assert all(metrics[name] >= 0 for name in names)
    profiler = TpuPerformanceProfiler()
    with profiler.profile_context(name="forward_pass"):
        model(inputs)
    assert profiler.get_metrics()["tflops"] > 0
    whole = TpuProfiler(capture_memory=True, capture_flops=True, capture_communication=True)
    with whole:
        model(inputs)
    report = whole.generate_report()
    assert report["total_flops"] == 2 * 32**3
    assert report["peak_memory_gb"] > 0
    assert report["comm_overhead_ms"] == 0


@shows("capibara.jax.tpu_v4.training:create_training_mesh")
def training_mesh() -> None:
    from capibara.jax.tpu_v4.training import create_training_mesh

    made = create_training_mesh(
        total_chips=32, data_parallel_size=8, model_parallel_size=4, pipeline_parallel_size=1
    )  # fmt: skip
    assert made.size == 32
    made = create_training_mesh(
        total_chips=32,
        data_parallel_size=8,
        model_parallel_size=1,
        expert_parallel_size=2,
        sequence_parallel_size=2,
    )
    assert made.size == 32


CONFIG = "capibara.config"


@shows("", ".tpu_config", *(
    f".tpu_config:{name}"
    for name in (
        "TPUConfig", "TPUConfig.use_mixed_precision", "TPUConfig.get_sharding_spec", "TPUConfig.get_memory_config",
        "TPUConfig.profile_tpu_usage", "TPUConfig.scaling_config", "TPUConfig.detect_hotspots",
        "TPUConfig.optimize_sharding", "TPUError",
    )
), of=CONFIG)  # fmt: skip
def tpu_configuration() -> None:
    import capibara.config
    from capibara.config import tpu_config
    from capibara.config.tpu_config import TPUConfig

    made = TPUConfig(
        num_chips=32,
        topology="4x8",
        memory_per_chip=32 * 1024**3,
        flops_per_chip=275e12,
        compute_dtype="bfloat16",
        param_dtype="float32",
    )
    assert capibara.config.TPUConfig is TPUConfig
    assert made.use_mixed_precision
    assert made.get_memory_config()["use_mixed_precision"]
    assert tuple(made.get_sharding_spec(tensor_shape=(64, 16, 128))) == ("data", None, "model")
    load = np.zeros((4, 8))
    load[1, 2] = 2 * made.scaling_config.load_threshold
    assert made.detect_hotspots(load=load) == [(1, 2)]
    assert made.optimize_sharding() is not None
    assert made.optimize_sharding(load=load) is not None
    usage = made.profile_tpu_usage()
    assert {"memory_allocated", "memory_peak", "device_count", "device_utilization"} <= set(usage)
    assert issubclass(tpu_config.TPUError, Exception)


# Compilation.

OPTIMIZATIONS = "capibara.jax.tpu_v4.optimizations"


@shows(":TpuCompilationConfig", ":create_tpu_optimized_jit", of=OPTIMIZATIONS)
def a_function_jitted_by_a_config() -> None:
    import jax

    from capibara.jax.tpu_v4.optimizations import TpuCompilationConfig, create_tpu_optimized_jit

    compilation_config = TpuCompilationConfig(
        optimization_level="aggressive",
        use_bfloat16=True,
        enable_async_collective=True,
        memory_optimization=True,
        cache_compiled_functions=True,
    )

    @create_tpu_optimized_jit(config=compilation_config)
    def optimized_forward(params: Any, inputs: Any) -> Any:
        return inputs * params["scale"] + params["shift"]

    compiled_forward = optimized_forward.compile(input_shapes=[(32, 512, 768)], static_argnums=[0])
    params = {"scale": normal(768), "shift": normal(768)}
    inputs = np.ones((32, 512, 768), np.float32)
    result = compiled_forward(params, inputs)
    assert result.shape == (32, 512, 768)
    assert result.dtype == jax.numpy.bfloat16
    np.testing.assert_allclose(
        np.asarray(result[0, 0], np.float32), params["scale"] + params["shift"], rtol=2e-2, atol=2e-2
    )
    assert compiled_forward.executable.memory_analysis() is not None


@shows(":create_jitted_forward", of=OPTIMIZATIONS)
def a_forward_pass_compiled_ahead_of_time() -> None:
    import jax.numpy as jnp

    from capibara.jax.tpu_v4.optimizations import create_jitted_forward

    class Model:
        params = normal(768)

        def apply(self, params: Any, inputs: Any) -> Any:
            return jnp.tanh(inputs * params)

        def forward(self, inputs: Any) -> Any:
            return self.apply(self.params, inputs)

    model = Model()
    optimized_forward = create_jitted_forward(
        model_fn=model.forward,
        input_shapes=[(32, 512, 768)],
        optimization_level="aggressive",
        use_bfloat16=True,
        enable_async_collective=True,
    )
    assert optimized_forward.programs == 1
    result = optimized_forward(np.ones((32, 512, 768), np.float32))
    np.testing.assert_allclose(np.asarray(result[3, 5], np.float32), np.tanh(model.params), atol=2e-2)


@shows(":TpuWarmupManager", ":TpuWarmupManager.warmup_model", of=OPTIMIZATIONS)
def a_model_warmed_up() -> None:
    import jax

    from capibara.jax.tpu_v4.optimizations import TpuWarmupManager

    warmup_manager = TpuWarmupManager(compilation_cache_size_gb=2.0, warmup_steps=10, progressive_warmup=True)
    done = warmup_manager.warmup_model(
        model=jax.jit(lambda x: x.mean(axis=-1)),
        input_shapes=[(8, 256, 768), (16, 512, 768), (32, 1024, 768)],
        batch_sizes=[8, 16, 32],
    )
    assert [row.shape for row in done.shapes] == [(8, 256, 768), (16, 512, 768), (32, 1024, 768)]
    assert done.compiled + done.from_disk == 3


# The eight families.

BACKEND = "capibara.jax.tpu_v4.backend:"


@shows("TpuV4LinalgOps", "TpuV4LinalgOps.optimized_gemm", "TpuV4LinalgOps.fast_svd", of=BACKEND)
def linear_algebra() -> None:
    from capibara.jax.tpu_v4.backend import TpuV4LinalgOps

    ops = TpuV4LinalgOps()
    assert ops.optimized_gemm(a=SQUARE, b=SQUARE, precision="bfloat16", use_async=True).shape == (32, 32)
    # A longer contraction than chunk_size, so that there is something to cut.
    made = ops.optimized_gemm(
        a=normal(4, 2048), b=normal(2048, 4), precision="bfloat16", use_async=True, chunk_size=1024
    )
    assert made.shape == (4, 4)
    u, s, v = ops.fast_svd(ROWS, compute_uv=True, use_randomized=True)
    assert (u.shape, s.shape, v.shape) == ((8, 8), (8,), (8, 32))
    assert ops.fast_svd(ROWS, compute_uv=False, use_randomized=True, rank=2).shape == (2,)


@shows(
    "TpuV4AttentionOps", "TpuV4AttentionOps.flash_attention", "TpuV4AttentionOps.fused_multihead_attention", of=BACKEND
)
def attention() -> None:
    import jax

    from capibara.jax.tpu_v4.backend import TpuV4AttentionOps, init_multihead_attention

    ops = TpuV4AttentionOps()
    made = ops.flash_attention(
        query=HEADS, key=HEADS, value=HEADS, block_size=128, use_causal_mask=True, precision="bfloat16"
    )
    assert made.shape == HEADS.shape
    x = normal(1, 8, 48)  # of the documents' 12 heads
    assert ops.fused_multihead_attention(x=x, num_heads=12, use_bias=True, dropout_rate=0.1).shape == x.shape
    key = jax.random.key(0)
    params = init_multihead_attention(key, 48, 12)
    made = ops.fused_multihead_attention(x=x, num_heads=12, dropout_rate=0.1, params=params, rng=key, training=True)
    assert made.shape == x.shape


@shows("TpuV4ScanOps", "TpuV4ScanOps.parallel_scan", "TpuV4ScanOps.explain", of=BACKEND)
def scans() -> None:
    from capibara.jax.tpu_v4.backend import TpuV4ScanOps

    ops = TpuV4ScanOps()
    transition, entering, leaving = 0.1 * normal(4, 4), normal(2, 4), normal(4, 2)

    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        carry = carry @ transition + x @ entering
        return carry, carry @ leaving

    call: dict[str, Any] = {"f": step, "init": np.zeros(4, np.float32), "xs": normal(512, 2)}
    ends = [
        ops.parallel_scan(call["f"], call["init"], call["xs"], num_segments=256),
        ops.parallel_scan(f=step, init=call["init"], xs=call["xs"], num_segments=256, use_checkpointing=True),
    ]
    for carry, outputs in ends:
        assert (carry.shape, outputs.shape) == ((4,), (512, 2))
    plan = ops.explain(f=step, init=call["init"], xs=call["xs"], num_segments=256, use_checkpointing=True)
    assert plan.segments == 256


@shows(*(
    f"TpuV4ScanOps.{name}" for name in ("linear_recurrence", "selective_scan", "state_space_dual", "lif_neurons")
), of=BACKEND)  # fmt: skip
def recurrences() -> None:
    from capibara.jax.tpu_v4.backend import TpuV4ScanOps

    ops = TpuV4ScanOps()
    decay, states = np.abs(SEQUENCE) / 4, normal(1, 8, 2)
    assert ops.linear_recurrence(a=decay, b=SEQUENCE, initial=normal(1, 4)).shape == SEQUENCE.shape
    made = ops.selective_scan(x=SEQUENCE, dt=decay, A=-np.abs(normal(4, 2)), B=states, C=states, D=np.ones(4, "f4"))
    assert made.shape == SEQUENCE.shape
    grouped = normal(1, 8, 1, 2)
    made = ops.state_space_dual(
        x=normal(1, 8, 2, 4), dt=decay[..., :2], A=-np.ones(2, "f4"), B=grouped, C=grouped, D=np.ones(2, "f4")
    )
    assert made.shape == (1, 8, 2, 4)
    assert ops.lif_neurons(current=SEQUENCE, decay=0.9).shape == SEQUENCE.shape


@shows(*(
    f"TpuV4CollectiveOps{name}"
    for name in ("", ".async_all_reduce", ".optimized_all_gather", ".reduce_scatter", ".all_to_all")
), of=BACKEND)  # fmt: skip
def collectives() -> None:
    import jax

    from capibara.jax.tpu_v4.backend import TpuV4CollectiveOps

    ops = TpuV4CollectiveOps()
    gradients = {"w": SQUARE, "b": ONES}
    made = ops.async_all_reduce(gradients, reduction_op="mean", use_compression=True, overlap_compute=True)
    assert made["w"].shape == (32, 32)
    assert ops.optimized_all_gather(ROWS, axis=0, use_ring_algorithm=True).shape == ROWS.shape
    # And among devices, inside shard_map: two, of which each has half of the rows.
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])

    def local(x: Any) -> Any:
        summed = ops.async_all_reduce(x, reduction_op="mean", axis_name="data")
        gathered = ops.optimized_all_gather(x, axis=0, use_ring_algorithm=True, axis_name="data")
        return summed, ops.reduce_scatter(gathered, axis_name="data"), ops.all_to_all(x, axis_name="data")

    spec = jax.P("data")
    for one in jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec))(ROWS):
        assert one.shape == ROWS.shape


@shows("TpuV4ConvOps", "TpuV4ConvOps.winograd_conv2d", of=BACKEND)
def winograd() -> None:
    from capibara.jax.tpu_v4.backend import TpuV4ConvOps

    made = TpuV4ConvOps().winograd_conv2d(
        inputs=IMAGES, filters=FILTERS, strides=(1, 1), padding="SAME", tile_size=(4, 4)
    )
    assert made.shape == IMAGES.shape


@shows(*(
    f"TpuV4ConvOps.{name}" for name in ("conv2d", "causal_conv1d", "causal_conv1d_step", "long_conv")
), of=BACKEND)  # fmt: skip
def convolutions() -> None:
    from capibara.jax.tpu_v4.backend import TpuV4ConvOps

    ops = TpuV4ConvOps()
    made = ops.conv2d(
        inputs=IMAGES, filters=FILTERS, strides=1, padding="SAME", dilation=1, groups=1, precision="bfloat16"
    )
    assert made.shape == IMAGES.shape
    taps, bias = normal(3, 4), normal(4)
    made = ops.causal_conv1d(x=SEQUENCE, w=taps, bias=bias, activation="silu", precision="float32")
    assert made.shape == SEQUENCE.shape
    made, state = ops.causal_conv1d_step(state=normal(1, 2, 4), x=normal(1, 4), w=taps, bias=bias, activation="silu")
    assert (made.shape, state.shape) == ((1, 4), (1, 2, 4))
    assert ops.long_conv(x=SEQUENCE, h=normal(8, 4)).shape == SEQUENCE.shape


@shows("TpuV4FFTOps", "TpuV4FFTOps.radix_optimized_fft", of=BACKEND)
def radix_transform() -> None:
    from capibara.jax.tpu_v4.backend import TpuV4FFTOps

    # 1000 points, which 2 * 4 * 8 does not divide.
    made = TpuV4FFTOps().radix_optimized_fft(
        normal(2, 1000), radix_factors=[2, 4, 8], use_parallel=True, precision="bfloat16"
    )
    assert made.shape == (2, 1000)


@shows(*(
    f"TpuV4FFTOps.{name}" for name in ("inverse_fft", "real_fft", "inverse_real_fft", "fft2", "sharded_fft")
), of=BACKEND)  # fmt: skip
def transforms() -> None:
    import jax

    from capibara.jax.tpu_v4.backend import TpuV4FFTOps

    ops = TpuV4FFTOps()
    assert ops.inverse_fft(signal=SQUARE, precision="mixed").shape == (32, 32)
    spectrum = ops.real_fft(signal=SQUARE, precision="float32")
    assert ops.inverse_real_fft(spectrum=spectrum, precision="float32").shape == (32, 32)
    assert ops.fft2(image=SQUARE, precision="fp8").shape == (32, 32)
    mesh = jax.make_mesh((2,), ("time",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    assert ops.sharded_fft(signal=SQUARE, axis_name="time", precision="float32", mesh=mesh).shape == (32, 32)


@shows(*(
    f"TpuV4VQOps{name}" for name in ("", ".nearest_code", ".quantize", ".residual_vq", ".product_vq")
), of=BACKEND)  # fmt: skip
def quantizers() -> None:
    from capibara.jax.tpu_v4.backend import TpuV4VQOps

    ops = TpuV4VQOps()
    assert ops.nearest_code(x=ROWS, codebook=CODES, precision="bfloat16").shape == (8,)
    assert ops.quantize(x=ROWS, codebook=CODES, precision="float32").shape == ROWS.shape
    assert ops.residual_vq(x=ROWS, codebooks=np.stack([CODES, CODES]), precision="float32")[1].shape == (8, 2)
    assert ops.product_vq(x=ROWS, codebooks=normal(2, 4, 16), precision="float32")[1].shape == (8, 2)


@shows(*(
    f"TpuV4LayerOps{name}"
    for name in (
        "", ".layer_norm", ".rms_norm", ".activation", ".gated_activation", ".cross_entropy", ".route", ".moe_layer",
    )
), of=BACKEND)  # fmt: skip
def layers() -> None:
    import jax

    from capibara.jax.tpu_v4.backend import TpuV4LayerOps, init_moe

    ops, key = TpuV4LayerOps(), jax.random.key(0)
    made = ops.layer_norm(x=ROWS, scale=ONES, bias=ZEROS, residual=ROWS, eps=1e-5, precision="bfloat16")
    assert made.shape == ROWS.shape
    assert ops.rms_norm(x=ROWS, scale=ONES, residual=ROWS, eps=1e-6, precision="bfloat16").shape == ROWS.shape
    made = ops.activation(x=ROWS, kind="gelu", dropout_rate=0.1, rng=key, precision="bfloat16")
    assert made.shape == ROWS.shape
    made = ops.gated_activation(gate=ROWS, up=ROWS, kind="silu", dropout_rate=0.1, rng=key, precision="bfloat16")
    assert made.shape == ROWS.shape
    labels = np.zeros(8, np.int32)
    assert ops.cross_entropy(hidden=ROWS, weights=SQUARE, labels=labels, precision="bfloat16").shape == ()
    assert ops.route(logits=ROWS, top_k=4, precision="float32")[0].shape == (8, 4)
    params = init_moe(key, 32, 16, 4)
    made, _ = ops.moe_layer(params=params, x=ROWS, top_k=2, precision="bfloat16", mesh=None)
    assert made.shape == ROWS.shape


# Health.


@shows(
    ":TpuDiagnostics", ":TpuDiagnostics.run_full_health_check", ":TpuDiagnostics.analyze_performance_bottlenecks",
    of="capibara.jax.tpu_v4.diagnostics",
)  # fmt: skip
def health_of_the_devices() -> None:
    from capibara.jax.tpu_v4.diagnostics import TpuDiagnostics

    diagnostics = TpuDiagnostics()
    health_report = diagnostics.run_full_health_check()
    for name in ("all_chips_online", "temperature_normal", "memory_healthy", "interconnect_ok"):
        assert health_report[name] in (True, False, None)
    perf_analysis = diagnostics.analyze_performance_bottlenecks()
    for bottleneck in perf_analysis.bottlenecks if perf_analysis.has_bottlenecks else ():
        assert bottleneck.description
        assert bottleneck.suggestion


# Recovery.


@shows(":TpuRecoveryManager", ":TpuRecoveryManager.recovery_context", ":TpuError", of="capibara.jax.tpu_v4.recovery")
def recovery_of_a_training_step() -> None:
    import jax
    import jax.numpy as jnp

    from capibara.jax.tpu_v4.recovery import TpuError, TpuRecoveryManager
    from capibara.models import step_hooks

    class Model:
        """A stand-in with a state and a `train_step` that a device can fail."""

        def __init__(self) -> None:
            self.state = jnp.zeros(8)
            self.steps_done = 0
            self.failures: list[Exception] = []

        def get_state(self) -> Any:
            return self.state

        def set_state(self, state: Any) -> None:
            self.state = state

        def train_step(self, batch: Any) -> Any:
            return step_hooks.guarded(self, lambda: self._step(batch))

        def _step(self, batch: Any) -> Any:
            if self.failures:
                raise self.failures.pop()
            self.state = self.state + batch
            self.steps_done += 1
            step_hooks.report(self.steps_done, self.state)
            return {"loss": self.state.sum()}

    model, batch = Model(), jnp.ones(8)
    recovery_manager = TpuRecoveryManager(auto_recovery=True, fallback_to_gpu=True, checkpoint_frequency=1000)
    told = []
    for failures in (0, 1, 9):
        recovery_manager.backoff_seconds = 0  # this library's own: the documents do not wait
        model.failures = [jax.errors.JaxRuntimeError("UNAVAILABLE: lost TPU:3") for _ in range(failures)]
        with recovery_manager.recovery_context():
            try:
                result = model.train_step(batch)
            except TpuError as e:
                told.append(f"TPU error: {e}")
        assert result["loss"] == 8 * min(failures + 1, 2)
    assert len(told) == 1
    assert "UNAVAILABLE" in told[0]


@shows(":TpuRecoveryManager.run", of="capibara.jax.tpu_v4.recovery")
def recovery_by_a_retry() -> None:
    import jax
    import jax.numpy as jnp

    from capibara.jax.tpu_v4.recovery import TpuRecoveryManager

    failures = [jax.errors.JaxRuntimeError("ABORTED: the slice was preempted") for _ in range(2)]

    def step(state: Any, batch: Any) -> Any:
        if failures:
            raise failures.pop()
        return state + batch

    manager = TpuRecoveryManager(auto_recovery=True, fallback_to_gpu=True, checkpoint_frequency=1000, backoff_seconds=0)
    assert manager.run(step=step, state=jnp.ones(3), batch=jnp.ones(3)).tolist() == [2, 2, 2]
    assert manager.run(step, jnp.ones(3), jnp.ones(3)).tolist() == [2, 2, 2]
    assert len(manager.errors) == 2


# Monitoring.


@shows(
    *(f":TpuRealTimeMonitor{name}" for name in ("", ".start_monitoring", ".stop", ".get_current_metrics", ".has_alerts",
                                                ".get_alerts", ".__enter__", ".__exit__")),
    of="capibara.jax.tpu_v4.monitoring",
)  # fmt: skip
def monitoring_in_real_time() -> None:
    from capibara.jax.tpu_v4.monitoring import TpuRealTimeMonitor

    monitor = TpuRealTimeMonitor(
        update_frequency_ms=100,
        alert_thresholds={
            "memory_usage": 0.9,
            "temperature": 80.0,
            "utilization": 0.3,
        },
    )
    monitor.start_monitoring()
    for _ in range(2):
        current_metrics = monitor.get_current_metrics()
        if monitor.has_alerts():
            alerts = monitor.get_alerts()
            for alert in alerts:
                assert f"TPU Alert: {alert}".endswith(f"{alert.side} {alert.threshold:.4g}")
    monitor.stop()
    assert current_metrics["sources"]["host"]["memory_usage"] > 0
    with TpuRealTimeMonitor(update_frequency_ms=100, alert_thresholds={"memory_usage": 1e-6}) as inside:
        inside.sample()
        # Of the accelerators where there are any; of this machine where there are none.
        assert inside.has_alerts() == (inside.get_current_metrics()["memory_usage"] is not None)


# The model and its training.


@shows(":ModularModelConfig", ":ModularModelConfig.from_toml", ":ModularModelConfig.to_toml", of="capibara.config")
def configs_of_models() -> None:
    from capibara.config import ModularModelConfig

    config = ModularModelConfig.from_toml("capibara/config/configs_toml/production/tpu_v4.toml")
    assert config.parameters > 6e9
    assert ModularModelConfig.from_toml(path="dev") == ModularModelConfig.from_toml("dev")
    assert "[model]" in config.to_toml()


@shows(
    *(f":ModularCapibaraModel{name}" for name in ("", ".is_tpu_optimized", ".tpu_mesh_shape", ".tpu_memory_limit_gb")),
    of="capibara.core",
)
def model_of_the_tpu_preset() -> None:
    from capibara.config import ModularModelConfig
    from capibara.core import ModularCapibaraModel

    config = ModularModelConfig.from_toml("capibara/config/configs_toml/production/tpu_v4.toml")
    model = ModularCapibaraModel(config)
    assert model.is_tpu_optimized
    assert model.tpu_mesh_shape == (4, 8)
    assert model.tpu_memory_limit_gb == 30.75
    assert ModularCapibaraModel(config=config).config is config


def _tiny_model() -> Any:
    """Of the dev preset's blocks, smaller: what a call costs here is compiling."""
    import os
    import tempfile

    from capibara.config import ModularModelConfig
    from capibara.core import ModularCapibaraModel

    lines = ["[model]", "hidden = 32", "layers = 2", "vocab = 260", "max_length = 128", "[model.blocks.attention]"]
    lines += ["heads = 4", "kv_heads = 4", "[model.blocks.mlp]", "ffn = 64"]
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "tiny.toml")
        with open(file, "w") as opened:
            opened.write("\n".join(lines))
        return ModularCapibaraModel(ModularModelConfig.from_toml(file))


@shows(
    *(f":ModularCapibaraModel.{name}" for name in ("__call__", "params", "apply", "forward", "train_step", "generate")),
    of="capibara.core",
)
def model_in_use() -> None:
    model = _tiny_model()
    ids = np.zeros((2, 8), np.int32)
    assert model(ids).shape == model.forward(inputs=ids).shape == (2, 8, 260)
    assert model.apply(params=model.params, inputs=ids).shape == (2, 8, 260)
    result = model.train_step(batch={"inputs": ids, "targets": ids})
    assert np.isfinite(result["loss"])
    assert len(model.generate([1, 2, 3], max_tokens=2)) == 2
    assert isinstance(model.generate("TPU", max_tokens=2), str)


@shows(":TpuDistributedTrainer", ":TpuDistributedTrainer.train", of="capibara.jax.tpu_v4.training")
def distributed_training() -> None:
    from capibara.jax.tpu_v4.training import TpuDistributedTrainer, create_training_mesh

    model = _tiny_model()
    training_mesh = create_training_mesh(
        total_chips=32, data_parallel_size=8, model_parallel_size=4, pipeline_parallel_size=1
    )
    trainer = TpuDistributedTrainer(
        model=model,
        mesh=training_mesh,
        gradient_accumulation_steps=4,
        use_gradient_checkpointing=True,
        async_gradient_communication=True,
        activation_offloading=True,
        optimizer_sharding=True,
    )
    dataset = [np.arange(32 * 9, dtype=np.int32).reshape(32, 9) % 260]
    result = trainer.train(dataset, epochs=10)
    assert result.step == 10
    assert result.history[-1]["loss"] < result.history[0]["loss"]
    assert trainer.train(dataset=dataset, epochs=1).step == 11


# Costs.


@shows(":TpuCostOptimizer", ":estimate_operation_cost", of="capibara.jax.tpu_v4.cost")
def costs_of_an_operation() -> None:
    from capibara.jax.tpu_v4.cost import TpuCostOptimizer, estimate_operation_cost

    cost_optimizer = TpuCostOptimizer(
        max_cost_per_hour=100.0, cost_model="tpu_v4_pricing", optimization_target="cost_efficiency"
    )
    operation_cost = estimate_operation_cost(
        operation_flops=1e12, memory_gb=16.0, duration_seconds=10.0, tpu_utilization=0.8
    )
    assert f"{operation_cost:.4f}" == "0.0089"  # one v4 chip for ten seconds
    assert cost_optimizer.spent().dollars == 0


@shows(":TpuAutoScaler", ":TpuAutoScaler.managed_scaling", of="capibara.jax.tpu_v4.autoscaling")
def scaling_of_a_trainer() -> None:
    from capibara.jax.tpu_v4.autoscaling import TpuAutoScaler
    from capibara.models import step_hooks

    autoscaler = TpuAutoScaler(
        min_chips=8, max_chips=32, target_utilization=0.8, cost_limit_per_hour=200.0, scaling_policy="cost_aware"
    )
    autoscaler.metrics = lambda: {"utilization": 0.5}  # this library's own: by default the monitor's
    with autoscaler.managed_scaling():
        step_hooks.report(1, None)  # as a trainer does
    assert autoscaler.steps == 1


@shows(":TpuInferenceOptimizer", ":create_inference_pipeline", of="capibara.jax.tpu_v4.inference")
def inference_within_a_latency() -> None:
    import dataclasses

    from capibara.jax.tpu_v4.inference import TpuInferenceOptimizer, create_inference_pipeline
    from capibara.models import ModularCapibaraModel
    from capibara.serve import EngineConfig

    model = ModularCapibaraModel(dataclasses.replace(_tiny_model().config, max_length=2048))
    inference_optimizer = TpuInferenceOptimizer(
        target_latency_ms=50, batch_size_optimizer=True, memory_efficient_attention=True, use_kv_cache=True
    )
    # With a target every size of step is compiled and timed first: of a small pipeline, here.
    small = EngineConfig(max_sequences=1, max_batch_tokens=2, decode_steps=1, page_size=16)
    with create_inference_pipeline(
        model=_tiny_model(), optimizer=inference_optimizer, max_batch_size=1, max_sequence_length=16, config=small
    ) as inference_pipeline:
        assert isinstance(inference_pipeline("a", max_tokens=2), str)
        assert inference_pipeline.latency.target_ms == 50
        assert inference_pipeline.latency.best_ms > 0
    without_target = dataclasses.replace(inference_optimizer, target_latency_ms=None)
    with create_inference_pipeline(
        model=model, optimizer=without_target, max_batch_size=64, max_sequence_length=2048
    ) as inference_pipeline:
        answers = inference_pipeline(["one", "two"], max_tokens=2)
        assert len(answers) == 2
        text = inference_pipeline("one", max_tokens=2, temperature=0)
        assert "".join(inference_pipeline.stream("one", max_tokens=2, temperature=0)) == text


@shows("capibara.models:from_hf", "capibara.models:ModularCapibaraModel.to_hf")
def weights_in_and_out() -> None:
    import tempfile

    from capibara.models import from_hf

    model = _tiny_model()
    with tempfile.TemporaryDirectory() as folder:
        model.to_hf(folder=folder)
        again = from_hf(folder=folder, mesh=None, dtype=None)
    ids = np.arange(8, dtype=np.int32)[None]
    assert np.allclose(model(ids), again(ids), atol=1e-2)  # products in bfloat16


@shows("capibara.cli.train:train", "capibara.cli.generate:generate", "capibara.models:from_checkpoint")
def commands() -> None:
    import contextlib
    import io
    import json
    import tempfile
    from pathlib import Path

    from capibara.cli.generate import generate
    from capibara.cli.train import train
    from capibara.models import from_checkpoint

    # Smaller than the preset, and on a mesh that is named: planning one takes longer than two steps.
    sizes = ["train.steps=2", "train.batch_size=32", "train.sequence_length=16", "train.checkpoint_every=1"]
    settings = [
        *sizes,
        "mesh.data=32",
        "train.eval_batches=1",
        "train.remat=none",
        "train.accumulate=1",
        "model.layers=1",
        "log.elsewhere=",
    ]
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as shown:
        out = Path(folder) / "run"
        train(config="dev", settings=settings, out=out, resume=False, processes=1, json=True)
        assert json.loads(shown.getvalue())["step"] == 2
        assert len((out / "metrics.jsonl").read_text().splitlines()) >= 2
        shown.truncate(shown.seek(0))
        generate(model=str(out), prompt="The ", max_tokens=2, temperature=0.0, seed=1, json=True)
        assert len(json.loads(shown.getvalue())["tokens"]) == 2
        assert from_checkpoint(out).config.layers == 1


@shows("capibara.cli.serve:serve", "capibara.cli.bench:serve")
def serving() -> None:
    import contextlib
    import io
    import json
    import os
    import signal
    import tempfile
    import threading
    import time
    from pathlib import Path

    from capibara.cli import bench
    from capibara.cli.serve import serve

    tiny = """
    [model]
    hidden = 16
    layers = 1
    vocab = 259
    max_length = 64
    blocks = { attention = { heads = 2 }, mlp = { ffn = 32 } }
    """
    shown, failures = io.StringIO(), []

    def client() -> None:
        try:
            deadline = time.monotonic() + 120
            while "}" not in shown.getvalue():
                assert time.monotonic() < deadline, "not ready"
                time.sleep(0.05)
            address = json.loads(shown.getvalue())["address"]
            shown.truncate(shown.seek(0))
            bench.serve(server=address, requests=2, rate=50.0, users=None, api_key="k", json=True)
            assert json.loads(shown.getvalue())["answered"] == 2
        except BaseException as error:  # noqa: BLE001  # raised by whoever waits
            failures.append(error)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(shown):
        model = Path(folder) / "tiny.toml"
        model.write_text(tiny)
        thread = threading.Thread(target=client)
        thread.start()
        # One shape of a step: compiling is what takes time.
        serve(
            model=str(model), host="127.0.0.1", port=0, api_key=["k"], target_latency_ms=50.0,
            max_sequences=2, max_batch_tokens=16,
            batch_invariant=True, warm_up=False, log_level="warning", json=True,
        )  # fmt: skip
        thread.join()
    if failures:
        raise failures[0]


# The kernel object.

KERNELS = "capibara.core.kernels:TPUv4Kernels"


def _kernels() -> Any:
    from capibara.core.kernels import TPUv4Kernels

    return TPUv4Kernels(
        precision="bfloat16", optimization_level="aggressive", enable_xla_fusion=True, memory_layout_optimization=True
    )


@shows(
    "capibara.core", "capibara.core.kernels", KERNELS, "capibara.core.kernels.tpu_v4_wrappers:TPUv4Kernels",
    *(f"{KERNELS}.{name}" for name in ("flash_attention", "get_memory_usage", "get_tflops")),
)  # fmt: skip
def kernel_object() -> None:
    import capibara.core
    import capibara.core.kernels
    from capibara.core.kernels import TPUv4Kernels, tpu_v4_wrappers

    kernels = TPUv4Kernels(
        precision="bfloat16", optimization_level="aggressive", enable_xla_fusion=True, memory_layout_optimization=True
    )
    assert capibara.core.kernels.TPUv4Kernels is tpu_v4_wrappers.TPUv4Kernels
    made = kernels.flash_attention(
        query=HEADS,
        key=HEADS,
        value=HEADS,
        attention_mask=np.ones((1, 32), bool),
        dropout_rate=0.1,
        causal=True,
        sequence_parallel=True,
    )
    assert made.shape == HEADS.shape
    assert kernels.get_memory_usage() >= 0
    assert kernels.get_tflops() > 0


@shows(".optimized_matmul", ".einsum_optimize", ".batch_operations", of=KERNELS)
def kernel_products() -> None:
    kernels = _kernels()
    made = kernels.optimized_matmul(
        a=SQUARE, b=SQUARE, transpose_a=False, transpose_b=True, precision="bfloat16", algorithm="tpu_optimized"
    )
    assert made.shape == (32, 32)
    made = kernels.einsum_optimize(
        equation="bhnd,bhkd->bhnk", operands=[HEADS, HEADS], optimize="optimal", memory_efficient=True
    )
    assert made.shape == (1, 2, 32, 32)
    made = kernels.batch_operations(
        operation_type="layer_norm",
        inputs=[ROWS, SQUARE],
        parameters={"weight": ONES, "bias": ZEROS},
        parallel_execution=True,
    )
    assert [one.shape for one in made] == [ROWS.shape, SQUARE.shape]


@shows(".moe_routing_kernel", ".fast_layer_norm", ".fused_gelu_dropout", of=KERNELS)
def kernel_layers() -> None:
    kernels = _kernels()
    made = kernels.moe_routing_kernel(tokens=ROWS, num_experts=32, top_k=4, load_balancing=True, precision="bfloat16")
    assert made[1].shape == (8, 4)
    made = kernels.fast_layer_norm(input_tensor=ROWS, weight=ONES, bias=ZEROS, eps=1e-5, memory_efficient=True)
    assert made.shape == ROWS.shape
    assert kernels.fused_gelu_dropout(input_tensor=ROWS, dropout_rate=0.1, training=True, inplace=True).shape == (8, 32)


@shows(".benchmark_kernels", of=KERNELS)
def kernel_benchmark() -> None:
    names = ["flash_attention", "optimized_matmul", "einsum_optimize", "fused_gelu_dropout"]
    for figures in _kernels().benchmark_kernels(names).values():
        assert {"throughput", "latency_ms", "memory_efficiency"} <= set(figures)


@shows("", ":VQbitLayer", ":VQbitLayer.__call__", of="capibara.vq.vqbit.vqbit_layer")
def quantizer_layer() -> None:
    import capibara.jax as jax
    import capibara.vq.vqbit.vqbit_layer
    from capibara.vq.vqbit.vqbit_layer import VQbitLayer

    vqbit = VQbitLayer(codebook_size=64, embedding_dim=768, use_jax_native=True, use_tpu_optimizations=True)

    def forward(x: Any) -> Any:
        quantized, _, metrics = vqbit(x)
        return quantized, metrics

    x = normal(1, 4, 768)
    quantized, metrics = jax.jit(forward)(x)
    assert quantized.shape == x.shape
    assert "perplexity" in metrics
    assert capibara.vq.vqbit.vqbit_layer.VQbitLayer is VQbitLayer
    assert vqbit(x=x)[1].shape == (1, 4)


# vishwamai.

TPU = "vishwamai.kernels.tpu"


@shows("", ":flash_attention", ":tpu_kernel", ":gemm", ":layer_norm", *(
    f":PrecisionConfig.{name}" for name in ("DEFAULT", "HIGH", "HIGHEST", "FP8")
), of=TPU)  # fmt: skip
def decorated_kernels() -> None:
    import vishwamai.kernels.tpu
    from vishwamai.kernels.tpu import PrecisionConfig, flash_attention, gemm, layer_norm, tpu_kernel

    @tpu_kernel(use_efficient_attention=True)
    def attend(query: Any, key: Any, value: Any, mask: Any = None) -> Any:
        return flash_attention(query=query, key=key, value=value, mask=mask, block_size=128, use_flash=True)

    @tpu_kernel(precision=PrecisionConfig.HIGH)
    def product(a: Any, b: Any) -> Any:
        return gemm(a=a, b=b, block_size=128, use_bfloat16=True)

    @tpu_kernel
    def norm(x: Any, scale: Any, bias: Any) -> Any:
        return layer_norm(x=x, scale=scale, bias=bias, use_fused_ops=True)

    assert attend(HEADS, HEADS, HEADS).shape == HEADS.shape
    assert attend(HEADS, HEADS, HEADS, np.ones((1, 32), bool)).shape == HEADS.shape
    assert product(SQUARE, SQUARE).shape == (32, 32)
    assert norm(ROWS, ONES, ZEROS).shape == ROWS.shape
    for one in (PrecisionConfig.DEFAULT, PrecisionConfig.HIGHEST, PrecisionConfig.FP8):
        assert one in vishwamai.kernels.tpu.PrecisionConfig


@shows(":sliding_window_attention", ":block_sparse_attention", ":rope", of=TPU)
def attention_patterns() -> None:
    from vishwamai.kernels.tpu import block_sparse_attention, rope, sliding_window_attention

    assert sliding_window_attention(HEADS, HEADS, HEADS, window_size=4).shape == HEADS.shape
    # Blocks of 16, so that 32 positions have some.
    made = block_sparse_attention(HEADS, HEADS, HEADS, block_mask=np.eye(2, dtype=bool), block_size=16)
    assert made.shape == HEADS.shape
    assert rope(HEADS).shape == HEADS.shape


@shows(":glu", ":swiglu", ":geglu", ":expert_layer", ":init_expert_layer", of=TPU)
def gated_and_expert_layers() -> None:
    import jax

    from vishwamai.kernels.tpu import expert_layer, geglu, glu, init_expert_layer, swiglu

    assert glu(gate=ROWS, up=ROWS, use_fused_ops=True).shape == ROWS.shape
    assert swiglu(gate=ROWS, up=ROWS, use_fused_ops=True).shape == ROWS.shape
    assert geglu(gate=ROWS, up=ROWS, use_fused_ops=True).shape == ROWS.shape
    params = init_expert_layer(jax.random.key(0), 32, 16, 4)
    made, _ = expert_layer(params=params, x=ROWS, top_k=2, mesh=None, precision="high")
    assert made.shape == ROWS.shape


@shows(":register_tpu_op", ":tile_layout", ":untile_layout", ":validate_sharding", of=TPU)
def ops_and_layouts() -> None:
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from vishwamai.kernels.tpu import register_tpu_op, tile_layout, unregister, untile_layout, validate_sharding

    @register_tpu_op
    def contract_bare(inputs: Any) -> Any:
        return inputs * 2

    @register_tpu_op(name="contract_named")
    def doubled(inputs: Any) -> Any:
        return inputs * 2

    try:
        assert contract_bare(ROWS).shape == doubled(ROWS).shape == ROWS.shape
    finally:
        unregister("contract_bare")
        unregister("contract_named")
    x = normal(1, 130, 128, 2)
    tiled = tile_layout(x)
    assert tiled.shape == (1, 2, 1, 128, 128, 2)
    assert (untile_layout(tiled, x.shape) == x).all()
    mesh = Mesh(np.asarray(jax.devices()).reshape(4, 8), ["data", "model"])
    spec = PartitionSpec("data", "model")
    placed = jax.device_put(SQUARE, NamedSharding(mesh, spec))
    assert validate_sharding(array=placed, mesh=mesh, spec=spec) is placed


@shows("capibara.cli.launch:launch")
def launches() -> None:
    import contextlib
    import io
    import json
    import os
    import sys
    import tempfile

    from capibara.cli.launch import launch

    train = ["capibara", "train", "llama-7b"]
    with tempfile.TemporaryDirectory() as folder:
        for engine, image in (("sky", None), ("jobset", "image")):
            with contextlib.redirect_stdout(io.StringIO()) as shown:
                out = os.path.join(folder, engine)
                launch(command=train, engine=engine, on="v4-64", image=image, out=out, json=True)
            assert json.loads(shown.getvalue())["processes"] == 8
            assert os.path.getsize(out)
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        launch(command=[sys.executable, "-S", "-c", ""], engine="processes", processes=2, json=True)
    assert json.loads(shown.getvalue())["starts"] == 1
