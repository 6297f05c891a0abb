from jax.scipy.special import *  # noqa: F403
