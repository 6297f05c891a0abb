"""Gated feed-forward layers whose activation is part of their products."""
