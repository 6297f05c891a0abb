"""The command line: one file a command, thin over the rooms. Nothing here imports jax before a command runs."""
