from jax.scipy.stats.bernoulli import *  # noqa: F403
