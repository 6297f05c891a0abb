from jax.experimental import *  # noqa: F403
