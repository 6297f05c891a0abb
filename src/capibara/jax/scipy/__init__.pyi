from jax.scipy import *  # noqa: F403
