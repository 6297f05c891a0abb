from jax.scipy.stats.multinomial import *  # noqa: F403
