"""The layers family: what stands between the products of a model."""

from capibara.kernels.ops.layers.activation.api import (
    ACTIVATION,
    ACTIVATION_GRAD,
    activation,
    dropout,
    gated_activation,
    geglu,
    gelu,
    glu,
    silu,
    swiglu,
)
from capibara.kernels.ops.layers.between_attentions.api import BETWEEN_ATTENTIONS, between_attentions
from capibara.kernels.ops.layers.cross_entropy.api import CROSS_ENTROPY, CROSS_ENTROPY_GRAD, cross_entropy
from capibara.kernels.ops.layers.few_rows.api import FEW_ROWS, few_rows
from capibara.kernels.ops.layers.gated_fp8.api import GATED_FP8, GATED_FP8_GRAD
from capibara.kernels.ops.layers.gated_mlp.api import GATED_PRODUCTS, GATED_PRODUCTS_GRAD, gated_mlp
from capibara.kernels.ops.layers.grouped.api import (
    GROUPED_GATED_GEMM,
    GROUPED_GEMM,
    GROUPED_GEMM_WEIGHTS,
    grouped_gated_gemm,
    grouped_gemm,
)
from capibara.kernels.ops.layers.moe.dispatch import Buffered, Dispatched, combine, dispatch, dispatch_to_buffers
from capibara.kernels.ops.layers.moe.expert_parallel import exchange_through_experts, expert_parallel_moe
from capibara.kernels.ops.layers.moe.layer import MoeMetrics, init_moe, moe_layer
from capibara.kernels.ops.layers.norm.api import NORM, NORM_GRAD, layer_norm, rms_norm
from capibara.kernels.ops.layers.router.api import ROUTE, Routing, route
from capibara.kernels.ops.layers.router.losses import expert_counts, load_balancing_loss, update_bias, z_loss
from capibara.kernels.ops.layers.summed_row.api import SUMMED_ROW, summed_row

__all__ = [
    "ACTIVATION",
    "ACTIVATION_GRAD",
    "BETWEEN_ATTENTIONS",
    "CROSS_ENTROPY",
    "CROSS_ENTROPY_GRAD",
    "FEW_ROWS",
    "GATED_FP8",
    "GATED_FP8_GRAD",
    "GATED_PRODUCTS",
    "GATED_PRODUCTS_GRAD",
    "GROUPED_GATED_GEMM",
    "GROUPED_GEMM",
    "GROUPED_GEMM_WEIGHTS",
    "NORM",
    "NORM_GRAD",
    "ROUTE",
    "SUMMED_ROW",
    "Buffered",
    "Dispatched",
    "MoeMetrics",
    "Routing",
    "activation",
    "between_attentions",
    "combine",
    "cross_entropy",
    "dispatch",
    "dispatch_to_buffers",
    "dropout",
    "exchange_through_experts",
    "expert_counts",
    "expert_parallel_moe",
    "few_rows",
    "gated_activation",
    "gated_mlp",
    "geglu",
    "gelu",
    "glu",
    "grouped_gated_gemm",
    "grouped_gemm",
    "init_moe",
    "layer_norm",
    "load_balancing_loss",
    "moe_layer",
    "rms_norm",
    "route",
    "silu",
    "summed_row",
    "swiglu",
    "update_bias",
    "z_loss",
]
