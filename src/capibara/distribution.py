"""What the distribution is called, and the command that installs a part of it: every message takes it from here.

On the Python Package Index `capibara` is another project. Ours is `capibara-jax`, and is imported as `capibara`.
"""

from __future__ import annotations

from typing import Literal

__all__ = ["NAME", "install_command"]

NAME = "capibara-jax"


_JAX_EXTRA = {"cuda": "cuda13", "tpu": "tpu"}


def install_command(extra: Literal["cuda", "tpu"]) -> str:
    """For a shell: what our extra of this name is for, by jax's own extra, wherever capibara itself came from.

    pip keeps the installed jax, whose extra names the libtpu or the plugins that belong to it.

    >>> install_command("tpu")
    "pip install 'jax[tpu]'"
    """
    return f"pip install 'jax[{_JAX_EXTRA[extra]}]'"
