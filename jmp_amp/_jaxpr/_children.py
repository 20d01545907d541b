"""Trees with other leaves than a class of the user takes."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax


@jax.tree_util.register_pytree_with_keys_class
class Children:
    """The children of a node, at the same paths, in place of one whose class does not take them as its leaves."""

    def __init__(self, children: Iterable[Any], keys: tuple[Any, ...], treedef: Any) -> None:
        self.children, self.keys, self.treedef = tuple(children), keys, treedef

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """Returns the children with their keys."""
        return tuple(zip(self.keys, self.children, strict=True)), (self.keys, self.treedef)

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Iterable[Any]) -> "Children":
        """Returns a node with other children."""
        return cls(children, *aux)

    def __repr__(self) -> str:
        return f"Children{self.children}"


def with_leaves(tree: Any, leaves: Iterable[Any], is_leaf: Callable[[Any], bool] = lambda x: False) -> Any:
    """Returns a tree of the same paths with other leaves, of any types.

    A class of the user may check or convert its leaves when it is made. If it does, a `Children` takes its place.
    """
    leaves = list(leaves)
    treedef = jax.tree.structure(tree, is_leaf=is_leaf)
    return _made(treedef, leaves, lambda: _node_by_node(tree, iter(leaves), is_leaf))


def _node_by_node(node: Any, leaves: Iterator[Any], is_leaf: Callable[[Any], bool]) -> Any:
    pairs, treedef = jax.tree.flatten_with_path(node, is_leaf=lambda x: x is not node)
    if is_leaf(node) or (pairs and not pairs[0][0]):
        return next(leaves)
    children = [_node_by_node(x, leaves, is_leaf) for _, x in pairs]
    keys = tuple(path[0] for path, _ in pairs)
    return _made(treedef, children, lambda: Children(children, keys, treedef))


def _made(treedef: Any, children: list[Any], otherwise: Callable[[], Any]) -> Any:
    """Returns a tree of these children, or the result of `otherwise()` if a class does not take them as they are."""
    try:
        tree = jax.tree.unflatten(treedef, children)
        if list(map(id, jax.tree.leaves(tree))) == list(map(id, jax.tree.leaves(children))):
            return tree
    except Exception:  # whatever the class raises
        pass
    return otherwise()


def restored(tree: Any) -> Any:
    """Returns a tree with the classes of the user in place of each `Children`."""

    def restore(x: Any) -> Any:
        return x.treedef.unflatten(map(restored, x.children)) if isinstance(x, Children) else x

    return jax.tree.map(restore, tree, is_leaf=lambda x: isinstance(x, Children))
