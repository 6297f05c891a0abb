from jax.scipy.signal import *  # noqa: F403
