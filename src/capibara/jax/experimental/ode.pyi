from jax.experimental.ode import *  # noqa: F403
