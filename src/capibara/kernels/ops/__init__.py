"""The eight families of kernels."""
