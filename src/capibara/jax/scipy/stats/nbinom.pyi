from jax.scipy.stats.nbinom import *  # noqa: F403
