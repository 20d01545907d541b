"""Checks, while a step is traced, that gradients were scaled, once, and what was done to them before `update`."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Literal, Var
from jax.tree_util import keystr

from jmp_amp import _jaxpr as jx
from jmp_amp._loss_scale._gradients import CHECK, UNSCALE, is_overwritten
from jmp_amp._loss_scale._units import Origins, Unit, UnitAnalysis, describe_unit

# The names of a new scale, and of the loss and the gradients that `value_and_grad` returns. They change no program.
SCALE, _LOSS, _SCALED = "amp.loss_scale", "amp.loss", "amp.scaled_grads"
_UNKNOWN = Unit(is_data_free=False)
_read_from = jx.Cache()  # of a traced scale, what is in the states that it was read from


def mark_scaled(loss: Any, grads: Any) -> tuple[Any, Any]:
    """Returns an unscaled loss and gradients of it times a scale, those that are traced named for `check_scaled`."""

    def mark(path: Any, x: Any, name: str = _SCALED) -> Any:
        is_marked = _is_traced(x) and jx.is_inexact(x) and not is_overwritten(path, x)
        return checkpoint_name(x, name) if is_marked else x

    return mark((), loss, _LOSS), jax.tree.map_with_path(mark, grads)


def note_state(scale: Any, states: Any) -> None:
    """Keeps, for `check_scaled`, that what states of optimizers hold beside a traced scale is not multiplied by it."""
    if _is_traced(source := jx.versions.source_of(scale)):
        tracers = map(jx.versions.source_of, _tracers(states))
        _read_from(source, None, list).extend(weakref.ref(x) for x in tracers if _is_traced(x) and x is not source)


def check_scaled(grads: Any, scale: Any, params: Any, cure: str, *, may_be_number: bool) -> None:
    """Raises ValueError if the traced program shows that `grads` are not the gradients of a loss times `scale`.

    They are not if they come from `unscale`, also through a chain of transformations; or if the backward pass of a loss
    is behind them, and nothing that may be a scale of all of it. A step may be split into `jit`s, so any argument that
    can hold the scale may be the scale.

    What was done to gradients since `value_and_grad` returned them must commute with a scaling, and pass on what is not
    finite. Units are inferred from there. An argument has no unit if it is one of `params`, or in a state that the
    scale was read from. Of another one, which may be a sum of scaled gradients or another scale, nothing is known.

    Nothing is said outside `jit`, where no program is traced, and of what cannot be proved wrong.

    Args:
        grads: what `update` got.
        scale: what divides the gradients: traced, or a number.
        params: the parameters, or None.
        cure: what to do with a transformation of scaled gradients.
        may_be_number: whether the loss may have been multiplied by a number, in place of a traced scale.
    """
    pairs = jax.tree.leaves_with_path(grads)
    leaves = [(path, x) for path, x in pairs if _is_traced(x) and not is_overwritten(path, x)]
    if not leaves or not (_is_traced(scale) or np.any(np.asarray(scale) != 1)):
        return
    for path, x in leaves[:4]:
        if _is_unscaled(x):
            raise ValueError(_unscaled_before(path))
    if error := _BeforeUpdate(scale, params, cure).find_error(leaves):
        raise ValueError(error)
    is_traced = _is_traced(scale) and not may_be_number
    if is_traced and not _may_depend_on([x for _, x in leaves[:4]], scale):
        raise ValueError(
            f"the gradient at `{keystr(leaves[0][0])}` does not depend on the loss scale, so it must not be divided by "
            "it; write `amp.value_and_grad(loss_fn, opt_state=opt_state)`, disable loss scaling with "
            "`dynamic_loss_scale(inner, LossScale.none())`, or pass the factor of the loss as "
            "`tx.update(..., loss_scale=number)`"
        )


class _BeforeUpdate(UnitAnalysis):
    """The units of what a step does between the backward pass and `update`."""

    def __init__(self, scale: Any, params: Any, cure: str) -> None:
        """Takes the scale, the parameters, and what to do with a transformation of scaled gradients."""
        super().__init__(1)
        self._cure = f"between `amp.value_and_grad` and `update`, gradients are multiplied by the loss scale: {cure}"
        self._gradient = self.scales[0]._replace(is_data_free=False)
        references = _read_from(source, None, list) if _is_traced(source := jx.versions.source_of(scale)) else []
        unscaled = [*_tracers(params), *(x for ref in references if (x := ref()) is not None)]
        arguments = [x for x in unscaled if jx.versions.parent_of(jx.versions.source_of(x)) is None]
        self._known = {id(_variable(x)): self.unscaled for x in arguments} | {id(_variable(scale)): self.scales[0]}

    def find_error(self, leaves: Sequence[tuple[Any, Any]]) -> str | None:
        """Returns what was done to gradients, the tracers at these paths, that is wrong for scaled ones, and a cure."""
        tracers = [x for _, x in leaves]
        behind = jx.tracers_behind(*tracers, enters=_is_entered, with_flags=True)
        if not any(_holds(eqn, _is_mark) for eqn in _parents(behind)):
            return None
        units = _infer_units(self, behind, tracers, self._known, _UNKNOWN)
        for error in self.errors:
            if any(error in unit.origins for unit in units):
                return error
        for (path, x), unit in zip(leaves, units, strict=True):
            if not unit.is_data_free and unit.powers not in (None, self._gradient.powers):
                if UNSCALE in unit.origins:
                    return _unscaled_before(path)
                eqn = jx.versions.parent_of(jx.versions.source_of(x))
                where = f"{_where([eqn])}, " if eqn is not None else ""
                return f"{where}the gradient at `{keystr(path)}` becomes {describe_unit(unit)}; {self._cure}"
        return None

    def error(self, predicate: str, scaled: Unit) -> str:
        """Names the line."""
        return f"{_where(self.path)}, the step {predicate}; {self._cure}"

    def hides(self, flag: Unit) -> Origins:
        """Returns an error: the loss scale must see overflows."""
        return self.add_error("replaces gradients that are not finite, so that the loss scale does not back off", flag)

    def constant(self, x: Any) -> Unit:
        """An array of one number may be a scale. What stands in the code is a number."""
        return _UNKNOWN if isinstance(x, jax.Array) and x.ndim == 0 else super().constant(x)

    def infer_equation(self, eqn: Any, operands: list[Unit]) -> list[Unit]:
        """Stops where gradients are marked or unscaled, and at derivatives."""
        if _is_entered(eqn):
            return super().infer_equation(eqn, operands)
        unit = self._gradient if _is_mark(eqn) else _UNKNOWN if _differentiates(eqn) else self.unscaled
        origins = frozenset({UNSCALE}) if _is_unscale(eqn) else frozenset()
        return [unit._replace(origins=origins)] * len(eqn.outvars)


def _unscaled_before(path: Any) -> str:
    return (
        f"the gradient at `{keystr(path)}` was already unscaled, by `unscale_and_check`, `dynamic_loss_scale` or "
        "`LossScale.unscale`; keep only one, `dynamic_loss_scale` around the whole optimizer if there is one"
    )


def _infer_units(
    analysis: UnitAnalysis, behind: Sequence[Any], ends: Sequence[Any], known: dict[int, Unit], argument: Unit
) -> list[Unit]:
    """Returns the units of traced values.

    Args:
        analysis: infers them.
        behind: what the values were computed from, as `tracers_behind` returns it.
        ends: the values.
        known: the units of some of these, by the ids of their variables.
        argument: the unit of other floating arguments.
    """
    units = dict(known)

    def unit_of(atom: Any) -> Unit:
        if isinstance(atom, Var):
            return units.get(id(atom), analysis.unscaled)
        return analysis.constant(atom.val if isinstance(atom, Literal) else atom)

    for tracer in behind:
        if jx.versions.parent_of(tracer) is None and jx.is_inexact(tracer):
            units.setdefault(id(_variable(tracer)), argument)
    for eqn in _parents(behind):
        found = analysis.infer_equation(eqn, [unit_of(atom) for atom in jx.versions.operands_of(eqn)])
        for var, unit in zip(eqn.outvars, found, strict=True):
            units.setdefault(id(var), unit)
    return [unit_of(_variable(x)) for x in ends]


def _is_unscaled(grad: Any) -> bool:
    """Whether a gradient is the result of `unscale`, or of transformations of it.

    A gradient is not if it was differentiated after that, as where a loss reads updated parameters. It may not be if an
    argument is behind both the unscaled gradients and what was done to them: that may have scaled them again.
    """
    tracers = jx.tracers_behind(grad, enters=lambda eqn: not (_is_unscale(eqn) or _differentiates(eqn)))
    unscaled = [x for x in tracers if (eqn := jx.versions.parent_of(x)) is not None and _is_unscale(eqn)]
    return bool(unscaled) and _arguments(tracers).isdisjoint(_arguments(jx.tracers_behind(*unscaled)))


def _may_depend_on(grads: Sequence[Any], scale: Any) -> bool:
    """Whether gradients may be those of a loss times the scale, or of no loss at all; the first reason is enough."""
    first, behind = grads[0], jx.tracers_behind(grads[0])
    sources, ids = jx.tracers_behind(scale, with_flags=True), set(map(id, jx.tracers_behind(scale)))
    return (
        # The scale is a constant, as `set_loss_scale` writes; the gradient may depend on an equal one.
        not (_arguments(sources) or any(map(is_new_scale, _parents(sources))))
        # An argument changed the gradient after the backward pass.
        or bool(_arguments(jx.tracers_behind(first, enters=lambda eqn: not _differentiates(eqn))))
        or any(id(x) in ids for x in behind)
        or _may_have_factor(grads, behind, jx.shape_of(jx.versions.source_of(scale)))
    )


def _may_have_factor(grads: Sequence[Any], behind: Sequence[Any], shape: Any) -> bool:
    """Whether gradients may be those of no loss, or of one times a value behind them; `shape` is that of the scale."""
    are_constant = set(_has_constant_factors(_parents(behind), {}))
    # Under `vmap`, each example may have a scale.
    candidates = [x for x in behind if jx.shape_of(x) in ((), shape) and _can_be_scale(x)]
    if False in are_constant:  # the loss may compute its factor from any argument
        arguments = [x for x in behind if jx.versions.parent_of(x) is None]
        if any(jx.shape_of(x) == () and not jx.is_inexact(x) for x in arguments):
            return True
        candidates += filter(jx.is_floating, arguments)
    return not are_constant or any(_multiplies_all(x, grads) for x in candidates)


def _multiplies_all(candidate: Any, grads: Sequence[Any]) -> bool:
    """Whether a traced value may be a factor of all gradients, as one of a single term of the loss is not."""
    analysis = UnitAnalysis(1)  # an origin says that a result is a sum of different powers
    unit = analysis.scales[0]._replace(is_data_free=False)
    known = {id(_variable(candidate)): unit}
    ends = _infer_units(analysis, jx.tracers_behind(*grads), grads, known, argument=analysis.unscaled)
    return all(not end.origins and end.powers in (None, unit.powers) for end in ends)


def _parents(tracers: Iterable[Any]) -> list[Any]:
    """Returns the equations that computed tracers, each once."""
    return list({id(eqn): eqn for x in tracers if (eqn := jx.versions.parent_of(x)) is not None}.values())


def _variable(tracer: Any) -> Any:
    tracer = jx.versions.source_of(tracer)
    return getattr(tracer, "val", tracer)


def _arguments(tracers: Iterable[Any]) -> set[int]:
    """Returns the ids of the tracers that no equation computed."""
    return {id(x) for x in tracers if jx.versions.parent_of(x) is None}


def _can_be_scale(x: Any) -> bool:
    """Whether a tracer is floating-point, and an argument, or was computed from one outside derivatives."""
    if not jx.is_floating(x):
        return False
    eqn = jx.versions.parent_of(x)
    return eqn is None or (not _differentiates(eqn) and bool(_arguments(jx.tracers_behind(x))))


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
        is_inner = (is_inside or jx.is_backward(stack)) and not jx.is_recomputed(stack)
        operands = jx.versions.operands_of(eqn)
        values = [x.val if isinstance(x, Literal) else constants.get(id(x)) for x in operands]
        is_constant = not any(value is None for value in values)
        reads_one = any(jx.is_floating(x) and value == 1 for x, value in zip(operands, values, strict=True))
        if is_inner and reads_one and (is_constant or all(jx.shape_of(x) == () for x in operands)):
            yield is_constant
        if is_constant:
            constants |= {id(x): "computed" for x in eqn.outvars}
        structure = jx.structure_of(eqn)
        if isinstance(structure, jx.Loop):  # carries and slices differ between iterations
            values[structure.carry.start :] = [None] * (len(values) - structure.carry.start)
        for jaxpr, places in jx.entries(structure) if structure else ():
            opened, _ = jx.open_jaxpr(jaxpr)
            known = {id(x): values[i] for x, i in zip(opened.invars, places, strict=True) if values[i] is not None}
            yield from _has_constant_factors(opened.eqns, known, is_inner)


def _is_entered(eqn: Any) -> bool:
    """Whether an equation, or one inside it, is between the backward pass and `update`."""
    stack = eqn.source_info.name_stack
    is_end = _name_of(eqn) in (_LOSS, _SCALED) or _is_unscale(eqn) or CHECK in jx.marks_in(stack)
    return not is_end and (not _differentiates(eqn) or _holds(eqn, _is_mark))


def is_new_scale(eqn: Any) -> bool:
    """Whether an equation names the scale that `LossScale.init` returns."""
    return _name_of(eqn) == SCALE


def _is_mark(eqn: Any) -> bool:
    return _name_of(eqn) == _SCALED


def _name_of(eqn: Any) -> Any:
    return jx.versions.params_of(eqn).get("name")


def _is_unscale(eqn: Any) -> bool:
    return UNSCALE in jx.marks_in(eqn.source_info.name_stack)


def _differentiates(eqn: Any) -> bool:
    """Whether an equation is part of a derivative, or calls a function that computes one."""
    return _holds(eqn, lambda eqn: any(f(eqn.source_info.name_stack) for f in (jx.is_of_derivative, jx.is_backward)))


def _holds(eqn: Any, selects: Callable[[Any], bool]) -> bool:
    """Whether an equation, or one inside it, is selected."""
    inside = (inner for jaxpr in jx.inner_jaxprs(eqn) for *_, inner in jx.equations_in(jaxpr))
    return selects(eqn) or any(map(selects, inside))


def _where(eqns: Sequence[Any]) -> str:
    """Returns the line of the user, and that of a library which it calls, if there is one."""
    library = jx.lines_of(eqns)[1]
    return f"{jx.site_of(eqns).where}{library and f', in {library}'}"


def _tracers(tree: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(tree) if _is_traced(x)]


def _is_traced(x: Any) -> bool:
    return isinstance(x, jax.core.Tracer)
