"""`check_finite` in plain JAX: the oracle, and what runs on CPU, TPU and AMD."""

from typing import Any

import jax
import jax.numpy as jnp


def check_finite(tree: Any) -> tuple[jax.Array, jax.Array]:
    """Tells whether every value of a tree is finite, and sums the squares.

    Both answers come from one read of the tree. They are separate because squares of finite float32 values can
    overflow: the sum is then `inf` while the flag is still `True`. An answer that is not used costs nothing under
    `jit`.

    Args:
        tree: arrays of any shape; floating and complex leaves (float64 included) are read, all others pass as finite.

    Returns:
        `finite`, bool[], true for an empty tree, and the sum of squares, float32[], accumulated in float32 (in
        float64 over float64 leaves, then rounded).

    Examples:
        >>> import jax.numpy as jnp
        >>> from pallas_kernels import check_finite
        >>> finite, sum_of_squares = check_finite({"w": jnp.array([3.0, 4.0]), "b": jnp.float16(0)})
        >>> bool(finite), float(sum_of_squares)
        (True, 25.0)
        >>> bool(check_finite([jnp.array([1.0, jnp.inf])])[0])
        False
    """
    leaves = [x for x in jax.tree.leaves(tree) if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)]
    finite, sum_of_squares = jnp.bool_(True), jnp.float32(0)
    for x in leaves:
        finite &= jnp.all(jnp.isfinite(x))
        magnitude = jnp.abs(x)
        wide = magnitude if jnp.finfo(magnitude.dtype).bits >= 32 else magnitude.astype(jnp.float32)
        sum_of_squares += jnp.sum(jnp.square(wide)).astype(jnp.float32)
    return finite, sum_of_squares
