from jax.tree import *  # noqa: F403
