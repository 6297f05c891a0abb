from jax.extend.core.primitives import *  # noqa: F403
