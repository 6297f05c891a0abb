from jax.experimental.pallas.triton import *  # noqa: F403
