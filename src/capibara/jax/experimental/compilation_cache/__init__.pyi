from jax.experimental.compilation_cache import *  # noqa: F403
