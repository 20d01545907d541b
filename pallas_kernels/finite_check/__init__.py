"""One read of a whole tree: is every value finite, what is the sum of squares, and what are the unscaled values."""
