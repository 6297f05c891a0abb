from jax.experimental.profiler import *  # noqa: F403
