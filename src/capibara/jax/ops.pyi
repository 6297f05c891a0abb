from jax.ops import *  # noqa: F403
