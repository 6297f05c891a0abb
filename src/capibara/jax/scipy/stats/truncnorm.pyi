from jax.scipy.stats.truncnorm import *  # noqa: F403
