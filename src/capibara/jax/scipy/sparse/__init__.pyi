from jax.scipy.sparse import *  # noqa: F403
