"""Traces functions of pytrees to jaxprs, evaluates jaxprs, and keeps what is found out about them."""

import math
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Primitive, Var

from jmp_amp._jaxpr import _versions as versions
from jmp_amp._jaxpr._children import with_leaves
from jmp_amp._jaxpr._versions import context_of, open_jaxpr, trace, trace_named


def dtype_of(x: Any) -> Any:
    """Returns the dtype of a variable, a literal, a type or an array; None for tokens, references and user types."""
    aval = getattr(x, "aval", x)
    if type(aval) is jax.core.ShapedArray:  # as of most
        return aval.dtype
    has_dtype = isinstance(aval, jax.core.ShapedArray) or not isinstance(aval, jax.core.AbstractValue)
    return getattr(aval, "dtype", None) if has_dtype else None


def shape_of(atom: Any) -> tuple[int, ...] | None:
    """Returns the shape of a variable or literal; None for tokens and the like."""
    return getattr(atom.aval, "shape", None)


def nbytes_of(x: Any) -> int:
    """Returns the bytes of a variable, a literal, a type or an array, as if symbolic axes had the size 1."""
    sizes = [n for n in getattr(getattr(x, "aval", x), "shape", ()) if isinstance(n, int)]
    return math.prod(sizes) * getattr(dtype_of(x), "itemsize", 0)


def is_reference(atom: Any) -> bool:
    """Whether a variable is a mutable reference to an array."""
    return hasattr(atom.aval, "inner_aval")


def is_floating(x: Any) -> bool:
    """Whether a variable, a literal or an array has a real floating dtype."""
    return _has_dtype(x, jnp.floating)


def is_inexact(x: Any) -> bool:
    """Whether a variable, a literal or an array has a floating or complex dtype."""
    return _has_dtype(x, jnp.inexact)


def _has_dtype(x: Any, kind: Any) -> bool:
    dtype = dtype_of(x)
    return dtype is not None and jnp.issubdtype(dtype, kind)


class Cache:
    """Values by object and key. JAX keeps the jaxprs of inner functions, so what is found out about them is kept too.

    The objects are held weakly and compared by identity. For each, the newest values are kept, 64 unless told. Several
    threads may use it. To make a value may call functions of the user, which wait for other threads, so no lock is held
    meanwhile: of several threads that make one value, all get that of the first.

    Args:
        limit: how many values are kept for an object.
        drop: called with each value of an object that is gone, to break a cycle of references that the value is in.
    """

    def __init__(self, limit: int = 64, drop: Callable[[Any], Any] = lambda value: None) -> None:
        self._values: dict[int, tuple[Any, dict[Hashable, Any]]] = {}
        self._limit, self._drop, self._lock = limit, drop, threading.RLock()

    def __reduce__(self) -> Any:
        """Is pickled without its values: those of another process have other ids."""
        return Cache, (self._limit, self._drop)

    def _forget(self, number: int) -> None:
        _, values = self._values.pop(number, (None, {}))
        for value in values.values():
            self._drop(value)

    def __call__(self, owner: Any, key: Hashable, make: Callable[[], Any]) -> Any:
        """Returns the value that is kept for `owner` and `key`, or makes it. It must not hold `owner`."""
        number = id(owner)
        with self._lock:
            if number not in self._values:
                self._values[number] = weakref.ref(owner, lambda _: self._forget(number)), {}
            _, values = self._values[number]
            if key in values:
                return values[key]
        value = make()
        with self._lock:
            while key not in values and len(values) >= self._limit:
                del values[next(iter(values))]
            return values.setdefault(key, value)


def split_arrays(tree: Any, *also: type) -> tuple[list[Any], Callable[..., Any]]:
    """Separates the arrays of a pytree from its other leaves.

    Args:
        tree: any pytree.
        also: more types of leaves that count as arrays.

    Returns:
        The arrays, and a function that puts others in their places.
    """
    leaves, treedef = jax.tree.flatten(tree)
    is_array = [_is_array(x, also) for x in leaves]
    others = [None if drop else x for x, drop in zip(leaves, is_array, strict=True)]  # it must not hold tracers
    arrays = list(compress(leaves, is_array))
    return arrays, lambda arrays: jax.tree.unflatten(treedef, combine(is_array, arrays, others))


