from jax.experimental.topologies import *  # noqa: F403
