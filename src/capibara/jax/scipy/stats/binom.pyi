from jax.scipy.stats.binom import *  # noqa: F403
