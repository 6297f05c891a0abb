"""Paged attention for Hopper, in Pallas (Mosaic GPU)."""
