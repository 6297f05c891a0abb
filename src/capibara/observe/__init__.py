"""What a run says of itself: the flight recorder and the accounting of its time."""
