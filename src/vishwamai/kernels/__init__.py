"""Kernels by platform: `vishwamai.kernels.tpu`."""
