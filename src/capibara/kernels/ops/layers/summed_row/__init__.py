"""A row that is still in parts, its norm, and the product that follows."""
