from jax.scipy.sparse.linalg import *  # noqa: F403
