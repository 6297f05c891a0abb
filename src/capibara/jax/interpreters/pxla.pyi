from jax.interpreters.pxla import *  # noqa: F403
