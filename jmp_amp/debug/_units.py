"""By which power of the loss scale each value of a program is multiplied, found from its equations alone."""

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from jmp_amp._autocast import RULES, OpClass, Rule
from jmp_amp._jaxpr import Branches, Call, Loop, evaluate, is_inexact, open_jaxpr, structure_of
from jmp_amp.debug._location import location_of


class Unit(NamedTuple):
    """By which power of each loss scale a value is multiplied.

    Attributes:
        powers: one for each scale; zeros for true values.
        is_number: whether it was computed from scales and constants alone. Such may be compared with any number.
    """

    powers: tuple[Fraction, ...]
    is_number: bool = False


# What is 0, infinite or NaN throughout fits every unit.
Known = Unit | None


class Follower:
    """Follows some inputs of a program, the loss scales, through it."""

    def __init__(self, scales: Sequence[int]) -> None:
        self._scales = scales
        self._true, self._number = self._unit(), self._unit(is_number=True)
        self._faults: dict[str, None] = {}

    def faults(self, program: Any) -> list[str]:
        """Returns what is wrong in a closed jaxpr, in the order of its equations."""
        inputs = [self._true] * len(open_jaxpr(program)[0].invars)
        for k, i in enumerate(self._scales):
            inputs[i] = Unit(tuple(Fraction(int(j == k)) for j in range(len(self._scales))), is_number=True)
        self._follow(program, inputs, ())
        return list(self._faults)

    def _unit(self, powers: Sequence[Fraction] = (), *, is_number: bool = False) -> Unit:
        return Unit(tuple(powers) or (Fraction(0),) * len(self._scales), is_number)

    def _follow(self, jaxpr: Any, inputs: Sequence[Known], outer: tuple[JaxprEqn, ...]) -> list[Known]:

        def apply(eqn: JaxprEqn, operands: list[Known]) -> list[Known]:
            units = self._results(eqn, operands, (*outer, eqn))
            return [unit if is_inexact(var) else self._true for unit, var in zip(units, eqn.outvars, strict=True)]

        return evaluate(jaxpr, inputs, apply, self._constant, lambda atom: self._constant(atom.val))

    def _constant(self, x: Any) -> Known:
        if isinstance(x, jax.core.Tracer) or not jnp.issubdtype(jnp.result_type(x), jnp.inexact):
            return self._number
        values = np.asarray(x).ravel().astype(np.complex128)
        return None if np.all((values == 0) | ~np.isfinite(values)) else self._number

    def _results(self, eqn: JaxprEqn, operands: list[Known], path: tuple[JaxprEqn, ...]) -> list[Known]:
        name, params, rule = eqn.primitive.name, eqn.params, _rule_of(eqn)
        match None if rule and rule.reads else structure_of(eqn):
            case Call(jaxpr, places):
                return self._follow(jaxpr, [operands[i] for i in places], path)
            case Branches(jaxprs, places):
                branches = [self._follow(branch, [operands[i] for i in places], path) for branch in jaxprs]
                return [self._agreed(units, path, "returns from one branch") for units in zip(*branches, strict=True)]
            case Loop() as loop:
                return self._loop(loop, operands, path)
        if name in _PAIRWISE and len(operands) == len(eqn.outvars):
            return operands
        floats = [unit for unit, atom in zip(operands, eqn.invars, strict=True) if is_inexact(atom)]
        return [self._result(name, rule, params, floats, path)] * len(eqn.outvars)

    def _result(
        self, name: str, rule: Rule | None, params: Mapping[str, Any], floats: list[Known], path: tuple[JaxprEqn, ...]
    ) -> Known:
        if not floats:
            return self._true
        is_number = all(unit is None or unit.is_number for unit in floats)
        if name in _UNITLESS:
            return self._unit(is_number=is_number)
        if name in _POWERS:
            return self._times([(floats[0], _POWERS[name](params))])
        if name in _PRODUCTS or name == "div":
            return self._times([(unit, Fraction(-1 if name == "div" and i else 1)) for i, unit in enumerate(floats)])
        if name in _LINEAR or (rule is not None and rule.passes_on):
            return self._agreed(floats, path, _VERBS.get(name, f"gives `{name}`"))
        scaled = [unit for unit in floats if unit and any(unit.powers)]
        if scaled and (rule is None or rule.op_class is OpClass.ORIGINAL):
            return scaled[0]  # a solver or a kernel, which may be linear in it
        if scaled and not is_number:
            self._fault(path, f"takes `{name}` of", scaled[0])
        return self._unit(is_number=is_number)

    def _times(self, factors: Sequence[tuple[Known, Fraction]]) -> Known:
        if any(unit is None for unit, _ in factors):
            return None
        known = [(unit, power) for unit, power in factors if unit is not None]
        powers = [sum((unit.powers[k] * power for unit, power in known), Fraction(0)) for k in range(len(self._scales))]
        return Unit(tuple(powers), all(unit.is_number for unit, _ in known))

    def _agreed(self, units: Sequence[Known], path: tuple[JaxprEqn, ...], verb: str) -> Known:
        known = [unit for unit in units if unit is not None]
        if not known:
            return None
        different = {unit.powers for unit in known}
        is_number = all(unit.is_number for unit in known)
        if len(different) > 1 and not is_number:
            scaled, *_, other = sorted(known, key=lambda unit: unit.powers == self._true.powers)
            self._fault(path, verb, scaled, other)
        return Unit(max(different, key=lambda powers: [abs(power) for power in powers]), is_number)

    def _fault(self, path: tuple[JaxprEqn, ...], verb: str, unit: Unit, other: Unit | None = None) -> None:
        what = f"a value {_described(unit)}"
        what += "" if other is None else f" with one that is {_described(other)}"
        cure = _STILL_SCALED if sum(unit.powers) > 0 else _NEVER_SCALED
        self._faults[f"{location_of(path).line} {verb} {what}: {cure}"] = None

    def _loop(self, loop: Loop, operands: list[Known], path: tuple[JaxprEqn, ...]) -> list[Known]:
        consts, carry, xs = operands[loop.consts], operands[loop.carry], operands[loop.xs]
        while True:  # zeros take the unit of what replaces them, once
            before = dict(self._faults)
            outs = self._follow(loop.body, [*consts, *carry, *xs], path)
            new = [_entering(old, out) for old, out in zip(carry, outs[: loop.n_carry], strict=True)]
            if new == carry:
                break
            carry, self._faults = new, before
        after = [self._agreed(units, path, "replaces") for units in zip(carry, outs[: loop.n_carry], strict=True)]
        return [*after, *outs[loop.n_carry :]]


