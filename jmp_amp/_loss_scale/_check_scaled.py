"""Detection of gradients that were never scaled, or already unscaled, from the program that JAX traces."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import Literal

from jmp_amp._jaxpr import (
    Branches,
    Call,
    Loop,
    Structure,
    equations_behind,
    inner_jaxprs,
    is_backward,
    is_floating,
    is_recomputed,
    open_jaxpr,
    operands_of,
    parent_of,
    shape_of,
    structure_of,
    tracers_behind,
)
from jmp_amp._loss_scale._gradients import UNSCALE_SCOPE


def check_scaled(grads: Any, scale: Any = None) -> None:
    """Raises ValueError if the traced program shows that `grads` are not the gradients of a loss times `scale`.

    The gradients are wrong if they come from `unscale`, also through a chain of transformations. If `scale` is traced,
    they are also wrong if the backward pass of a loss that nothing scales is behind them, and nothing that depends on
    `scale`. A step may be split into `jit`s, so any argument that can hold the scale counts as the scale. The check
    inspects only the first leaves, and passes whatever it cannot prove wrong.
    """
    leaves = jax.tree.leaves_with_path(grads)
    for path, x in leaves[:_CHECKED_LEAVES]:
        if _is_unscaled(x):
            raise ValueError(
                f"the gradient at `{jax.tree_util.keystr(path)}` was already unscaled: `unscale_and_check` is in front "
                "of another `unscale_and_check` or of `dynamic_loss_scale`; keep only one, and put it inside "
                "`dynamic_loss_scale` if there is one"
            )
    for path, x in leaves[:1] if isinstance(scale, jax.core.Tracer) else ():
        if not _may_depend_on(x, scale) and set(_has_constant_factors(equations_behind(x), {})) == {True}:
            raise ValueError(
                f"the gradient at `{jax.tree_util.keystr(path)}` does not depend on the loss scale, so it must not be "
                "divided by it; write `amp.value_and_grad(loss_fn, opt_state=opt_state)`, disable loss scaling with "
                "`dynamic_loss_scale(inner, LossScale.none())`, or pass the number that multiplied the loss as "
                "`tx.update(..., loss_scale=number)`"
            )


_CHECKED_LEAVES = 4


def _is_unscaled(grad: Any) -> bool:
    """Whether a gradient is the result of `unscale`, or of transformations of it.

    A gradient is not if it was differentiated after that, as where a loss reads updated parameters. It may not be if an
    argument is behind both the unscaled gradients and what was done to them: that may have scaled them again.
    """
    tracers = list(tracers_behind(grad, enters=lambda eqn: not (_is_unscale(eqn) or _differentiates(eqn))))
    unscaled = [x for x in tracers if (eqn := parent_of(x)) is not None and _is_unscale(eqn)]
    arguments = {id(x) for x in tracers if parent_of(x) is None}
    return bool(unscaled) and arguments.isdisjoint(map(id, tracers_behind(*unscaled)))


def _may_depend_on(grad: Any, scale: Any) -> bool:
    """Whether a gradient and the scale depend on one value, or the gradient on an argument that can hold the scale."""
    behind_scale = list(tracers_behind(scale))
    if all(parent_of(x) is not None for x in behind_scale):
        return True  # a constant, as `set_loss_scale` writes; the gradient may depend on an equal one
    if any(parent_of(x) is None for x in tracers_behind(grad, enters=lambda eqn: not _differentiates(eqn))):
        return True  # an argument that changed the gradient after the backward pass
    ids = {id(x) for x in behind_scale}
    return any(id(x) in ids or _can_be_scale(x) for x in tracers_behind(grad))


def _can_be_scale(x: Any) -> bool:
    """Whether a tracer is a floating-point scalar that is an argument, or was computed outside of any derivative."""
    eqn = parent_of(x)
    return shape_of(x) == () and is_floating(x) and (eqn is None or not _differentiates(eqn))


def _has_constant_factors(eqns: Iterable[Any], constants: dict[int, Any], is_inside: bool = False) -> Iterator[bool]:
    """Yields, for each backward pass that begins here, whether its first equation reads constants alone.

    This equation reads the cotangent of the loss, which is 1. If a scale multiplies the loss, it also reads that scale.

    Args:
        eqns: equations in the order of the program.
        constants: the values of the variables that are constant, by their ids.
        is_inside: whether the equations are part of a backward pass.
    """
    for eqn in eqns:
        stack = eqn.source_info.name_stack
        is_inner = (is_inside or is_backward(stack)) and not is_recomputed(stack)
        operands = operands_of(eqn)
        values = [x.val if isinstance(x, Literal) else constants.get(id(x)) for x in operands]
        is_constant = not any(value is None for value in values)
        reads_one = any(is_floating(x) and value == 1 for x, value in zip(operands, values, strict=True))
        if is_inner and reads_one and (is_constant or all(shape_of(x) == () for x in operands)):
            yield is_constant
        if is_constant:
            constants |= {id(x): "computed" for x in eqn.outvars}
        for jaxpr, indices in _fixed_inputs(structure_of(eqn)):
            opened, _ = open_jaxpr(jaxpr)
            known = {id(x): values[i] for x, i in zip(opened.invars, indices, strict=False) if values[i] is not None}
            yield from _has_constant_factors(opened.eqns, known, is_inner)


def _fixed_inputs(structure: Structure | None) -> Sequence[tuple[Any, Sequence[int]]]:
    """Returns the jaxprs of an equation, each with the operands that its first inputs are in every iteration."""
    match structure:
        case Call(jaxpr, operands):
            return [(jaxpr, operands)]
        case Branches(jaxprs, operands):
            return [(jaxpr, operands) for jaxpr in jaxprs]
        case Loop(body, consts):
            return [(body, range(consts.start, consts.stop))]
    return []


def _is_unscale(eqn: Any) -> bool:
    return UNSCALE_SCOPE in str(eqn.source_info.name_stack).split("/")


def _differentiates(eqn: Any) -> bool:
    """Whether an equation is part of a derivative, or calls a function that computes one."""
    stack = str(eqn.source_info.name_stack)
    inside = (inner for jaxpr, _ in inner_jaxprs(eqn) for inner in open_jaxpr(jaxpr)[0].eqns)
    return "jvp(" in stack or "transpose(" in stack or any(map(_differentiates, inside))
