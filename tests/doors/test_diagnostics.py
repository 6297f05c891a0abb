"""capibara.jax.tpu_v4.diagnostics, called as the documents write it."""

from __future__ import annotations

import jax
import pytest


def test_diagnosis_as_the_document_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    from capibara.jax.tpu_v4.diagnostics import TpuDiagnostics

    diagnostics = TpuDiagnostics()
    health_report = diagnostics.run_full_health_check()
    print(f"All chips online: {health_report['all_chips_online']}")
    print(f"Temperature normal: {health_report['temperature_normal']}")
    print(f"Memory healthy: {health_report['memory_healthy']}")
    print(f"Interconnect OK: {health_report['interconnect_ok']}")
    said = capsys.readouterr().out
    assert "All chips online: True" in said
    assert "Memory healthy: True" in said
    assert "Interconnect OK: True" in said
    assert len(health_report.details["devices"]) == len(health_report.details["links"]) == len(jax.devices())

    perf_analysis = diagnostics.analyze_performance_bottlenecks()
    if perf_analysis.has_bottlenecks:
        for bottleneck in perf_analysis.bottlenecks:
            print(f"   - {bottleneck.description}")
            print(f"     Suggestion: {bottleneck.suggestion}")


@pytest.mark.quick
def test_bottlenecks_are_those_of_the_function() -> None:
    from capibara.jax.tpu_v4.diagnostics import TpuDiagnostics

    x = jax.numpy.ones((64, 64))
    found = TpuDiagnostics().analyze_performance_bottlenecks(
        lambda: [jax.jit(lambda y, n=n: y * n)(x) for n in range(6)]
    )
    assert found.has_bottlenecks
    [recompiled] = [one for one in found.bottlenecks if one.kind == "recompilation"]
    assert recompiled.description
    assert recompiled.suggestion
    assert recompiled.evidence["compilations"]
