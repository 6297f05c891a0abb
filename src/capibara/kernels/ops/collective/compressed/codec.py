"""encode_int8 and decode_int8: the public functions, and the two ops behind them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int8

from capibara.errors import rule_error
from capibara.kernels.core.dispatch import run
from capibara.kernels.core.op import Op, register
from capibara.kernels.core.operands import as_array, as_dtype
from capibara.kernels.core.spec import Implementation
from capibara.kernels.ops.collective.compressed import rules, tpu
from capibara.kernels.ops.collective.compressed.cases import CASES, DECODE_CASES
from capibara.kernels.ops.collective.compressed.reference import NOT_FINITE, decode, encode
from capibara.kernels.ops.collective.compressed.rules import check_block

ENCODE_INT8 = Op(
    "encode_int8",
    family="collective",
    reference=encode,
    operands=("x", "seed"),
    params={"block": 256},
    check=rules.check_encode,
    cost=rules.cost,
    tolerance=rules.tolerance_encode,
    batch=rules.batch,
    partition=rules.PARTITION_ENCODE,
    cases=CASES,
)
DECODE_INT8 = Op(
    "decode_int8",
    family="collective",
    reference=decode,
    operands=("codes", "scales"),
    params={"block": 256, "out_dtype": "float32"},
    check=rules.check_decode,
    cost=rules.cost,
    tolerance=rules.tolerance_decode,
    batch=rules.batch,
    partition=rules.PARTITION_DECODE,
    cases=DECODE_CASES,
)

# The specification is elementwise around one small reduction: XLA makes a single pass of it, and of what is done with
# the numbers before and after.
ENCODE_INT8.implement(Implementation("xla", encode), tpu.ENCODE)
DECODE_INT8.implement(Implementation("xla", decode), tpu.DECODE)


class Encoded(NamedTuple):
    """Numbers as int8 codes, and one float32 scale a block."""

    codes: Int8[Array, "*rows n"]
    scales: Float[Array, "*rows blocks"]

    @property
    def non_finite(self) -> jax.Array:
        """How many of the numbers were NaN or infinite; they are decoded as NaN."""
        return (self.codes == NOT_FINITE).sum(dtype=jnp.int32)


def encode_int8(
    x: Float[Array, "*rows n"],
    *,
    block_size: int = 256,
    key: Any = None,
    implementation: str | None = None,
    config: Any = None,
) -> Encoded:
    """Numbers as whole multiples, -127 to 127, of a step that each block of `block_size` values has for itself.

    The step is the block's largest magnitude over 127 (2^-126 at least: subnormal numbers count as zeros). What
    `decode_int8` gives back is off by at most half a step, with `key` by less than a step, and in both cases
    by another 2^-15 of a step for float32 arithmetic. Zeros are exact. A NaN or an infinity is decoded as NaN in its
    place, and does not touch the others of its block.

    Args:
      x: bfloat16, float16 or float32. Blocks are cut along the last axis; the last may be shorter.
      block_size: values that share a scale. 256 cost 1.6 % more bytes than the codes alone.
      key: a JAX key. Rounding is then at random, and right on average.
      implementation: force one by name ("xla", "pallas_tpu"); a refusal is an error.
      config: that implementation's tuning choices.

    >>> made = encode_int8(jnp.array([1.0, -0.5, 0.0, jnp.nan]))
    >>> made.codes.tolist(), made.scales.shape, int(made.non_finite)
    ([127, -64, 0, -128], (1,), 1)
    >>> [round(number, 3) for number in decode_int8(*made).tolist()]
    [1.0, -0.504, 0.0, nan]
    """
    x = as_array("encode_int8", "x", x)
    check_block(block_size)
    params = {"block": block_size} if block_size != 256 else {}
    seed = None if key is None else seed_of(key)
    return Encoded(*run(ENCODE_INT8, (x, seed), params, implementation=implementation, config=config))


def decode_int8(
    codes: Int8[Array, "*rows n"],
    scales: Float[Array, "*rows blocks"],
    *,
    block_size: int = 256,
    out_dtype: Any = "float32",
    implementation: str | None = None,
    config: Any = None,
) -> Float[Array, "*rows n"]:
    """The numbers that `encode_int8` made codes of, with the same `block_size`.

    >>> decode_int8(*encode_int8(jnp.array([254.0, 1.0])), out_dtype="bfloat16").tolist()
    [254.0, 0.0]
    """
    codes, scales = as_array("decode_int8", "codes", codes), as_array("decode_int8", "scales", scales)
    check_block(block_size)
    params: dict[str, Any] = {"block": block_size} if block_size != 256 else {}
    dtype = as_dtype("out_dtype", out_dtype).name
    if dtype != "float32":
        params["out_dtype"] = dtype
    return run(DECODE_INT8, (codes, scales), params, implementation=implementation, config=config)


def seed_of(key: Any) -> jax.Array:
    """Two words from a JAX key."""
    try:
        return jax.random.bits(key, (2,), jnp.uint32)
    except (TypeError, ValueError) as error:  # no key, or an array of them
        raise rule_error("key is one JAX key", repr(key), "pass jax.random.key(...)") from error


ENCODE_INT8.public = encode_int8
DECODE_INT8.public = decode_int8
register(ENCODE_INT8)
register(DECODE_INT8)
