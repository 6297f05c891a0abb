from jax.scipy.stats.cauchy import *  # noqa: F403
