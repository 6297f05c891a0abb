from jax.experimental.pallas.tpu import *  # noqa: F403
