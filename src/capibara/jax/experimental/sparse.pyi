from jax.experimental.sparse import *  # noqa: F403
