"""The scan family: recurrences along time, in parallel where their step allows it."""

from capibara.kernels.ops.scan.parallel.api import explain_scan, parallel_scan
from capibara.kernels.ops.scan.parallel.plan import ScanPlan
from capibara.kernels.ops.scan.recurrence.api import LINEAR_RECURRENCE, LINEAR_RECURRENCE_GRAD, linear_recurrence
from capibara.kernels.ops.scan.selective.api import (
    SELECTIVE_SCAN,
    SELECTIVE_SCAN_GRAD,
    selective_scan,
    selective_step,
)
from capibara.kernels.ops.scan.sequence import sequence_parallel_recurrence
from capibara.kernels.ops.scan.spiking import lif_neurons, spike
from capibara.kernels.ops.scan.ssd.api import SSD, SSD_GRAD, state_space_dual, state_space_dual_step
from capibara.kernels.ops.scan.ssd.channel_decay import GATED_LINEAR_ATTENTION
from capibara.kernels.ops.scan.ssd.linear_attention import gated_linear_attention

__all__ = [
    "GATED_LINEAR_ATTENTION",
    "LINEAR_RECURRENCE",
    "LINEAR_RECURRENCE_GRAD",
    "SELECTIVE_SCAN",
    "SELECTIVE_SCAN_GRAD",
    "SSD",
    "SSD_GRAD",
    "ScanPlan",
    "explain_scan",
    "gated_linear_attention",
    "lif_neurons",
    "linear_recurrence",
    "parallel_scan",
    "selective_scan",
    "selective_step",
    "sequence_parallel_recurrence",
    "spike",
    "state_space_dual",
    "state_space_dual_step",
]
