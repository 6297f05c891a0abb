"""Where kernels are checked, timed, tuned and measured."""
