"""What each primitive of JAX does to the groups of dimensions it reads."""
