"""Whether this installation works: `diagnostics.check_installation()`."""

from __future__ import annotations

from capibara.dropin.installation import Installation, Missing, check_installation

__all__ = ["Installation", "Missing", "check_installation"]
