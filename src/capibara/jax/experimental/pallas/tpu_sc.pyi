from jax.experimental.pallas.tpu_sc import *  # noqa: F403
