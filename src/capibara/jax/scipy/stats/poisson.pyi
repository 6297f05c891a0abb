from jax.scipy.stats.poisson import *  # noqa: F403
