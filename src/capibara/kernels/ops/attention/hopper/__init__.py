"""Attention for Hopper's tensor cores, in Pallas (Mosaic GPU): forward.py, backward.py, and what they share."""
