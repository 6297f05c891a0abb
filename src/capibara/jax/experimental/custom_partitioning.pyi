from jax.experimental.custom_partitioning import *  # noqa: F403
