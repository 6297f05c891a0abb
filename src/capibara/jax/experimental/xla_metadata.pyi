from jax.experimental.xla_metadata import *  # noqa: F403
