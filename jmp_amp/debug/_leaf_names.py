"""The names of the leaves of a pytree."""

from typing import Any

import jax


def leaf_name(path: tuple[Any, ...]) -> str:
    """Returns the name of the leaf at a key path, such as `layers/0/w`."""
    return jax.tree_util.keystr(path, simple=True, separator="/") or "(leaf)"


def module_name(path: tuple[Any, ...]) -> str:
    """Returns the name of the container of a leaf, such as `layers/0`; a top-level leaf is its own module."""
    return leaf_name(path[:-1] or path)
