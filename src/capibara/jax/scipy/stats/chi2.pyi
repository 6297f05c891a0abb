from jax.scipy.stats.chi2 import *  # noqa: F403
