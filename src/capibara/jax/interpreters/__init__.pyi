from jax.interpreters import *  # noqa: F403
