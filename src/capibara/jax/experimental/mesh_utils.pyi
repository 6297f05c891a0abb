from jax.experimental.mesh_utils import *  # noqa: F403
