from jax.experimental.compilation_cache.compilation_cache import *  # noqa: F403
