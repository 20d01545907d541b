"""An op that casts a matrix to float8 by rows and by columns, in one pass."""