def combine(mask: Sequence[bool], items: Iterable[Any], others: Iterable[Any]) -> list[Any]:
    """Returns `others`, with `items` in the places where the mask is true."""
    it = iter(items)
    return [next(it) if is_item else other for is_item, other in zip(mask, others, strict=True)]


def _is_array(x: Any, also: tuple[type, ...]) -> bool:
    """Whether JAX can trace it; numpy also has arrays of strings and of objects."""
    if isinstance(x, np.ndarray):
        return jnp.issubdtype(x.dtype, np.number) or x.dtype == np.bool_
    # A tracer may also be of a token or of a type of the user. A reference is no array.
    return isinstance(x, (jax.Array, *also)) or (isinstance(x, jax.core.Tracer) and not is_reference(x))


def trace_call(
    fun: Callable,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *also: type,
    cast: Callable[[Any], Any] = lambda x: x,
    name: str = "jit",
) -> tuple[Any, list[Any], Callable[..., Any]]:
    """Traces a call. JAX's errors name the function and its arguments, as those of `jax.jit` do.

    Args:
        fun: a function of pytrees. Arrays among the arguments are traced, other leaves are passed on, so that a
            reference is closed over.
        args: its arguments.
        kwargs: likewise.
        also: more types of leaves that count as arrays.
        cast: is applied to the arrays before they are traced.
        name: what JAX's errors say that the function is traced for.

    Returns:
        The closed jaxpr, from the arrays among the arguments to those among the results; the arrays among the
        arguments; and a function that returns the results, given their arrays.
    """
    arrays, with_arrays = split_arrays((args, kwargs), *also)
    rebuild: Callable[..., Any]

    def call(*arrays: Any) -> list[Any]:
        nonlocal rebuild
        args, kwargs = with_arrays(arrays)
        results, rebuild = split_arrays(fun(*args, **kwargs), jax.core.Tracer)
        return results

    def traced(x: Any) -> Any:
        return cast(x) if _is_array(x, ()) else x if _is_array(x, also) else None

    # Only arrays are leaves of these; JAX names them as in the call.
    given = with_leaves((args, kwargs), map(traced, jax.tree.leaves((args, kwargs))))
    return trace_named(name, fun, call, *given), arrays, rebuild


def apply(primitive: Primitive, params: dict[str, Any], args: Sequence[Any]) -> list[Any]:
    """Applies a primitive, given the parameters of an equation."""
    out = primitive.bind(*args, **primitive.get_bind_params(params))
    return list(out) if primitive.multiple_results else [out]


def bind(eqn: JaxprEqn, args: Sequence[Any], **params: Any) -> list[Any]:
    """Applies the primitive of `eqn` to `args`, with some parameters replaced."""
    return apply(eqn.primitive, eqn.params | params, args)


def retyped(jaxpr: Any, dtype: Any) -> Jaxpr:
    """Returns an open jaxpr without constants, traced again with inputs of another dtype."""
    opened, consts = open_jaxpr(jaxpr)
    args = [with_dtype(var.aval, dtype) for var in opened.invars]
    return open_jaxpr(trace(lambda *xs: jax.core.eval_jaxpr(opened, consts, *xs), args))[0]


def with_dtype(x: Any, dtype: Any) -> Any:
    """Returns a type or that of a value, sharding included, in another dtype; None leaves it, as of a token."""
    aval: Any = x if isinstance(x, jax.core.AbstractValue) else jax.typeof(x)
    return aval if dtype is None or aval.dtype == dtype else aval.update(dtype=dtype)


