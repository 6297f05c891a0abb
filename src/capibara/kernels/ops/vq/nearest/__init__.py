"""The nearest code of every row, with the distance and the sums that a moving average of the codes needs."""
