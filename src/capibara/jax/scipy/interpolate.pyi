from jax.scipy.interpolate import *  # noqa: F403
