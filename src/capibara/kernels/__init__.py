"""Accelerator kernels: ops with a specification, implementations that say why not, and one dispatch loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara._exports import exports

if TYPE_CHECKING:
    from capibara.kernels.core.context import Interpret as Interpret
    from capibara.kernels.core.context import Target as Target
    from capibara.kernels.core.context import current_interpret as current_interpret
    from capibara.kernels.core.context import current_target as current_target
    from capibara.kernels.core.context import interpret as interpret
    from capibara.kernels.core.context import target as target
    from capibara.kernels.core.explanation import explain as explain
    from capibara.kernels.core.op import Op as Op
    from capibara.kernels.core.op import lookup as lookup
    from capibara.kernels.core.op import register as register
    from capibara.kernels.core.op import registry as registry
    from capibara.kernels.core.op import unregister as unregister
    from capibara.kernels.core.spec import Call as Call
    from capibara.kernels.core.spec import Case as Case
    from capibara.kernels.core.spec import Cost as Cost
    from capibara.kernels.core.spec import Gradient as Gradient
    from capibara.kernels.core.spec import Implementation as Implementation
    from capibara.kernels.core.spec import Partition as Partition
    from capibara.kernels.core.trusting import trust as trust
    from capibara.kernels.core.varying import out_struct as out_struct
    from capibara.kernels.lab.tune import tune as tune
    from capibara.kernels.ops.attention.api import attention as attention
    from capibara.kernels.ops.attention.block_mask import BlockMask as BlockMask
    from capibara.kernels.ops.attention.block_mask import block_mask_from as block_mask_from
    from capibara.kernels.ops.attention.paged.api import paged_attention as paged_attention
    from capibara.kernels.ops.attention.paged_write.api import paged_write as paged_write
    from capibara.kernels.ops.attention.rope import Rope as Rope
    from capibara.kernels.ops.attention.rope import rope as rope
    from capibara.kernels.ops.attention.rope import rope_tables as rope_tables
    from capibara.kernels.ops.attention.sequence import ring_load as ring_load
    from capibara.kernels.ops.attention.sequence import sequence_parallel_attention as sequence_parallel_attention
    from capibara.kernels.ops.attention.sequence import unzigzag as unzigzag
    from capibara.kernels.ops.attention.sequence import zigzag as zigzag
    from capibara.kernels.ops.collective import all_gather as all_gather
    from capibara.kernels.ops.collective import all_gather_matmul as all_gather_matmul
    from capibara.kernels.ops.collective import all_reduce as all_reduce
    from capibara.kernels.ops.collective import all_reduce_tree as all_reduce_tree
    from capibara.kernels.ops.collective import all_to_all as all_to_all
    from capibara.kernels.ops.collective import bucketed as bucketed
    from capibara.kernels.ops.collective import bucketed_all_reduce as bucketed_all_reduce
    from capibara.kernels.ops.collective import compressed_all_reduce as compressed_all_reduce
    from capibara.kernels.ops.collective import decode_int8 as decode_int8
    from capibara.kernels.ops.collective import encode_int8 as encode_int8
    from capibara.kernels.ops.collective import error_bound as error_bound
    from capibara.kernels.ops.collective import feedback_state as feedback_state
    from capibara.kernels.ops.collective import hierarchical_all_reduce as hierarchical_all_reduce
    from capibara.kernels.ops.collective import matmul_reduce_scatter as matmul_reduce_scatter
    from capibara.kernels.ops.collective import permute as permute
    from capibara.kernels.ops.collective import redistribute as redistribute
    from capibara.kernels.ops.collective import reduce_scatter as reduce_scatter
    from capibara.kernels.ops.collective import ring_all_gather as ring_all_gather
    from capibara.kernels.ops.collective import ring_all_reduce as ring_all_reduce
    from capibara.kernels.ops.collective import ring_reduce_scatter as ring_reduce_scatter
    from capibara.kernels.ops.conv.causal1d.api import causal_conv1d as causal_conv1d
    from capibara.kernels.ops.conv.causal1d.api import causal_conv1d_step as causal_conv1d_step
    from capibara.kernels.ops.conv.conv2d.api import conv2d as conv2d
    from capibara.kernels.ops.conv.conv2d.api import winograd_conv2d as winograd_conv2d
    from capibara.kernels.ops.conv.conv2d.points import direct_error_bound as direct_error_bound
    from capibara.kernels.ops.conv.conv2d.points import winograd_error_bound as winograd_error_bound
    from capibara.kernels.ops.conv.long.api import long_conv as long_conv
    from capibara.kernels.ops.fft import fft as fft
    from capibara.kernels.ops.fft import fft2 as fft2
    from capibara.kernels.ops.fft import fft_convolve as fft_convolve
    from capibara.kernels.ops.fft import fft_planes as fft_planes
    from capibara.kernels.ops.fft import fftn as fftn
    from capibara.kernels.ops.fft import ifft as ifft
    from capibara.kernels.ops.fft import ifft2 as ifft2
    from capibara.kernels.ops.fft import ifftn as ifftn
    from capibara.kernels.ops.fft import irfft as irfft
    from capibara.kernels.ops.fft import irfft2 as irfft2
    from capibara.kernels.ops.fft import radix_fft as radix_fft
    from capibara.kernels.ops.fft import rfft as rfft
    from capibara.kernels.ops.fft import rfft2 as rfft2
    from capibara.kernels.ops.fft import sharded_fft as sharded_fft
    from capibara.kernels.ops.layers.activation.api import activation as activation
    from capibara.kernels.ops.layers.activation.api import dropout as dropout
    from capibara.kernels.ops.layers.activation.api import gated_activation as gated_activation
    from capibara.kernels.ops.layers.activation.api import geglu as geglu
    from capibara.kernels.ops.layers.activation.api import gelu as gelu
    from capibara.kernels.ops.layers.activation.api import glu as glu
    from capibara.kernels.ops.layers.activation.api import silu as silu
    from capibara.kernels.ops.layers.activation.api import swiglu as swiglu
    from capibara.kernels.ops.layers.between_attentions.api import between_attentions as between_attentions
    from capibara.kernels.ops.layers.cross_entropy.api import cross_entropy as cross_entropy
    from capibara.kernels.ops.layers.few_rows.api import few_rows as few_rows
    from capibara.kernels.ops.layers.gated_mlp.api import gated_mlp as gated_mlp
    from capibara.kernels.ops.layers.grouped.api import grouped_gated_gemm as grouped_gated_gemm
    from capibara.kernels.ops.layers.grouped.api import grouped_gemm as grouped_gemm
    from capibara.kernels.ops.layers.moe.expert_parallel import expert_parallel_moe as expert_parallel_moe
    from capibara.kernels.ops.layers.moe.layer import MoeMetrics as MoeMetrics
    from capibara.kernels.ops.layers.moe.layer import init_moe as init_moe
    from capibara.kernels.ops.layers.moe.layer import moe_layer as moe_layer
    from capibara.kernels.ops.layers.norm.api import layer_norm as layer_norm
    from capibara.kernels.ops.layers.norm.api import rms_norm as rms_norm
    from capibara.kernels.ops.layers.router.api import Routing as Routing
    from capibara.kernels.ops.layers.router.api import route as route
    from capibara.kernels.ops.layers.router.losses import expert_counts as expert_counts
    from capibara.kernels.ops.layers.router.losses import load_balancing_loss as load_balancing_loss
    from capibara.kernels.ops.layers.router.losses import update_bias as update_bias
    from capibara.kernels.ops.layers.router.losses import z_loss as z_loss
    from capibara.kernels.ops.layers.summed_row.api import summed_row as summed_row
    from capibara.kernels.ops.linalg.einsum import contract as contract
    from capibara.kernels.ops.linalg.einsum import path_report as path_report
    from capibara.kernels.ops.linalg.fp8 import fp8_products as fp8_products
    from capibara.kernels.ops.linalg.gemm.api import gemm as gemm
    from capibara.kernels.ops.linalg.svd.api import fast_svd as fast_svd
    from capibara.kernels.ops.linalg.svd.api import svd_plan as svd_plan
    from capibara.kernels.ops.scan import ScanPlan as ScanPlan
    from capibara.kernels.ops.scan import explain_scan as explain_scan
    from capibara.kernels.ops.scan import gated_linear_attention as gated_linear_attention
    from capibara.kernels.ops.scan import lif_neurons as lif_neurons
    from capibara.kernels.ops.scan import linear_recurrence as linear_recurrence
    from capibara.kernels.ops.scan import parallel_scan as parallel_scan
    from capibara.kernels.ops.scan import selective_scan as selective_scan
    from capibara.kernels.ops.scan import selective_step as selective_step
    from capibara.kernels.ops.scan import sequence_parallel_recurrence as sequence_parallel_recurrence
    from capibara.kernels.ops.scan import spike as spike
    from capibara.kernels.ops.scan import state_space_dual as state_space_dual
    from capibara.kernels.ops.scan import state_space_dual_step as state_space_dual_step
    from capibara.kernels.ops.vq.nearest.api import nearest_code as nearest_code
    from capibara.kernels.ops.vq.quantize import look_up as look_up
    from capibara.kernels.ops.vq.quantize import product_vq as product_vq
    from capibara.kernels.ops.vq.quantize import quantize as quantize
    from capibara.kernels.ops.vq.quantize import residual_vq as residual_vq
    from capibara.kernels.ops.vq.quantize import straight_through as straight_through

__all__, __getattr__, __dir__ = exports(
    __name__,
    {
        "core.context": "Interpret Target current_interpret current_target interpret target",
        "core.trusting": "trust",
        "core.explanation": "explain",
        "core.op": "Op lookup register registry unregister",
        "core.spec": "Call Case Cost Gradient Implementation Partition",
        "core.varying": "out_struct",
        "lab.tune": "tune",
        "ops.attention.api": "attention",
        "ops.attention.block_mask": "BlockMask block_mask_from",
        "ops.attention.paged.api": "paged_attention",
        "ops.attention.paged_write.api": "paged_write",
        "ops.attention.rope": "Rope rope rope_tables",
        "ops.attention.sequence": "ring_load sequence_parallel_attention unzigzag zigzag",
        "ops.collective": (
            "all_gather all_gather_matmul all_reduce all_reduce_tree all_to_all bucketed bucketed_all_reduce "
            "compressed_all_reduce decode_int8 encode_int8 error_bound feedback_state hierarchical_all_reduce "
            "matmul_reduce_scatter permute redistribute reduce_scatter ring_all_gather ring_all_reduce "
            "ring_reduce_scatter"
        ),
        "ops.conv.causal1d.api": "causal_conv1d causal_conv1d_step",
        "ops.conv.conv2d.api": "conv2d winograd_conv2d",
        "ops.conv.conv2d.points": "direct_error_bound winograd_error_bound",
        "ops.conv.long.api": "long_conv",
        "ops.fft": (
            "fft fft2 fft_convolve fft_planes fftn ifft ifft2 ifftn irfft irfft2 radix_fft rfft rfft2 sharded_fft"
        ),
        "ops.layers.activation.api": "activation dropout gated_activation geglu gelu glu silu swiglu",
        "ops.layers.between_attentions.api": "between_attentions",
        "ops.layers.cross_entropy.api": "cross_entropy",
        "ops.layers.few_rows.api": "few_rows",
        "ops.layers.gated_mlp.api": "gated_mlp",
        "ops.layers.grouped.api": "grouped_gated_gemm grouped_gemm",
        "ops.layers.moe.expert_parallel": "expert_parallel_moe",
        "ops.layers.moe.layer": "MoeMetrics init_moe moe_layer",
        "ops.layers.norm.api": "layer_norm rms_norm",
        "ops.layers.router.api": "Routing route",
        "ops.layers.router.losses": "expert_counts load_balancing_loss update_bias z_loss",
        "ops.layers.summed_row.api": "summed_row",
        "ops.linalg.einsum": "contract path_report",
        "ops.linalg.gemm.api": "gemm",
        "ops.linalg.fp8": "fp8_products",
        "ops.linalg.svd.api": "fast_svd svd_plan",
        "ops.scan": (
            "ScanPlan explain_scan gated_linear_attention lif_neurons linear_recurrence parallel_scan "
            "selective_scan selective_step sequence_parallel_recurrence spike state_space_dual "
            "state_space_dual_step"
        ),
        "ops.vq.nearest.api": "nearest_code",
        "ops.vq.quantize": "look_up product_vq quantize residual_vq straight_through",
    },
)
