from jax.nn import *  # noqa: F403
