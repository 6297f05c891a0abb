"""Whether what serving needs beside the engine is installed: asked before anything of it is imported."""

from __future__ import annotations

import importlib.util

from capibara.distribution import NAME
from capibara.errors import rule_error

__all__ = ["check_installed"]

_NEEDED = ("h11", "jinja2", "llguidance", "msgspec", "prometheus_client", "starlette", "uvicorn")


def check_installed(command: str) -> None:
    """Refuse a command whose packages are not there, with what installs them."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise rule_error(f"{command} needs the serve extra", f"no {', '.join(missing)}", f"pip install '{NAME}[serve]'")
