from jax.experimental.jet import *  # noqa: F403
