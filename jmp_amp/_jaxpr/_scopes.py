"""The name stack of equations: the named scopes of the user, and the marks of this package."""

import re
from typing import Any

import jax

_PREFIX = "jmp_amp:"  # not to be used in a scope of the user
_MARK = re.compile(rf"(?<![^/(]){_PREFIX}(\w+)(?![^/)])")  # a whole scope, in `jvp(...)` or not

_TRANSFORM = re.compile(r"\w+\(|\)")  # `jvp(encoder)/dense` is `encoder/dense`, differentiated

# An equation that `jax.checkpoint` recomputes or transposes has its path twice, `transpose(jvp(net))/jvp(net)/layer`,
# in its own name stack or together with that of the equation around it.
_REPEATED = re.compile(r"transpose\(jvp\(.*?\)\)(?:/[^()/]+)*/(?=jvp\()")

_NO_MODULE = re.compile(
    rf"^$|->|^checkpoint$|^rematted_computation$|^{_PREFIX}\w+$"
)  # `->` is in the name of an einsum


def marked(name: str) -> Any:
    """Returns a context that marks new equations. Tracing and differentiation keep the mark."""
    return jax.named_scope(_PREFIX + name)


def marks_in(name_stack: Any) -> list[str]:
    """Returns the names of the marks of an equation, the outermost first."""
    return _MARK.findall(str(name_stack)) if name_stack.stack else []


def scope_path(outer: str, name_stack: Any) -> str:
    """Returns the named scopes of an equation, with those of the jaxpr that holds it.

    Args:
        outer: the scopes of the jaxpr, such as `"encoder/Dense_0"`.
        name_stack: the name stack of the equation. The result has no marks and no names that JAX adds.
    """
    stack = _REPEATED.sub("", str(name_stack))
    names = _TRANSFORM.sub("", stack).split("/")
    path = "/".join(name for name in names if not _NO_MODULE.search(name))
    repeats = "jvp(" in stack and f"{path}/".startswith(f"{outer}/")
    return path if repeats else f"{outer}/{path}".strip("/")


def is_backward(name_stack: Any) -> bool:
    """Whether an equation is part of a backward pass."""
    return "transpose(" in str(name_stack)


def is_recomputed(name_stack: Any) -> bool:
    """Whether `jax.checkpoint` made an equation, which computes the forward pass again."""
    return "rematted_computation" in str(name_stack)
