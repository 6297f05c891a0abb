from jax.extend.sharding import *  # noqa: F403
