"""jax's internals, with the documented names in `core`."""

from __future__ import annotations

from capibara.dropin import alias as _alias

_alias.adopt(__name__, own=())
