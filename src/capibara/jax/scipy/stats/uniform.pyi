from jax.scipy.stats.uniform import *  # noqa: F403