def _described(unit: Unit) -> str:
    power = next(filter(None, unit.powers), None)
    return "not scaled" if power is None else f"multiplied by the loss scale to the power {power}"


def _entering(old: Known, out: Known) -> Known:
    """What is known of a carry as it enters a loop, from what it was before and what the body returns."""
    if old is None or out is None:
        return old or out
    return old._replace(is_number=old.is_number and out.is_number)


_STILL_SCALED = (
    "gradients are still scaled here; unscale them first, by `dynamic_loss_scale` around all of the optimizer"
)
_NEVER_SCALED = (
    "gradients are unscaled that were not scaled by this scale, or unscaled twice; hand "
    "`loss_scale=amp.get_loss_scale(opt_state)` to `amp.value_and_grad`, and unscale in one place"
)
_VERBS = {
    "add": "adds",
    "add_any": "adds",
    "sub": "subtracts",
    "select_n": "chooses between",
    "max": "compares",
    "min": "compares",
    "clamp": "clips",
    "concatenate": "joins",
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), "compares"),
}
_POWERS: Mapping[str, Callable[[Mapping[str, Any]], Fraction]] = {
    "sqrt": lambda _: Fraction(1, 2),
    "rsqrt": lambda _: Fraction(-1, 2),
    "cbrt": lambda _: Fraction(1, 3),
    "square": lambda _: Fraction(2),
    "integer_pow": lambda params: Fraction(params["y"]),
}
_PRODUCTS = {"mul", "dot_general", "conv_general_dilated", "ragged_dot_general"}
_UNITLESS = {"is_finite", "sign", "argmax", "argmin"}
# Beside the ops that pass on the elements of their operands, their sums or differences.
_LINEAR = {
    *("convert_element_type", "reduce_precision", "real", "imag", "conj", "complex", "rem", "nextafter"),
    *("reduce_sum", "cumsum", "cummax", "cummin", "reduce_window_sum", "sort", "top_k"),
    *("psum", "psum_invariant", "pmax", "pmin", "reduce_scatter", "all_to_all"),
    *("eq", "ne", "lt", "le", "gt", "ge"),
}
_PAIRWISE = {"optimization_barrier", "psum", "psum_invariant", "sort", "copy", "split"}


def _rule_of(eqn: JaxprEqn) -> Rule | None:
    rule = RULES.get(eqn.primitive.name)
    return rule if isinstance(rule, Rule) or rule is None else rule(eqn.params, [atom.aval for atom in eqn.invars])
