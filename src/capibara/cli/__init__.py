"""The command line: one file a command, thin over the rooms. jax is imported when a command runs."""
