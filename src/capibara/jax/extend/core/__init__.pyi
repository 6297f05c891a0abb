from jax.extend.core import *  # noqa: F403
