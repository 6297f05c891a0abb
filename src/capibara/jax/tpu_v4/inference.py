"""The documented inference names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara._exports import exports

if TYPE_CHECKING:
    from capibara.serve.latency import LatencyReport as LatencyReport
    from capibara.serve.latency import TpuInferenceOptimizer as TpuInferenceOptimizer
    from capibara.serve.pipeline import InferencePipeline as InferencePipeline
    from capibara.serve.pipeline import create_inference_pipeline as create_inference_pipeline

__all__, __getattr__, __dir__ = exports(
    __name__,
    {
        "capibara.serve.latency": "LatencyReport TpuInferenceOptimizer",
        "capibara.serve.pipeline": "InferencePipeline create_inference_pipeline",
    },
)
