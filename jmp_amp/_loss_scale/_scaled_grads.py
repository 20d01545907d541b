"""Checks, while a step is traced, that gradients were scaled, once, and what was done to them before `update`."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Literal, Var

from jmp_amp import _jaxpr as jx
from jmp_amp._loss_scale._gradients import CHECK, UNSCALE, at, is_overwritten
from jmp_amp._loss_scale._units import ITS_OWN_SCALE, Origins, Unit, UnitAnalysis, describe_unit

# The names of a new scale, of one that `set_loss_scale` puts into a state, and of the loss and the gradients that
# `value_and_grad` returns. They change no program.
SCALE, SET_SCALE, _LOSS, _SCALED = "amp.loss_scale", "amp.set_loss_scale", "amp.loss", "amp.scaled_grads"
_UNKNOWN = Unit(is_data_free=False)
_DIVIDES = "`update` divides gradients by the loss scale: leave that to it, or multiply by the scale again at the end"
_read_from = jx.Cache()  # of a traced scale, what is in the states that it was read from
_scale_of = jx.Cache()  # of traced gradients, the scale of their loss


def mark_scaled(loss: Any, grads: Any) -> tuple[Any, Any]:
    """Returns an unscaled loss and gradients of it times a scale, those that are traced named for `check_scaled`."""

    def mark(path: Any, x: Any, name: str = _SCALED) -> Any:
        is_marked = _is_traced(x) and jx.is_inexact(x) and not is_overwritten(path, x)
        return checkpoint_name(x, name) if is_marked else x

    return mark((), loss, _LOSS), jax.tree.map_with_path(mark, grads)


def note_scale(grads: Any, scale: Any) -> None:
    """Keeps, for `check_scaled`, which traced scale, if it is read from a state, multiplies marked gradients."""
    if _is_traced(source := jx.versions.source_of(scale)) and _read_from(source, None, list):
        for x in _tracers(grads):
            _scale_of(jx.versions.source_of(x), None, lambda: weakref.ref(source))


def note_state(scale: Any, states: Any) -> None:
    """Keeps, for `check_scaled`, that what states of optimizers hold beside a traced scale is not multiplied by it."""
    if _is_traced(source := jx.versions.source_of(scale)):
        tracers = map(jx.versions.source_of, _tracers(states))
        _read_from(source, None, list).extend(weakref.ref(x) for x in tracers if _is_traced(x) and x is not source)


def check_scaled(grads: Any, scale: Any, params: Any, cure: str, may_be: str) -> None:
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
        may_be: what may have multiplied the loss in place of the scale: `"equal"` for that of another state, which is
            equal, `"number"` for a number too.
    """
    pairs = jax.tree.leaves_with_path(grads)
    leaves = [(path, x) for path, x in pairs if _is_traced(x) and not is_overwritten(path, x)]
    if not leaves or not (_is_traced(scale) or np.any(np.asarray(scale) != 1)):
        return
    for path, x in leaves[:4]:
        if _is_unscaled(x):
            raise ValueError(_unscaled_before(path))
    if error := _BeforeUpdate(scale, params, cure, has_others=not may_be).find_error(leaves):
        raise ValueError(error)
    is_traced = _is_traced(scale) and may_be != "number"
    if is_traced and not _may_depend_on([x for _, x in leaves[:4]], scale, params):
        raise ValueError(
            f"the gradient {at(leaves[0][0])} does not depend on the loss scale, so it must not be divided by "
            "it; write `amp.value_and_grad(loss_fn, opt_state=opt_state)`, disable loss scaling with "
            "`dynamic_loss_scale(inner, LossScale.none())`, or pass the factor of the loss as "
            "`tx.update(..., loss_scale=number)`"
        )


