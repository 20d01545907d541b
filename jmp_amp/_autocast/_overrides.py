"""Rules of the user's own: for a primitive, or for the scopes that a pattern matches."""

import fnmatch
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Primitive

from jmp_amp._autocast._regions import compute_dtype
from jmp_amp._autocast._rules import OpClass, Rule
from jmp_amp._autocast._values import FLOAT32

_TRANSFORM = re.compile(r"\w+\(|\)")  # `jvp(encoder)/dense` is `encoder/dense`, differentiated

# What `jax.checkpoint` computes again or transposes has its path twice: `transpose(jvp(net))/jvp(net)/layer`, in one
# equation or in two of which one is in the other.
_REPEATED = re.compile(r"transpose\(jvp\(.*?\)\)(?:/[^()/]+)*/(?=jvp\()")

_NO_MODULE = re.compile(r"^$|^amp:|->|^checkpoint$|^rematted_computation$")  # marks, einsums, `jax.checkpoint`


class Overrides(NamedTuple):
    """What `rules=` says.

    Attributes:
        primitives: the class of a primitive, by its name.
        scopes: the compute dtype of the scopes that a pattern matches; of several, the last one counts.
    """

    primitives: Mapping[str, Rule]
    scopes: Mapping[str, np.dtype]

    def matching(self, path: str) -> list[str]:
        """Returns the patterns that match a scope, or one that it lies in."""
        starts = [i for i, c in enumerate("/" + path) if c == "/"]
        paths = [f"{path[start:]}/" for start in starts]
        return [pattern for pattern in self.scopes if any(fnmatch.fnmatchcase(p, f"{pattern}/*") for p in paths)]


def parse_rules(rules: Mapping[Any, Any]) -> Overrides:
    """Reads a mapping of primitives to classes, and of scope patterns to `"full"` or a compute dtype.

    Raises:
        TypeError: a key is neither a primitive nor a string.
        ValueError: a value is not a class, or not a dtype that autocast computes in.
    """
    primitives, scopes = {}, {}
    for key, value in rules.items():
        if isinstance(key, Primitive):
            primitives[key.name] = Rule(_op_class(key, value), dtype_params=("preferred_element_type",))
        elif isinstance(key, str):
            pattern = key.strip("/").removeprefix("*/").removesuffix("/*")  # it may start at any scope anyway
            scopes[pattern] = FLOAT32 if value == "full" else compute_dtype(value)
        else:
            raise TypeError(
                "a rule is for a primitive (`lax.tanh_p`) or for a pattern of scopes ('decoder/*'), "
                f"got {key!r} of type {type(key).__name__}"
            )
    return Overrides(primitives, scopes)


def scope_path(outer: str, name_stack: Any) -> str:
    """Returns the scopes of an equation, and of the jaxpr that it is in, that a user or a library named: modules."""
    stack = _REPEATED.sub("", str(name_stack))
    path = "/".join(name for name in _TRANSFORM.sub("", stack).split("/") if not _NO_MODULE.search(name))
    repeats = "jvp(" in stack and f"{path}/".startswith(f"{outer}/")
    return path if repeats else f"{outer}/{path}".strip("/")


def _op_class(primitive: Primitive, value: Any) -> OpClass:
    try:
        return OpClass(value)
    except ValueError:
        raise ValueError(
            f"the class of `{primitive.name}` must be one of {', '.join(c.value for c in OpClass)}, got {value!r}"
        ) from None
