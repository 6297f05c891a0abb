"""From plain jax to capibara.jax, and from old jax to new: what of a program breaks, and how it is mended.

Code is read and never run, but by `verify`. Neither jax nor libcst is needed to check.
"""
