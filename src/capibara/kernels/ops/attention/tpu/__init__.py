"""Attention for the TPU's matrix units, in Pallas (Mosaic): forward.py, backward.py, and what they share."""