class _BeforeUpdate(UnitAnalysis):
    """The units of what a step does between the backward pass and `update`."""

    def __init__(self, scale: Any, params: Any, cure: str, *, has_others: bool) -> None:
        """Takes the scale, the parameters, what to do with a transformation, and whether other scales are wrong."""
        super().__init__(2)  # the second scale is that of another state
        self._own = scale if has_others else None
        self._cure = f"between `amp.value_and_grad` and `update`, gradients are multiplied by the loss scale: {cure}"
        self._gradient = self.scales[0]._replace(is_data_free=False)
        references = _read_from(source, None, list) if _is_traced(source := jx.versions.source_of(scale)) else []
        unscaled = [*_tracers(params), *(x for ref in references if (x := ref()) is not None)]
        arguments = [x for x in unscaled if jx.versions.parent_of(jx.versions.source_of(x)) is None]
        self._known = {id(jx.versions.variable_of(x)): self.unscaled for x in arguments} | {
            id(jx.versions.variable_of(scale)): self.scales[0]._replace(origins=frozenset({SCALE}))
        }

    def find_error(self, leaves: Sequence[tuple[Any, Any]]) -> str | None:
        """Returns what was done to gradients, the tracers at these paths, that is wrong for scaled ones, and a cure."""
        tracers = [x for _, x in leaves]
        behind = jx.tracers_behind(*tracers, enters=_is_entered, with_flags=True)
        if not any(_holds(eqn, _is_mark) for eqn in _parents(behind)):
            return None
        names = self._find_other(behind)
        units = _infer_units(self, behind, tracers, self._known, _UNKNOWN)
        for error in self.errors:
            if any(error in unit.origins for unit in units):
                return error
        for (path, x), unit in zip(leaves, units, strict=True):
            if not unit.is_data_free and unit.powers not in (None, self._gradient.powers):
                if UNSCALE in unit.origins:
                    return _unscaled_before(path)
                if names and unit.powers == self.scales[1].powers:
                    return _of_another_scale(path, *names)
                eqn = jx.versions.parent_of(jx.versions.source_of(x))
                where = f"{_where([eqn])}, " if eqn is not None else ""
                cure = self._cure if any(unit.powers) or SCALE not in unit.origins else _DIVIDES
                return f"{where}the gradient {at(path)} becomes {describe_unit(unit)}; {cure}"
        return None

    def _find_other(self, behind: Sequence[Any]) -> tuple[str, str] | None:
        """Returns the names of the scale of another state that multiplies some of these gradients, and of the own one.

        Both are arguments, or are computed from different ones.
        """
        found = None
        for x in behind if _is_traced(self._own) else ():
            if (eqn := jx.versions.parent_of(x)) is not None and _is_mark(eqn):
                scales = _scale_of(x, None, lambda: lambda: None)(), self._own
                names = [jx.versions.argument_names(jx.tracers_behind(scale), self._own) for scale in scales]
                if all(names) and {*names[0]}.isdisjoint(names[1]):
                    # Behind a scale that a loop returns is all that the loop reads.
                    other, own = (max(each, key=lambda name: name.endswith("loss_scale")) for each in names)
                    found = other, own
                    self._known[id(jx.versions.variable_of(scales[0]))] = self.scales[1]
                    self._known[id(jx.versions.variable_of(x))] = self.scales[1]._replace(is_data_free=False)
        return found

    def error(self, predicate: str, scaled: Unit) -> str:
        """Names the line."""
        return f"{_where(self.path)}, the step {predicate}; {ITS_OWN_SCALE if scaled.powers is None else self._cure}"

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
        f"the gradient {at(path)} was already unscaled, by `unscale_and_check`, `dynamic_loss_scale` or "
        "`LossScale.unscale`; keep only one, `dynamic_loss_scale` around the whole optimizer if there is one"
    )


