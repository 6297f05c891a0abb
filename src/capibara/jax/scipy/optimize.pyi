from jax.scipy.optimize import *  # noqa: F403
