from jax.scipy.stats.gumbel_l import *  # noqa: F403
