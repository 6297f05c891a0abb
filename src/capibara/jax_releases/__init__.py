"""The public names of jax, release by release: which came, moved, were deprecated or removed, or take other parameters.

    from capibara.jax_releases import find

    find("jax.numpy.trapz").removed     # "0.4.34"

The table is made from the released wheels by `python tools/jax_releases.py`. Importing this package imports nothing
else, and reading the table does not import jax.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara._exports import exports

if TYPE_CHECKING:
    from capibara.jax_releases.signatures import Parameter as Parameter
    from capibara.jax_releases.signatures import breaks as breaks
    from capibara.jax_releases.signatures import parse as parse
    from capibara.jax_releases.table import RELEASES as RELEASES
    from capibara.jax_releases.table import NameHistory as NameHistory
    from capibara.jax_releases.table import find as find
    from capibara.jax_releases.table import modules as modules
    from capibara.jax_releases.table import names as names

__all__, __getattr__, __dir__ = exports(
    __name__,
    {
        "signatures": "Parameter breaks parse",
        "table": "RELEASES NameHistory find modules names",
    },
)
