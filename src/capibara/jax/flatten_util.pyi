from jax.flatten_util import *  # noqa: F403
