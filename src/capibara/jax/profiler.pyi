from jax.profiler import *  # noqa: F403
