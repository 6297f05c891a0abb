from jax.experimental.layout import *  # noqa: F403
