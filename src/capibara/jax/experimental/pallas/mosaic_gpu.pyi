from jax.experimental.pallas.mosaic_gpu import *  # noqa: F403
