from jax.scipy.stats.multivariate_normal import *  # noqa: F403
