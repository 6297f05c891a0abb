from jax.debug import *  # noqa: F403
