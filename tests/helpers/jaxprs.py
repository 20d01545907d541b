"""Reads traced programs: every equation, those inside other equations included."""

import cProfile
import gc
import pstats

import jax
import jax.numpy as jnp
from jax import lax

from jmp_amp._jaxpr import inner_jaxprs


def read_low(fun):
    """Returns `fun` whose results a product reads, and which are sorted, with which an op does not fuse.

    So such an op is not float32 for the caller alone, as one whose result is only returned is, and a layer is hidden.
    """

    def read(*args):
        out = fun(*args)
        leaves = jax.tree.leaves(out)
        images = [jnp.full((1, 8, 8), jnp.sum(jnp.abs(x)), x.dtype) for x in leaves]
        products = [jnp.sum(lax.conv(x, jnp.ones((8, 8, 1), x.dtype), (1,), "SAME")) for x in images]
        return out, products, [lax.sort(x.reshape(-1)) for x in leaves]

    return read


def equations(fun, *args):
    """Yields the equations of `fun` and of all jaxprs that they hold, a loop's body once."""
    for _, eqn in scoped_equations(fun, *args):
        yield eqn


def scoped_equations(fun, *args):
    """Yields the equations with the named scopes that they stand in."""
    yield from scoped_equations_of(jax.make_jaxpr(fun)(*args))


def scoped_equations_of(jaxpr):
    """Yields the equations of a jaxpr, and of all that it holds, with the named scopes that they stand in."""
    yield from _equations(jaxpr, "")


def inner_equations(eqn):
    """Yields the equations of the jaxprs that an equation holds."""
    for inner in inner_jaxprs(eqn):
        yield from (each for _, each in _equations(inner, ""))


def _equations(jaxpr, outer):
    for eqn in jaxpr.eqns:
        scope = f"{outer}/{eqn.source_info.name_stack}"
        yield scope, eqn
        for inner in inner_jaxprs(eqn):
            yield from _equations(inner, scope)


def number_of_calls(fun):
    """Returns how many functions are called while `fun` runs: its time, which load does not change."""
    profile = cProfile.Profile()
    gc.disable()  # it would call what frees the garbage of other tests
    try:
        profile.runcall(fun)
    finally:
        gc.enable()
    return pstats.Stats(profile).total_calls


def dtypes(fun, *args, primitive):
    """Returns `"operand dtypes -> result dtypes"` of every equation of a primitive."""
    return [row(eqn) for eqn in equations(fun, *args) if eqn.primitive.name == primitive]


def products(fun, *args):
    """Returns the `dtypes` of matrix products, each once."""
    return set(dtypes(fun, *args, primitive="dot_general"))


def row(eqn):
    """Returns `"operand dtypes -> result dtypes"` of an equation."""
    return f"{_names(eqn.invars)} -> {_names(eqn.outvars)}"


def _names(atoms):
    return " ".join(atom.aval.dtype.name for atom in atoms)
