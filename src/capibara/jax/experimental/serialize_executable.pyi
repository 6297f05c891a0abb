from jax.experimental.serialize_executable import *  # noqa: F403
