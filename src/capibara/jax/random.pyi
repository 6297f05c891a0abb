from jax.random import *  # noqa: F403
