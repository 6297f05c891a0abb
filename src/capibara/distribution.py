"""What the distribution is called, the command that installs a part of it, which every message takes from here, and a
digest of its source.

On the Python Package Index `capibara` is another project. Ours is `capibara-jax`, and is imported as `capibara`.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Literal

__all__ = ["NAME", "install_command", "source_digest"]

NAME = "capibara-jax"


_JAX_EXTRA = {"cuda": "cuda13", "tpu": "tpu"}


def install_command(extra: Literal["cuda", "tpu"]) -> str:
    """For a shell: what our extra of this name is for, by jax's own extra, wherever capibara itself came from.

    pip keeps the installed jax, whose extra names the libtpu or the plugins that belong to it.

    >>> install_command("tpu")
    "pip install 'jax[tpu]'"
    """
    return f"pip install 'jax[{_JAX_EXTRA[extra]}]'"


@functools.lru_cache(maxsize=1)
def source_digest() -> str:
    """A digest of this package's source: programs of another are others."""
    root = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    for path in sorted((root / "kernels").rglob("*.json")):  # tuned choices and evidence: what dispatch goes by
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
