from jax.scipy.stats.laplace import *  # noqa: F403
