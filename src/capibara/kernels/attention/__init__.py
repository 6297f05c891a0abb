"""The attention family."""
