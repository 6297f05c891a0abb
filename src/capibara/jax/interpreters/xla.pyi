from jax.interpreters.xla import *  # noqa: F403
