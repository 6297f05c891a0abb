"""Which matrix products make a transform: its radices, or a longer length where a prime is too large.

A length whose prime factors are at most 128 is split into radices of at most 128, few and of like size, since a
matrix unit multiplies 128 columns as fast as two. Any other length is a convolution with a chirp (Bluestein), done by
transforms of a smooth length.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Sequence

from capibara.errors import rule_error

LARGEST_RADIX = 128
# Odd parts of the lengths that transforms are padded to: steps of at most a third, and radices that stay even.
ODD_PARTS = (1, 3, 5, 9, 15)


@dataclasses.dataclass(frozen=True)
class Plan:
    """A transform of `length`: the radices that make it, or, with `padded`, that make the longer length it goes by."""

    length: int
    factors: tuple[int, ...]
    padded: int | None = None

    @property
    def products(self) -> int:
        """How many matrix products the data goes through."""
        return len(self.factors) * (1 if self.padded is None else 2)


@functools.lru_cache(maxsize=4096)
def _radices(n: int) -> tuple[int, ...] | None:
    """The fewest radices that make n, then those with the smallest sum; None where a prime is too large."""
    if n <= LARGEST_RADIX:
        return (n,)
    found: tuple[int, ...] | None = None
    for first in range(LARGEST_RADIX, 1, -1):
        rest = _radices(n // first) if n % first == 0 else None
        if rest is not None:
            made = tuple(sorted((first, *rest), reverse=True))
            if found is None or (len(made), sum(made)) < (len(found), sum(found)):
                found = made
    return found


def smooth_length(least: int) -> int:
    """The shortest convenient length that is at least `least`: a power of two, or one times 3, 5, 9 or 15.

    >>> smooth_length(1000), smooth_length(32767), smooth_length(1100)
    (1024, 32768, 1152)
    """
    found = []
    for odd in ODD_PARTS:
        power = 1
        while odd * power < least:
            power *= 2
        found.append(odd * power)
    return min(found)


@functools.lru_cache(maxsize=1024)
def _plan(n: int, factors: tuple[int, ...] | None) -> Plan:
    natural = _radices(n)
    if factors is not None:
        if natural is None:
            fix = f"leave factors out: {n} has a prime factor over {LARGEST_RADIX} and goes by a longer transform"
        else:
            fix = f"use factors={natural}, or leave them out"
        if any(factor < 1 or factor > LARGEST_RADIX for factor in factors):
            raise rule_error(f"A radix is from 1 to {LARGEST_RADIX}", f"factors={factors}", fix)
        if math.prod(factors) != n:
            raise rule_error(
                f"The radix factors' product is the length, {n}",
                f"{factors}, whose product is {math.prod(factors)}",
                fix,
            )
        return Plan(n, factors)
    if natural is not None:
        return Plan(n, natural)
    padded = smooth_length(2 * n - 1)
    radices = _radices(padded)
    assert radices is not None  # a smooth length has small primes alone
    return Plan(n, radices, padded)


def plan(n: int, factors: Sequence[int] | None = None) -> Plan:
    """How a transform of length n is made of matrix products.

    Args:
      n: the length, 1 or more.
      factors: the radices to use, in the order in which they are applied, the first one on the axis that varies
        slowest; by default few and large ones.

    >>> plan(4096).factors, plan(2**18).factors, plan(1000).factors
    ((64, 64), (64, 64, 64), (40, 25))
    >>> plan(131), plan(12, (3, 4)).factors
    (Plan(length=131, factors=(18, 16), padded=288), (3, 4))
    """
    try:
        length = operator.index(n)
        given = None if factors is None else tuple(operator.index(factor) for factor in factors)
    except TypeError as error:
        raise rule_error("A length and its factors are whole numbers", f"{n!r}, {factors!r}", "pass ints") from error
    if length < 1:
        raise rule_error("A transform has at least one point", length, "give n=1 or more")
    return _plan(length, given)
