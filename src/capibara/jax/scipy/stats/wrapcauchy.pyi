from jax.scipy.stats.wrapcauchy import *  # noqa: F403
