"""What several doors share."""
