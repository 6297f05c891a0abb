"""What the distribution is called, and the command that installs a part of it: every message takes it from here.

On the Python Package Index `capibara` is another project. Ours is `capibara-jax`, and is imported as `capibara`.
"""

from __future__ import annotations

from typing import Literal

__all__ = ["NAME", "install_command"]

NAME = "capibara-jax"


def install_command(extra: Literal["cuda", "tpu"]) -> str:
    """For a shell; an installed capibara-jax, from wherever it came, gets the extra's packages beside it.

    >>> install_command("tpu")
    "pip install 'capibara-jax[tpu]'"
    """
    return f"pip install '{NAME}[{extra}]'"
