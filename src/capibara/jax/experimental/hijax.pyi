from jax.experimental.hijax import *  # noqa: F403
