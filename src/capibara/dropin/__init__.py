"""The machinery of `capibara.jax`."""
