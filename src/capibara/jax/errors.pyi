from jax.errors import *  # noqa: F403