def _of_another_scale(path: Any, other: str, own: str) -> str:
    return (
        f"the gradient {at(path)} was multiplied by the loss scale `{other}`, but is divided by `{own}`, and "
        "these differ once one of them backs off alone; hand on the scale that multiplied the loss, `tx.update(..., "
        "loss_scale=scale)`, or let both states skip together, so that their scales stay equal: pass `grads_finite="
        "amp.all_finite(grads)`, of the gradients of both, to each `update`"
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
            units.setdefault(id(jx.versions.variable_of(tracer)), argument)
    for eqn in _parents(behind):
        found = analysis.infer_equation(eqn, [unit_of(atom) for atom in jx.versions.operands_of(eqn)])
        for var, unit in zip(eqn.outvars, found, strict=True):
            units.setdefault(id(var), unit)
    return [unit_of(jx.versions.variable_of(x)) for x in ends]


def _is_unscaled(grad: Any) -> bool:
    """Whether a gradient is the result of `unscale`, or of transformations of it.

    A gradient is not if it was differentiated after that, as where a loss reads updated parameters. It may not be if an
    argument is behind both the unscaled gradients and what was done to them: that may have scaled them again.
    """
    tracers = jx.tracers_behind(grad, enters=lambda eqn: not (_is_unscale(eqn) or _differentiates(eqn)))
    unscaled = [x for x in tracers if (eqn := jx.versions.parent_of(x)) is not None and _is_unscale(eqn)]
    return bool(unscaled) and _arguments(tracers).isdisjoint(_arguments(jx.tracers_behind(*unscaled)))


def _may_depend_on(grads: Sequence[Any], scale: Any, params: Any) -> bool:
    """Whether gradients may be those of a loss times the scale, or of no loss at all; the first reason is enough."""
    behind, sources = jx.tracers_behind(grads[0]), jx.tracers_behind(scale, with_flags=True)
    ids, own = set(map(id, jx.tracers_behind(scale))), {id(jx.versions.source_of(x)) for x in _tracers(params)}
    shapes = (), jx.shape_of(jx.versions.source_of(scale))  # under `vmap`, each example may have a scale
    return (
        # The scale is a constant, as `set_loss_scale` writes; the gradient may depend on an equal one.
        not (_arguments(sources) or any(map(is_new_scale, _parents(sources))))
        or any(id(x) in ids for x in behind)
        or not any(map(_differentiates, _parents(behind)))
        # An argument changed the gradient after the backward pass.
        or bool(_arguments(jx.tracers_behind(grads[0], enters=lambda eqn: not _differentiates(eqn))))
        or any(_multiplies_all(x, grads) for x in behind if id(x) not in own and _can_be_scale(x, shapes))
    )


def _can_be_scale(x: Any, shapes: Sequence[Any]) -> bool:
    """Whether a traced value is a floating argument, or was computed from arguments and has the shape of a scale."""
    eqn = jx.versions.parent_of(x)
    is_computed = eqn is not None and not _differentiates(eqn) and bool(_arguments(jx.tracers_behind(x)))
    return jx.is_floating(x) and (eqn is None or (is_computed and jx.shape_of(x) in shapes))


def _multiplies_all(candidate: Any, grads: Sequence[Any]) -> bool:
    """Whether a traced value may be a factor of all gradients, as one of a single term of the loss is not."""
    analysis = UnitAnalysis(1)  # an origin says that a result is a sum of different powers
    unit = analysis.scales[0]._replace(is_data_free=False)
    known = {id(jx.versions.variable_of(candidate)): unit}
    ends = _infer_units(analysis, jx.tracers_behind(*grads), grads, known, argument=analysis.unscaled)
    return all(not end.origins and end.powers in (None, unit.powers) for end in ends)


def _parents(tracers: Iterable[Any]) -> list[Any]:
    """Returns the equations that computed tracers, each once."""
    return list({id(eqn): eqn for x in tracers if (eqn := jx.versions.parent_of(x)) is not None}.values())


def _arguments(tracers: Iterable[Any]) -> set[int]:
    """Returns the ids of the tracers that no equation computed."""
    return {id(x) for x in tracers if jx.versions.parent_of(x) is None}


def _is_entered(eqn: Any) -> bool:
    """Whether an equation, or one inside it, is between the backward pass and `update`."""
    stack = eqn.source_info.name_stack
    is_end = _name_of(eqn) in (_LOSS, _SCALED) or _is_unscale(eqn) or CHECK in jx.marks_in(stack)
    return not is_end and (not _differentiates(eqn) or _holds(eqn, _is_mark))


def is_new_scale(eqn: Any) -> bool:
    """Whether an equation names the scale that `LossScale.init` returns."""
    return _name_of(eqn) == SCALE


def is_set_scale(eqn: Any) -> bool:
    """Whether an equation names a scale that `set_loss_scale` puts into a state."""
    return _name_of(eqn) == SET_SCALE


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
