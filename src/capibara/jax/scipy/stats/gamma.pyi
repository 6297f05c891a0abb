from jax.scipy.stats.gamma import *  # noqa: F403
