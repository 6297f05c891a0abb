"""Paged attention for the TPU's matrix units, in Pallas (Mosaic)."""
