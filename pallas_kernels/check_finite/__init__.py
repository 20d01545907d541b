"""One read of a whole tree: is every value finite, and what is the sum of squares."""
