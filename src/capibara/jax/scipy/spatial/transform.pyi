from jax.scipy.spatial.transform import *  # noqa: F403
