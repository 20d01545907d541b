"""The registry of primitives that hold jaxprs: how each is entered, run with other functions, and counted.

A new primitive is one entry of `HIGHER_ORDER`. Everything that reads or runs jaxprs then knows it.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn, jaxprs_in_params

from jmp_amp._jaxpr import _runs, _structures
from jmp_amp._jaxpr._runs import Run
from jmp_amp._jaxpr._structures import Loop, Structure
from jmp_amp._jaxpr._versions import hi_primitive, is_hi_type


class HigherOrder(NamedTuple):
    """A primitive that holds jaxprs.

    Attributes:
        enter: returns the jaxprs of an equation and the operands that they read; None if they cannot be replaced.
        run: evaluates an equation with other functions in place of its jaxprs: one for each branch; for a loop, one for
            the condition, if there is one, and one for the body. None if the equation cannot run otherwise.
        keeps_inputs: whether the equation keeps its operands for the backward pass.
    """

    enter: Callable[[JaxprEqn], Structure | None]
    run: Run | None = None
    keeps_inputs: bool = False


def structure_of(eqn: JaxprEqn) -> Structure | None:
    """Returns how an equation holds jaxprs; None if it holds none, or if its primitive is not registered."""
    entry = HIGHER_ORDER.get(eqn.primitive.name)
    structure = None if entry is None else entry.enter(eqn)
    # A loop over a type of the user counts its operands otherwise.
    is_opaque = isinstance(structure, Loop) and any(is_hi_type(atom.aval) for atom in eqn.invars)
    return None if is_opaque else structure


def inner_jaxprs(eqn: JaxprEqn) -> Iterator[tuple[Any, Any]]:
    """Yields all jaxprs in the parameters of an equation, and how often each runs; 1 if that is not known."""
    structure = structure_of(eqn)
    times = structure.length if isinstance(structure, Loop) and structure.length is not None else 1
    inside = jaxprs_in_params(eqn.params) if hi_primitive(eqn) is None else filter(None, [_structures.hi_jaxpr(eqn)])
    for inner in inside:
        yield inner, times


def holds_jaxprs(eqn: JaxprEqn) -> bool:
    """Whether there is a jaxpr in the parameters of an equation."""
    return next(inner_jaxprs(eqn), None) is not None


HIGHER_ORDER: Mapping[str, HigherOrder] = {
    "jit": HigherOrder(_structures.call("jaxpr"), _runs.run_with("jaxpr")),
    "call": HigherOrder(_structures.call("call_jaxpr"), _runs.run_inline),
    "closed_call": HigherOrder(_structures.call("call_jaxpr"), _runs.run_inline),
    "eval_jaxpr": HigherOrder(_structures.call("call_jaxpr"), _runs.run_inline),  # the name of both from JAX 0.12 on
    "remat2": HigherOrder(_structures.call("jaxpr"), _runs.run_remat, keeps_inputs=True),
    "custom_jvp_call": HigherOrder(_structures.call("call_jaxpr", rule="custom_jvp_call"), _runs.run_inline),
    "custom_vjp_call": HigherOrder(
        _structures.call("call_jaxpr", rule="custom_vjp_call"), _runs.run_inline, keeps_inputs=True
    ),
    "call_hi_primitive": HigherOrder(_structures.hi_call, _runs.run_hi_primitive, keeps_inputs=True),
    "shard_map": HigherOrder(_structures.call("jaxpr", is_inline=False), _runs.run_shard_map, keeps_inputs=True),
    "cond": HigherOrder(_structures.branches, _runs.run_cond),
    "scan": HigherOrder(_structures.scan, _runs.run_with("jaxpr")),
    "while": HigherOrder(_structures.while_loop, _runs.run_with("cond_jaxpr", "body_jaxpr")),
    "custom_linear_solve": HigherOrder(_structures.linear_solve),
}
