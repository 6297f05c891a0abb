from jax.numpy import *  # noqa: F403
