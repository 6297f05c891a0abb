from jax.version import *  # noqa: F403
