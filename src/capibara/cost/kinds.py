"""Which primitives a compiler treats alike when it merges them."""

from __future__ import annotations

__all__ = ["CHEAP", "COMPARED", "DEAR", "FREE", "IN_PLACE", "MATRIX", "REDUCES", "SLICES", "VIEW"]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


VIEW = _words(
    """reshape squeeze expand_dims transpose logical_axes sharding_constraint stop_gradient optimization_barrier
    bitcast_convert_type reduce_precision copy pvary mesh_cast reshard name cond"""
)
"""The same bytes seen otherwise: layout assignment absorbs transposes."""
FREE = _words("broadcast_in_dim iota convert_element_type rng_bit_generator random_wrap random_unwrap")
"""Computed again wherever they are read."""
CHEAP = _words(
    """add add_any sub mul neg max min select_n eq ne lt le gt ge and or not xor abs sign floor ceil round clamp
    is_finite square integer_pow shift_left shift_right_logical shift_right_arithmetic nextafter real imag
    population_count conj complex div one_minus_square"""
)
DEAR = _words(
    """exp exp2 log log1p expm1 tanh logistic rem sqrt rsqrt cbrt pow sin cos tan asin acos atan atan2 sinh cosh
    asinh acosh atanh erf erfc erf_inv lgamma digamma threefry2x32 random_bits"""
)
"""Elementwise, but not worth computing twice."""
SLICES = _words("slice dynamic_slice gather rev pad concatenate split")
"""They read no more of their operand than they write."""
REDUCES = _words("reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin reduce")
MATRIX = _words("dot_general conv_general_dilated ragged_dot ragged_dot_general")
IN_PLACE = _words("dynamic_update_slice scatter scatter-add scatter_add scatter_mul scatter_min scatter_max")
"""The result takes over the first operand's memory."""
COMPARED = VIEW | FREE | CHEAP | DEAR | SLICES | REDUCES | IN_PLACE | {"dot_general"}
"""Of which programs had much that were compared with the TPU compiler's bytes: the others' memory was never checked."""
