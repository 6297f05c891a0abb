"""The documented calls of costs and autoscaling, with the documents' own keywords and values."""

from __future__ import annotations

import pytest


@pytest.mark.quick
def test_costs_as_the_document_has_them() -> None:
    from capibara.jax.tpu_v4.cost import TpuCostOptimizer, estimate_operation_cost

    cost_optimizer = TpuCostOptimizer(
        max_cost_per_hour=100.0, cost_model="tpu_v4_pricing", optimization_target="cost_efficiency"
    )
    operation_cost = estimate_operation_cost(
        operation_flops=1e12, memory_gb=16.0, duration_seconds=10.0, tpu_utilization=0.8
    )
    assert f"${operation_cost:.4f}" == "$0.0089"
    assert cost_optimizer.spent().dollars == 0


@pytest.mark.quick
def test_scaling_as_the_document_has_it(nothing_said_yet: None) -> None:
    import jax

    from capibara.jax.tpu_v4.autoscaling import TpuAutoScaler
    from capibara.models import step_hooks

    autoscaler = TpuAutoScaler(
        min_chips=8, max_chips=32, target_utilization=0.8, cost_limit_per_hour=200.0, scaling_policy="cost_aware"
    )
    autoscaler.metrics = lambda: {"utilization": 0.1}

    class Trainer:
        """As the loop of a trainer asks: after each step, for where the next one runs."""

        devices = jax.devices()

        def train(self, dataset: list[int], epochs: int) -> None:
            for step in range(epochs * len(dataset)):
                step_hooks.report(step + 1, None)
                self.devices = step_hooks.devices_wanted(self.devices) or self.devices

    trainer = Trainer()
    with autoscaler.managed_scaling():
        trainer.train([1, 2], epochs=10)
    assert autoscaler.steps == 20
    assert len(trainer.devices) == 8  # of 32 that are used by a tenth
    assert [(one.before, one.after) for one in autoscaler.changes] == [(32, 8)]
