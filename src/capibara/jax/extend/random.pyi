from jax.extend.random import *  # noqa: F403
