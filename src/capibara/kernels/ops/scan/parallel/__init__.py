"""`lax.scan` whose step is read first: in parallel over time where it is affine in the carry."""
