from jax.experimental.pjit import *  # noqa: F403
