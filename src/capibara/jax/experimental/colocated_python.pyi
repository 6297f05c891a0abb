from jax.experimental.colocated_python import *  # noqa: F403
