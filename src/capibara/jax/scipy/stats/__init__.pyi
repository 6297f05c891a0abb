from jax.scipy.stats import *  # noqa: F403
