from jax.distributed import *  # noqa: F403
