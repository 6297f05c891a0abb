from jax.scipy.stats.logistic import *  # noqa: F403
