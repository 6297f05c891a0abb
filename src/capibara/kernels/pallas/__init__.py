"""What Pallas kernels of several ops share."""
