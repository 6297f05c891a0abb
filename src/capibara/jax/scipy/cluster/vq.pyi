from jax.scipy.cluster.vq import *  # noqa: F403
