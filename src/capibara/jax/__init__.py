"""jax, with kernel dispatch inside an optimisation context: `import capibara.jax as jax`.

Every name and module is the installed jax's own object, except those listed in `capibara.dropin.changed`. Names that
jax removed and older code uses keep working, with one DeprecationWarning each (`capibara.dropin.compat`). Where jax
cannot be imported, `capibara.jax.diagnostics` can, and says why; every other name raises what importing jax raised.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax import *  # noqa: F403

    from capibara.jax import diagnostics as diagnostics
    from capibara.jax import tpu_v4 as tpu_v4
    from capibara.jax import utils as utils
    from capibara.jax.tpu_v4 import optimizations as tpu_v4_optimizations  # noqa: F401

try:
    import jax as _jax  # noqa: F401
except Exception as error:  # noqa: BLE001 a broken installation raises anything; it is told with every name but one
    from capibara.dropin import broken as _broken

    _broken.stand_in(error)
else:
    from capibara import to_come
    from capibara.dropin import alias as _alias
    from capibara.dropin.config import config as config
    from capibara.dropin.information import get_backend_info as get_backend_info
    from capibara.dropin.information import get_optimization_status as get_optimization_status

    _alias.install()
    to_come.announce(__name__)
    _alias.adopt(
        __name__,
        own=("config", "get_backend_info", "get_optimization_status"),
        lazy={
            "diagnostics": "capibara.jax.diagnostics",
            "utils": "capibara.jax.utils",
            "tpu_v4": "capibara.jax.tpu_v4",
            "tpu_v4_optimizations": "capibara.jax.tpu_v4.optimizations",
        },
    )
