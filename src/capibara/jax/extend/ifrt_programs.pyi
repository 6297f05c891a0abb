from jax.extend.ifrt_programs import *  # noqa: F403
