"""The documented profilers, called as the documents call them."""

from __future__ import annotations

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from capibara.jax.tpu_v4.optimizations import TpuPerformanceProfiler, TpuProfiler

W = jnp.ones((64, 64))


@jax.jit
def model(inputs: jax.Array) -> jax.Array:
    return jnp.tanh(inputs @ W)


@pytest.mark.quick
def test_a_profiler_with_everything(capsys: pytest.CaptureFixture[str]) -> None:
    profiler = TpuPerformanceProfiler(
        capture_memory=True, capture_flops=True, capture_communication=True, capture_kernel_details=True
    )
    inputs = jnp.ones((8, 64))
    with profiler.profile_context("model_forward"):
        result = model(inputs)
    metrics = profiler.get_detailed_metrics()
    print(f"TFLOPS achieved: {metrics['tflops']:.1f}")
    print(f"Peak memory usage: {metrics['peak_memory_gb']:.1f} GB")
    print(f"Memory efficiency: {metrics['memory_efficiency']:.1%}")
    print(f"Compute efficiency: {metrics['compute_efficiency']:.1%}")
    print(f"Communication overhead: {metrics['comm_overhead_ms']:.1f} ms")
    assert "nan" not in capsys.readouterr().out
    assert result.shape == (8, 64)
    assert metrics["total_flops"] == 2 * 8 * 64 * 64 + 8 * 64
    assert metrics["comm_overhead_ms"] == 0
    assert {row["kind"] for row in metrics["kernels"]} >= {"product"}
    assert sum(row["milliseconds"] or 0 for row in metrics["kernels"]) > 0


@pytest.mark.quick
def test_a_profiler_by_default_counts_and_gives_percent() -> None:
    profiler = TpuPerformanceProfiler()
    with profiler.profile_context("forward_pass"):
        model(jnp.ones((8, 64)))
    metrics, detailed = profiler.get_metrics(), profiler.get_detailed_metrics()
    assert f"{metrics['tflops']:.1f} {metrics['memory_efficiency']:.1f}%"
    for name in ("memory_efficiency", "compute_efficiency"):
        assert metrics[name] == pytest.approx(100 * detailed[name])
    assert metrics["tflops"] == detailed["tflops"] > 0
    assert math.isnan(metrics["comm_overhead_ms"])
    assert "kernels" not in metrics


@pytest.mark.quick
def test_what_is_not_captured_is_nan() -> None:
    x = jnp.ones((8, 64))
    everything = {"capture_memory": True, "capture_flops": True, "capture_communication": True}
    named = {
        "capture_memory": ("peak_memory_gb", "memory_efficiency"),
        "capture_flops": ("tflops", "total_flops", "compute_efficiency"),
        "capture_communication": ("comm_overhead_ms",),
    }
    for left_out, figures in named.items():
        profiler = TpuPerformanceProfiler(**{**everything, left_out: False}, capture_kernel_details=True)
        with profiler.profile_context("part"):
            model(x)
        metrics = profiler.get_metrics()
        missing = {name for name, value in metrics.items() if math.isnan(value)}
        assert missing == set(figures)
        assert all(row["milliseconds"] is None or row["milliseconds"] > 0 for row in metrics.get("kernels", []))
    counted = TpuPerformanceProfiler(capture_kernel_details=False)
    with counted.profile_context("counted"):
        model(x)
    assert all(row["milliseconds"] is None for row in counted.get_detailed_metrics()["kernels"])


def test_several_contexts_by_name() -> None:
    profiler = TpuPerformanceProfiler()
    with pytest.raises(ValueError, match="profile_context"):
        profiler.get_metrics()
    for name, times in (("short", 1), ("long", 3)):
        with profiler.profile_context(name):
            for _ in range(times):
                model(jnp.ones((8, 64)))
    assert profiler.get_metrics("short")["runs"] < profiler.get_metrics()["runs"]
    assert profiler.get_metrics() == profiler.get_metrics("long")
    with pytest.raises(ValueError, match="'short', 'long'"):
        profiler.get_metrics("other")


@pytest.mark.quick
def test_a_profiler_that_is_a_context_itself(tmp_path: Path) -> None:
    profiler = TpuProfiler(capture_memory=True, capture_flops=True, capture_communication=True)
    inputs = jnp.ones((8, 64))
    with profiler:
        model(inputs)
    report = profiler.generate_report()
    text = (
        f"Peak memory: {report['peak_memory_gb']:.2f} GB, Total FLOPS: {report['total_flops']:e}, "
        f"Communication overhead: {report['comm_overhead_ms']:.1f} ms"
    )
    assert "nan" not in text
    assert report["table"].splitlines()[0].split()[:2] == ["op", "kind"]
    assert "dot_general" in report["table"]
    assert Path(report["trace_file"]).exists()
    assert Path(report["xplane_file"]).exists()
    kept = TpuProfiler(trace_dir=tmp_path)
    with kept:
        model(inputs)
    assert Path(kept.generate_report()["trace_file"]).is_relative_to(tmp_path)
    counting = TpuProfiler(capture_memory=False, capture_flops=False, capture_communication=False)
    with pytest.raises(ValueError, match="inside of one"):
        counting.generate_report()
    with counting:
        model(inputs)
    report = counting.generate_report()
    assert all(math.isnan(report[name]) for name in ("peak_memory_gb", "total_flops", "comm_overhead_ms"))
    assert report["trace_file"] is None


def test_nested_the_inner_one_keeps_what_it_had() -> None:
    outer, inner = TpuProfiler(capture_communication=False), TpuProfiler(capture_communication=False)
    with inner:
        model(jnp.ones((8, 64)))
    before = inner.generate_report()["runs"]
    with outer, pytest.warns(RuntimeWarning, match="do not nest"), inner:
        model(jnp.ones((8, 64)))
    assert inner.generate_report()["runs"] == before
    assert outer.generate_report()["runs"] >= 1


def test_a_name_a_step_does_not_fill_the_memory() -> None:
    profiler = TpuPerformanceProfiler()
    for step in range(70):
        with profiler.profile_context(f"step {step}"):
            pass
    assert list(profiler.profiles) == [f"step {step}" for step in range(6, 70)]
    with profiler.profile_context("step 6"):
        pass
    assert list(profiler.profiles)[-1] == "step 6"
