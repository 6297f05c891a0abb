from jax.scipy.stats.expon import *  # noqa: F403
