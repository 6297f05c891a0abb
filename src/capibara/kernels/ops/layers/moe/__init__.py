"""A mixture of experts: tokens to their experts and back, on one device or with the experts over a mesh."""
