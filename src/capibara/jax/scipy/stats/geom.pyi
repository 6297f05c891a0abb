from jax.scipy.stats.geom import *  # noqa: F403
