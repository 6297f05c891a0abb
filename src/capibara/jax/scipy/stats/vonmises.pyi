from jax.scipy.stats.vonmises import *  # noqa: F403
