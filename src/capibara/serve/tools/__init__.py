"""Tool calls in the text of an answer: read as it comes, a parser a format."""
