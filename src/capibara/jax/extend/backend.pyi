from jax.extend.backend import *  # noqa: F403
