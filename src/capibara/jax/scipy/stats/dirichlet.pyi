from jax.scipy.stats.dirichlet import *  # noqa: F403
