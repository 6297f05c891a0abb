from jax.core import *  # noqa: F403
