from jax.stages import *  # noqa: F403
