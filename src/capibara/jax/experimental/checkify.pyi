from jax.experimental.checkify import *  # noqa: F403
