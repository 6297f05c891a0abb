from jax.interpreters.ad import *  # noqa: F403
