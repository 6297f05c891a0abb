"""Whether a program runs on the jax of today: `utils.check_migration_compatibility("model.py")`."""

from __future__ import annotations

from capibara.migrate.door import check_migration_compatibility
from capibara.migrate.findings import Finding, Report

__all__ = ["Finding", "Report", "check_migration_compatibility"]
