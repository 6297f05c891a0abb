"""Training steps cut into stages."""
