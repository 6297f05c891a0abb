from jax.scipy.stats.t import *  # noqa: F403
