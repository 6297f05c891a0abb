from jax.numpy.linalg import *  # noqa: F403
