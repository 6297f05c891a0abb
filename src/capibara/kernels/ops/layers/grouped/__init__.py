"""Matrix products of rows sorted by group with one weight a group: the experts of a mixture."""
