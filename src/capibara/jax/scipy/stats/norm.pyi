from jax.scipy.stats.norm import *  # noqa: F403
