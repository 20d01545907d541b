"""Dimensional analysis of a program in which the loss scales are the base units."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from jmp_amp._autocast import RULES, OpClass, Rule
from jmp_amp._jaxpr import Branches, Call, Loop, evaluate, is_inexact, open_jaxpr, structure_of
from jmp_amp.debug._location import location_of
from jmp_amp.debug._unit_rules import LINEAR, PAIRWISE, POWERS, PREDICATES, PRODUCTS, UNITLESS


class Unit(NamedTuple):
    """The power of each loss scale that multiplies a value.

    Attributes:
        powers: the power of each loss scale; all 0 for an unscaled value.
        is_data_free: whether the value was computed from loss scales and constants alone. Such a value is compatible
            with every unit.
    """

    powers: tuple[Fraction, ...]
    is_data_free: bool = False


# None is the unit of constants that contain only 0, infinities and NaN; it is compatible with every unit.
OptionalUnit = Unit | None


class UnitChecker:
    """Infers the unit of each value of a program and collects an error for each equation with incompatible units.

    Attributes:
        scales: the indices of the program's inputs that are loss scales.
    """

    def __init__(self, scales: Sequence[int]) -> None:
        self.scales = scales
        self._errors: dict[str, None] = {}

    def errors(self, program: Any) -> list[str]:
        """Returns the errors of a closed jaxpr, in the order of its equations."""
        inputs = [self._unscaled()] * len(open_jaxpr(program)[0].invars)
        for k, i in enumerate(self.scales):
            inputs[i] = Unit(tuple(Fraction(int(j == k)) for j in range(len(self.scales))), is_data_free=True)
        self._infer(program, inputs, ())
        return list(self._errors)

    def _unscaled(self, *, is_data_free: bool = False) -> Unit:
        return Unit((Fraction(0),) * len(self.scales), is_data_free)

    def _infer(self, jaxpr: Any, inputs: Sequence[OptionalUnit], outer: tuple[JaxprEqn, ...]) -> list[OptionalUnit]:
        """Returns the units of the results of a jaxpr that the equations `outer` contain."""

        def apply(eqn: JaxprEqn, operands: list[OptionalUnit]) -> list[OptionalUnit]:
            units = self._infer_equation(eqn, operands, (*outer, eqn))
            return [unit if is_inexact(var) else self._unscaled() for unit, var in zip(units, eqn.outvars, strict=True)]

        return evaluate(jaxpr, inputs, apply, self._constant, lambda atom: self._constant(atom.val))

    def _constant(self, x: Any) -> OptionalUnit:
        if isinstance(x, jax.core.Tracer) or not jnp.issubdtype(jnp.result_type(x), jnp.inexact):
            return self._unscaled(is_data_free=True)
        values = np.asarray(x).ravel().astype(np.complex128)
        return None if np.all((values == 0) | ~np.isfinite(values)) else self._unscaled(is_data_free=True)

    def _infer_equation(
        self, eqn: JaxprEqn, operands: list[OptionalUnit], path: tuple[JaxprEqn, ...]
    ) -> list[OptionalUnit]:
        rule = _rule_of(eqn)
        # A linear solve counts as one op: its result is linear in the right-hand side, however it iterates.
        match None if rule and rule.reads else structure_of(eqn):
            case Call(jaxpr, inputs):
                return self._infer(jaxpr, [operands[i] for i in inputs], path)
            case Branches(jaxprs, inputs):
                branches = [self._infer(jaxpr, [operands[i] for i in inputs], path) for jaxpr in jaxprs]
                return [
                    self._unify(units, path, "returns from different branches") for units in zip(*branches, strict=True)
                ]
            case Loop() as loop:
                return self._infer_loop(loop, operands, path)
        if eqn.primitive.name in PAIRWISE and len(operands) == len(eqn.outvars):
            return operands
        units = [unit for unit, atom in zip(operands, eqn.invars, strict=True) if is_inexact(atom)]
        return [self._infer_op(eqn, rule, units, path)] * len(eqn.outvars)

    def _infer_op(
        self, eqn: JaxprEqn, rule: Rule | None, units: list[OptionalUnit], path: tuple[JaxprEqn, ...]
    ) -> OptionalUnit:
        name = eqn.primitive.name
        if not units:
            return self._unscaled()
        is_data_free = all(unit is None or unit.is_data_free for unit in units)
        if name in UNITLESS:
            return self._unscaled(is_data_free=is_data_free)
        if name in POWERS and (power := POWERS[name](eqn)) is not None:
            return _product([(units[0], power)])
        if name in PRODUCTS:
            return _product([(unit, Fraction(power)) for unit, power in zip(units, PRODUCTS[name], strict=False)])
        if name == "select_n":  # a constant may stand in for a value: `jnp.where(norm > 0, norm, 1)`
            units = [unit for unit in units if not (unit and unit.is_data_free and not any(unit.powers))] or units
        if name in LINEAR or (rule is not None and rule.passes_on):
            return self._unify(units, path, PREDICATES.get(name, f"applies `{name}` to {{}}"))
        scaled = [unit for unit in units if unit and any(unit.powers)]
        if scaled and (rule is None or rule.op_class is OpClass.ORIGINAL):
            return scaled[0]  # a solver or a kernel, which may be linear in this operand
        if scaled and not is_data_free:
            self._add_error(path, f"applies `{name}` to {{}}", scaled[0])
        return self._unscaled(is_data_free=is_data_free)

    def _unify(self, units: Sequence[OptionalUnit], path: tuple[JaxprEqn, ...], predicate: str) -> OptionalUnit:
        """Returns the common unit of several values; adds an error if they are incompatible."""
        known = [unit for unit in units if unit is not None]
        if not known:
            return None
        different = {unit.powers for unit in known}
        is_data_free = all(unit.is_data_free for unit in known)
        if len(different) > 1 and not is_data_free:
            scaled, *_, other = sorted(known, key=lambda unit: not any(unit.powers))
            self._add_error(path, predicate, scaled, other)
        return Unit(max(different), is_data_free)

    def _add_error(self, path: tuple[JaxprEqn, ...], predicate: str, unit: Unit, other: Unit | None = None) -> None:
        values = _describe(unit) if other is None else f"{_describe(unit)} and {_describe(other)}"
        cure = _STILL_SCALED if sum(unit.powers) > 0 else _NEVER_SCALED
        self._errors[f"{location_of(path).where}, the program {predicate.format(values)}: {cure}"] = None

    def _infer_loop(self, loop: Loop, operands: list[OptionalUnit], path: tuple[JaxprEqn, ...]) -> list[OptionalUnit]:
        consts, carry, xs = operands[loop.consts], operands[loop.carry], operands[loop.xs]
        while True:  # a carry that starts as zeros takes the unit that the body returns
            errors_before = dict(self._errors)
            outs = self._infer(loop.body, [*consts, *carry, *xs], path)
            new = [_join_carry(init, out) for init, out in zip(carry, outs[: loop.n_carry], strict=True)]
            if new == carry:
                break
            carry, self._errors = new, errors_before
        predicate = "carries {} through a loop"
        results = [self._unify(units, path, predicate) for units in zip(carry, outs[: loop.n_carry], strict=True)]
        return [*results, *outs[loop.n_carry :]]


def _product(factors: Sequence[tuple[OptionalUnit, Fraction]]) -> OptionalUnit:
    """Returns the unit of a product of values, each to a power."""
    known = [(unit, power) for unit, power in factors if unit is not None]
    if len(known) < len(factors):
        return None
    powers = zip(*([p * power for p in unit.powers] for unit, power in known), strict=True)
    return Unit(tuple(sum(of_scale, Fraction(0)) for of_scale in powers), all(unit.is_data_free for unit, _ in known))


def _join_carry(init: OptionalUnit, out: OptionalUnit) -> OptionalUnit:
    """Returns the unit of a carry, from its initial unit and the unit that the body returns."""
    if init is None or out is None:
        return init or out
    return init._replace(is_data_free=init.is_data_free and out.is_data_free)


def _describe(unit: Unit) -> str:
    power = next(filter(None, unit.powers), None)
    if power is None:
        return "an unscaled value"
    if abs(power) == 1:
        return f"a value {'multiplied' if power > 0 else 'divided'} by the loss scale"
    return f"a value multiplied by the loss scale to the power {power}"


def _rule_of(eqn: JaxprEqn) -> Rule | None:
    rule = RULES.get(eqn.primitive.name)
    return rule if isinstance(rule, Rule) or rule is None else rule(eqn.params, [atom.aval for atom in eqn.invars])


_STILL_SCALED = (
    "the gradients are still scaled here; unscale them first, with `dynamic_loss_scale` around the whole optimizer"
)
_NEVER_SCALED = (
    "the gradients are unscaled twice, or were never scaled by this scale, or a factor comes from the norm of "
    "gradients that are still scaled; pass `opt_state=opt_state` to `amp.value_and_grad`, unscale once, then clip"
)
