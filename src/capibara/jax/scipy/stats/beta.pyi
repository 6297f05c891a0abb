from jax.scipy.stats.beta import *  # noqa: F403