def as_type(x: Any, aval: Any) -> Any:
    """Returns `x` as an array of the dtype and the weak type of `aval`; a jaxpr may return a Python number."""
    if not hasattr(aval, "weak_type"):  # no array
        return x
    x = x if isinstance(x, jax.Array) else jnp.asarray(x)
    if jax.typeof(x).dtype == aval.dtype and jax.typeof(x).weak_type == aval.weak_type:
        return x
    # The public `lax.convert_element_type` makes weak types of the default dtypes only.
    return lax.convert_element_type_p.bind(x, new_dtype=aval.dtype, weak_type=aval.weak_type, sharding=None)


def tracers_behind(
    *tracers: Any, enters: Callable[[Any], bool] = lambda eqn: True, with_flags: bool = False
) -> list[Any]:
    """Returns tracers and those that they were computed from, in an order in which they can be computed.

    Args:
        tracers: tracers, or arrays, which are constants and left out.
        enters: whether to continue with the operands of an equation; see `parent_of`.
        with_flags: whether flags, and what these were computed from, are not left out.
    """
    found: dict[int, Any] = {}
    entered: set[int] = set()
    waiting = list(tracers)
    while waiting:
        tracer = versions.source_of(waiting[-1])
        eqn = versions.parent_of(tracer)
        if versions.is_constant(tracer) or (dtype_of(tracer) == np.bool_ and not with_flags):
            waiting.pop()
        elif eqn is None or id(eqn) in entered or not enters(eqn):
            found[id(tracer)] = tracer
            waiting.pop()
        else:
            entered.add(id(eqn))
            waiting.extend(versions.tracers_read(eqn))
    return list(found.values())


Apply = Callable[[Any, list[Any]], Sequence[Any]]


def evaluate(
    jaxpr: Any, args: Sequence[Any], apply: Apply, constant: Callable = lambda x: x, literal: Callable = lambda x: x.val
) -> list[Any]:
    """Evaluates a jaxpr on arrays, or on other values that `apply` understands.

    Args:
        jaxpr: closed or open.
        args: the values of its inputs.
        apply: computes the results of an equation from the values of its operands.
        constant: returns the value of a constant of the jaxpr.
        literal: returns the value of a literal.
    """
    opened, consts = open_jaxpr(jaxpr)
    env = dict(zip(opened.constvars, map(constant, consts), strict=True))
    env |= dict(zip(opened.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return literal(atom) if isinstance(atom, Literal) else env[atom]

    for eqn, dead in with_last_reads(opened):
        env.update(zip(eqn.outvars, apply(eqn, [read(atom) for atom in eqn.invars]), strict=True))
        for var in dead:
            del env[var]
    return [read(atom) for atom in opened.outvars]


def live_equations(eqns: Sequence[JaxprEqn], results: Iterable[Any]) -> tuple[list[JaxprEqn], set[Var]]:
    """Returns the equations that have effects or that results depend on, and the variables that any of these read."""
    read, live = {atom for atom in results if isinstance(atom, Var)}, []
    for eqn in reversed(eqns):
        if eqn.effects or not read.isdisjoint(eqn.outvars):
            live.append(eqn)
            read |= {atom for atom in eqn.invars if isinstance(atom, Var)}
    return live[::-1], read


def with_last_reads(jaxpr: Jaxpr) -> list[tuple[JaxprEqn, list[Var]]]:
    """Pairs each equation with the variables that no later one reads, so that they can be freed outside `jit`."""
    read_later = {atom for atom in jaxpr.outvars if isinstance(atom, Var)}
    pairs = []
    for eqn in reversed(jaxpr.eqns):
        variables = {atom for atom in (*eqn.invars, *eqn.outvars) if isinstance(atom, Var)}
        pairs.append((eqn, list(variables - read_later)))
        read_later |= variables
    return pairs[::-1]


def apply_as_traced(eqn: JaxprEqn, args: Sequence[Any], **params: Any) -> list[Any]:
    """Applies an equation with its source line, scopes and settings, and with some parameters replaced."""
    with context_of(eqn):
        return bind(eqn, args, **params)
