"""capibara: a JAX toolkit for TPU pods that is written and tested on a GPU or a laptop.

Importing this package imports nothing heavy: rooms load when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara._exports import exports
from capibara._version import __version__

if TYPE_CHECKING:
    from capibara import compile as compile
    from capibara import config as config
    from capibara import core as core
    from capibara import cost as cost
    from capibara import errors as errors
    from capibara import hardware as hardware
    from capibara import jax as jax
    from capibara import kernels as kernels
    from capibara import mesh as mesh
    from capibara import models as models
    from capibara import parallel as parallel
    from capibara import plan as plan
    from capibara import precision as precision
    from capibara import prices as prices
    from capibara import program as program
    from capibara import vq as vq

__all__, __getattr__, __dir__ = exports(
    __name__,
    {},
    modules=(
        "compile",
        "config",
        "core",
        "cost",
        "errors",
        "hardware",
        "jax",
        "kernels",
        "mesh",
        "models",
        "parallel",
        "plan",
        "precision",
        "prices",
        "program",
        "vq",
    ),
)
__all__ += ["__version__"]
