from jax.scipy.stats.pareto import *  # noqa: F403
