"""Keys drawn one after another from a seed, for objects whose documented calls take none."""

from __future__ import annotations

import jax
import numpy as np

from capibara.errors import rule_error, say_once


class Draws:
    """A new key at every call of `next`, the same ones for the same seed."""

    def __init__(self, seed: int = 0) -> None:
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
            raise rule_error("seed is a whole number, 0 or more", repr(seed), "use seed=0")
        self.seed = int(seed)
        self._drawn = 0

    def __repr__(self) -> str:
        return f"Draws(seed={self.seed})"

    def fixed(self) -> jax.Array:
        """A key that is the same at every call, and is none of those that `next` gives."""
        return jax.random.fold_in(jax.random.key(self.seed), 0)

    def next(self) -> jax.Array:
        """The next key.

        Under jit it is a constant of the compiled program, which would drop the same elements at every run: the
        first time that happens to an object is said, with the fix.
        """
        self._drawn += 1
        key = jax.random.fold_in(jax.random.key(self.seed), self._drawn)
        # Made of constants, so it is traced only where everything is.
        if isinstance(key, jax.core.Tracer):
            say_once(
                UserWarning,
                self,
                "Dropout without a key inside a function that jit traces: the key drawn here becomes a constant of the "
                "compiled program, which then drops the same elements at every run. Pass rng=, a new key each step.",
                stacklevel=4,
            )
        return key
