"""Collectives that send int8 codes instead of floats, with feedback of what the codes leave out."""

from capibara.kernels.ops.collective.compressed.all_reduce import Metrics, compressed_all_reduce
from capibara.kernels.ops.collective.compressed.codec import (
    DECODE_INT8,
    ENCODE_INT8,
    Encoded,
    decode_int8,
    encode_int8,
)
from capibara.kernels.ops.collective.compressed.feedback import error_bound, feedback_state, redistribute

__all__ = [
    "DECODE_INT8",
    "ENCODE_INT8",
    "Encoded",
    "Metrics",
    "compressed_all_reduce",
    "decode_int8",
    "encode_int8",
    "error_bound",
    "feedback_state",
    "redistribute",
]
