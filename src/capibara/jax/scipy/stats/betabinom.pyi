from jax.scipy.stats.betabinom import *  # noqa: F403
