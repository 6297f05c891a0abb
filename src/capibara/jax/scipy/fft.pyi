from jax.scipy.fft import *  # noqa: F403
