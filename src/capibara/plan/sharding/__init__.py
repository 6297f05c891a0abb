"""Shardings by parameters or by a loss, for the documented functions."""
