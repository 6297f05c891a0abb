from jax.tree_util import *  # noqa: F403
