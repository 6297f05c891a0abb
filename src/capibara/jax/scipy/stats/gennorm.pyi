from jax.scipy.stats.gennorm import *  # noqa: F403
