"""Serving: an engine that batches requests continuously over a paged cache.

Names load when they are first used: importing this package does not import jax.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara._exports import exports

if TYPE_CHECKING:
    from capibara.serve.adapters import LoraAdapter as LoraAdapter
    from capibara.serve.config import EngineConfig as EngineConfig
    from capibara.serve.engine import Engine as Engine
    from capibara.serve.engine import EngineStats as EngineStats
    from capibara.serve.latency import LatencyReport as LatencyReport
    from capibara.serve.latency import TpuInferenceOptimizer as TpuInferenceOptimizer
    from capibara.serve.pipeline import InferencePipeline as InferencePipeline
    from capibara.serve.pipeline import create_inference_pipeline as create_inference_pipeline
    from capibara.serve.request import QueueFull as QueueFull
    from capibara.serve.request import Request as Request
    from capibara.serve.request import RequestOutput as RequestOutput
    from capibara.serve.request import SamplingParams as SamplingParams
    from capibara.serve.request import TokenLogprobs as TokenLogprobs
    from capibara.serve.request import Usage as Usage

__all__, __getattr__, __dir__ = exports(
    __name__,
    {
        "adapters": "LoraAdapter",
        "config": "EngineConfig",
        "engine": "Engine EngineStats",
        "latency": "LatencyReport TpuInferenceOptimizer",
        "pipeline": "InferencePipeline create_inference_pipeline",
        "request": "QueueFull Request RequestOutput SamplingParams TokenLogprobs Usage",
    },
)
