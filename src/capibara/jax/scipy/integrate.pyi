from jax.scipy.integrate import *  # noqa: F403
