"""jax's internals, with the documented names in `core`."""

from __future__ import annotations

from capibara.jax import _alias

_alias.adopt(__name__, own=())
