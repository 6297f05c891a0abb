from jax.sharding import *  # noqa: F403
