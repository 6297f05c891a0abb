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
    asked: tuple[int, ...] | None = dataclasses.field(default=None, compare=False, repr=False)
    """The radices that were asked for, where these are not all of them, or not only them."""

    @property
    def remark(self) -> str | None:
        """How the radices differ from those that were asked for; None where they do not, or none were."""
        if self.asked is None:
            return None
        used, unused = _taken(self.padded or self.length, self.asked)
        points = f"{self.length} points" + ("" if self.padded is None else f", by way of {self.padded},")
        parts = [f"uses {_listed(used)}" if used else "uses none"]
        if unused:
            parts.append(
                f"leaves out {_listed(unused)}, not {'a divisor' if len(unused) == 1 else 'divisors'} of the rest"
            )
        filled = self.factors[len(used) :]
        if math.prod(filled) > 1:
            parts.append(f"fills in {_listed(filled)}")
        return f"radices {self.factors}: of {self.asked} the plan for {points} {', '.join(parts)}"

    @property
    def products(self) -> int:
        """How many matrix products the data goes through."""
        return len(self.factors) * (1 if self.padded is None else 2)


def _taken(n: int, asked: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(those that are used, those that are not): each in turn, where it divides what those before it leave of n."""
    used: list[int] = []
    unused: list[int] = []
    for radix in asked:
        if radix == 1:  # a stage that does nothing
            continue
        divides = n % radix == 0
        (used if divides else unused).append(radix)
        n //= radix if divides else 1
    return tuple(used), tuple(unused)


def _listed(radices: Sequence[int]) -> str:
    return " and ".join(filter(None, [", ".join(map(str, radices[:-1])), str(radices[-1])]))


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
def _plan(n: int, asked: tuple[int, ...] | None) -> Plan:
    natural, padded = _radices(n), None
    if natural is None:
        padded = smooth_length(2 * n - 1)
        natural = _radices(padded)
        assert natural is not None  # a smooth length has small primes alone
    if asked is None:
        return Plan(n, natural, padded)
    if any(radix < 1 or radix > LARGEST_RADIX for radix in asked):
        fix = f"use radices like {natural}, or leave them out"
        raise rule_error(f"A radix is from 1 to {LARGEST_RADIX}", f"radix_factors={asked}", fix)
    used, unused = _taken(padded or n, asked)
    left = (padded or n) // math.prod(used)
    rest = _radices(left) if left > 1 or not used else ()
    assert rest is not None  # it divides a length that has small primes alone
    return Plan(n, (*used, *rest), padded, asked if unused or left > 1 else None)


def plan(n: int, factors: Sequence[int] | None = None) -> Plan:
    """How a transform of length n is made of matrix products.

    Args:
      n: the length, 1 or more.
      factors: the radices to prefer, each from 1 to 128, in the order in which they are applied, the first one on the
        axis that varies slowest. Each is used where it divides what those before it leave of the length (or of the
        longer one, where the length goes by that); what they leave in the end is filled in with few and large ones, as
        all of it is by default. `Plan.remark` says how the radices differ from these, and so does `explain`.

    >>> plan(4096).factors, plan(2**18).factors, plan(1000).factors
    ((64, 64), (64, 64, 64), (40, 25))
    >>> plan(131), plan(12, (3, 4)).factors
    (Plan(length=131, factors=(18, 16), padded=288), (3, 4))
    >>> plan(1000, (2, 4, 8)).remark
    'radices (2, 4, 125): of (2, 4, 8) the plan for 1000 points uses 2 and 4, leaves out 8, not a divisor of the rest, \
fills in 125'
    """
    try:
        length = operator.index(n)
        given = None if factors is None else tuple(operator.index(factor) for factor in factors)
    except TypeError as error:
        raise rule_error("A length and its factors are whole numbers", f"{n!r}, {factors!r}", "pass ints") from error
    if length < 1:
        raise rule_error("A transform has at least one point", length, "give n=1 or more")
    return _plan(length, given)
