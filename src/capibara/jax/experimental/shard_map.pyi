from jax.experimental.shard_map import *  # noqa: F403
