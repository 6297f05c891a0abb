from jax.experimental.pallas.fuser import *  # noqa: F403
