from jax.extend.linear_util import *  # noqa: F403
