from jax.experimental.pallas import *  # noqa: F403
