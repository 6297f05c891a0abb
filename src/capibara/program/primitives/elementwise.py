"""Primitives that work on each element alone, and what one element costs on the vector units."""

from __future__ import annotations

__all__ = ["FLOPS", "LINEAR"]

# Counted as vector instructions. A function that the chip evaluates in several steps (range reduction, polynomial,
# correction) counts its usual number of them; what only moves or makes bits counts nothing.
_FREE = """
    broadcast convert_element_type copy copy_p stop_gradient bitcast_convert_type reduce_precision real imag
    complex optimization_barrier pvary pcast mark_varying device_put layout_constraint
    name checkpoint_name real_copy reshard mesh_cast to_edtype from_edtype with_memory_space_constraint tie
    broadcast_to reduced_vary_cast vary_unreduced_cast pin unpin
"""
_ONE = """
    add sub mul neg max min abs sign and or xor not eq ne lt le gt ge select_n clamp floor ceil round is_finite square
    add_any shift_left shift_right_logical shift_right_arithmetic conj eq_to le_to lt_to population_count clz nextafter
    copysign mulhi
"""
_SOME = {
    "div": 4, "rem": 6, "sqrt": 4, "rsqrt": 4, "cbrt": 12, "integer_pow": 2, "one_minus_square": 2,
    "polynomial": 12, "exp": 6, "exp2": 5, "expm1": 8, "log": 8, "log2": 8, "log1p": 9, "logistic": 9, "tanh": 10,
    "erf": 12, "erfc": 14, "erf_inv": 20, "pow": 16, "sin": 14, "cos": 14, "tan": 18, "sinh": 14, "cosh": 14,
    "asin": 18, "acos": 18, "atan": 16, "atan2": 18, "asinh": 18, "acosh": 18, "atanh": 18, "lgamma": 40,
    "digamma": 40, "polygamma": 60, "igamma": 120, "igammac": 120, "igamma_grad_a": 160, "random_gamma_grad": 160,
    "zeta": 80, "bessel_i0e": 24, "bessel_i1e": 24, "regularized_incomplete_beta": 160, "threefry2x32": 110,
    "threefry4x32": 220, "philox2x32": 60, "philox4x32": 120, "random_gamma": 300,
}  # fmt: skip

FLOPS: dict[str, int] = {**dict.fromkeys(_FREE.split(), 0), **dict.fromkeys(_ONE.split(), 1), **_SOME}

LINEAR = frozenset(["add", "sub", "add_any", "neg", "copy"])
"""With every operand a partial sum over the same chips, the result is one: the exchange can wait. A conversion is
linear too, but the compiler exchanges what a product made, in its own type."""
