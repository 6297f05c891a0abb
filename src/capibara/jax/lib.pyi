from jax.lib import *  # noqa: F403
