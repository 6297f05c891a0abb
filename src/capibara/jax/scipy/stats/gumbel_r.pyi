from jax.scipy.stats.gumbel_r import *  # noqa: F403
