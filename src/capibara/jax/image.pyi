from jax.image import *  # noqa: F403
