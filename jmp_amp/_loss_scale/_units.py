"""A dimensional analysis of jaxprs: how each value depends on the loss scale, and what it was computed from."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jmp_amp import _jaxpr as jx
from jmp_amp._ops import OpClass, ResultKind, Rule, rule_of

# What a value was computed from: messages of errors, and marks, as these two and `UNSCALE`.
Origins = frozenset[str]
NONFINITE, BITS = "constants that are all inf or NaN", "the bits of scaled values"
ITS_OWN_SCALE = (
    "divide gradients by the scale that multiplied their loss: `update` returns the next one, so read the scale before "
    "it, and hand it to every optimizer, `tx.update(..., loss_scale=scale)`"
)


class Unit(NamedTuple):
    """The power of each loss scale that multiplies a value, and what else is known of the value.

    Attributes:
        powers: the power of each loss scale, all 0 for an unscaled value; None for a value that is compatible with
            every unit, such as 0, or one of which nothing is known.
        is_data_free: whether the value was computed from loss scales and constants alone. Such values are compatible
            with each other, whatever their units.
        is_small: whether the value is a constant that is added to avoid a division by 0.
        finds_nonfinite: for a flag that says whether scaled values are finite, `"each"` if it does so for each of them,
            `"all"` if for several together; else `""`.
        origins: what the analysis marked among the values that this one was computed from.
    """

    powers: tuple[Fraction, ...] | None = None
    is_data_free: bool = True
    is_small: bool = False
    finds_nonfinite: str = ""
    origins: Origins = frozenset()

    @property
    def is_scaled(self) -> bool:
        """Whether the value is data that a loss scale multiplies."""
        return not self.is_data_free and any(self.powers or ())


_EPSILON = 1e-4  # smaller constants avoid a division by 0, and clip nothing

# What an error message says of a primitive, if not "applies `primitive` to {}"; `{}` stands for its operands.
_PREDICATES = {
    **dict.fromkeys(("add", "add_any"), "adds {}"),
    "sub": "subtracts {}",
    "select_n": "selects between {}",
    **dict.fromkeys(("max", "min", "eq", "ne", "lt", "le", "gt", "ge"), "compares {}"),
    "clamp": "clips {}",
    "concatenate": "concatenates {}",
}


class UnitAnalysis:
    """Infers the unit of each value of a program, and collects an error for each equation with incompatible units.

    Values that are added, compared or selected between must have the same unit; exponentials and logarithms take values
    without a unit. The error is also an origin of the results of the equation. A subclass may word it.

    Attributes:
        unscaled: the unit of an unscaled value.
        scales: the unit of each loss scale.
        errors: the errors, in the order of the equations.
        decides: the origins of what ends a loop, which those of its results do not show.
        path: the equation that is read, after those that contain it.
    """

    def __init__(self, n_scales: int) -> None:
        """Takes the number of loss scales."""
        self.unscaled = Unit((Fraction(0),) * n_scales, is_data_free=False)
        self.scales = [Unit(tuple(Fraction(i == k) for i in range(n_scales))) for k in range(n_scales)]
        self.errors, self.decides = dict[str, None](), frozenset[str]()
        self.path: list[Any] = []

    def error(self, predicate: str, scaled: Unit) -> str:
        """Returns the message for an equation that does what `predicate` says, and has a scaled operand.

        The powers of `scaled` are None if each operand is multiplied by another scale.
        """
        return predicate

    def hides(self, flag: Unit) -> Origins:
        """Returns the origins of what an equation takes instead of scaled values that `flag` says are not finite."""
        return frozenset()

    def enter_loop(self, loop: jx.Loop, operands: list[Unit]) -> list[Unit]:
        """Returns the units of the inputs of the body of a loop, from those of the operands."""
        return [*operands[loop.consts], *operands[loop.carry], *operands[loop.xs]]

    def join_carry(self, init: Unit, out: Unit) -> Unit:
        """Returns the unit of a carry, from its initial unit and the unit that the body returns."""
        is_data_free = init.is_data_free and out.is_data_free
        powers = out.powers if init.powers is None else init.powers
        return init._replace(
            powers=powers, is_data_free=is_data_free, is_small=False, origins=init.origins | out.origins
        )

    def infer(self, jaxpr: Any, inputs: Sequence[Unit]) -> list[Unit]:
        """Returns the units of the results of a jaxpr."""
        return jx.evaluate(jaxpr, inputs, self.infer_equation, self.constant, lambda atom: self.constant(atom.val))

    def infer_equation(self, eqn: Any, operands: list[Unit]) -> list[Unit]:
        """Returns the units of the results of an equation, which may be one of a program that is still traced."""
        self.path.append(eqn)
        units = self._infer_equation(eqn, operands)
        self.path.pop()
        return units

    def constant(self, x: Any) -> Unit:
        """Returns the unit of a constant."""
        if isinstance(x, jax.core.Tracer) or not jnp.issubdtype(jnp.result_type(x), jnp.number):
            return self.unscaled._replace(is_data_free=True)
        values = np.asarray(x).astype(np.complex128)
        is_finite = np.isfinite(values)
        if np.all((values == 0) | ~is_finite):
            return Unit(origins=frozenset() if is_finite.any() else frozenset({NONFINITE}))
        is_small = bool(np.all(np.abs(values) <= _EPSILON))
        return self.unscaled._replace(is_data_free=True, is_small=is_small)

    def _infer_equation(self, eqn: Any, operands: list[Unit]) -> list[Unit]:
        rule, atoms = rule_of(eqn), jx.versions.operands_of(eqn)
        # A linear solve counts as one op: its result is linear in the right-hand side, however it iterates.
        match None if rule.demand else jx.structure_of(eqn):
            case jx.Call(jaxpr, inputs):
                return self.infer(jaxpr, [operands[i] for i in inputs])
            case jx.Branches(jaxprs, inputs):
                return self.infer_branches(jaxprs, [operands[i] for i in inputs], operands[0])
            case jx.Loop() as loop:
                return self._infer_loop(loop, operands)
        if eqn.primitive.name == "bitcast_convert_type" and BITS in operands[0].origins:
            return [Unit(is_data_free=False, origins=operands[0].origins)]  # as stochastic rounding changes the bits
        casts_integers = rule.is_cast and not jx.is_inexact(atoms[0])  # as of the 0 of `jnp.where(mask, x, 0)`
        if casts_integers or (rule.op_class is OpClass.FOLLOW and len(operands) == len(eqn.outvars) > 1):
            return operands
        origins = _join(operands)
        units = [unit for unit, atom in zip(operands, atoms, strict=True) if jx.is_inexact(atom)][: rule.n_values]
        flags = [unit for unit in operands if unit.finds_nonfinite]
        marks = any(unit.is_data_free and NONFINITE in unit.origins for unit in units)
        if rule.kind is ResultKind.SELECTED and flags and not marks and any(unit.is_scaled for unit in units):
            origins |= self.hides(flags[0])
        if eqn.primitive.name == "bitcast_convert_type" and any(unit.is_scaled for unit in units):
            origins |= {BITS}
        unit = self._infer_op(eqn, rule, units)
        unit = unit._replace(origins=origins | unit.origins)
        flag = self.unscaled._replace(
            is_data_free=unit.is_data_free,
            finds_nonfinite=_finds_nonfinite(eqn, rule, atoms, operands),
            origins=unit.origins,
        )
        return [unit if jx.is_inexact(var) else flag for var in eqn.outvars]

    def infer_branches(self, jaxprs: Sequence[Any], inputs: list[Unit], index: Unit) -> list[Unit]:
        """Returns the units of what one of several jaxprs returns."""
        branches = [self.infer(jaxpr, inputs) for jaxpr in jaxprs]
        units = [self._unify(units, "returns {} from different branches") for units in zip(*branches, strict=True)]
        hides = index.finds_nonfinite and any(unit.is_scaled for unit in units)
        origins = index.origins | (self.hides(index) if hides else frozenset())
        return [unit._replace(origins=unit.origins | origins) for unit in units]

    def _infer_op(self, eqn: Any, rule: Rule, units: list[Unit]) -> Unit:
        is_data_free = bool(units) and all(unit.is_data_free for unit in units)
        unscaled = self.unscaled._replace(is_data_free=is_data_free)
        if not units or rule.drops_unit:
            return unscaled
        exponents = _powers(eqn, rule)
        if exponents is not None:
            pairs = list(zip(units, exponents, strict=False))
            if any(unit.powers is None for unit, _ in pairs):
                return Unit(is_data_free=is_data_free)
            factors = [[power * n for power in unit.powers or ()] for unit, n in pairs]
            return Unit(tuple(sum(each, Fraction(0)) for each in zip(*factors, strict=True)), is_data_free)
        if rule.kind is ResultKind.SELECTED:  # a constant may stand in for a value: `jnp.where(norm > 0, norm, 1)`
            units = [unit for unit in units if any(unit.powers or ()) or not unit.is_data_free] or units
        predicate = _PREDICATES.get(eqn.primitive.name, f"applies `{eqn.primitive.name}` to {{}}")
        if rule.passes_on or rule.kind is ResultKind.TOTAL or rule.is_cast or rule.keeps_unit:
            return self._unify(units, predicate)
        if rule.is_decomposition and units[0].is_scaled:
            return Unit(is_data_free=False)  # the factors of a decomposition have different units
        scaled = [unit for unit in units if any(unit.powers or ())]
        if rule.op_class is OpClass.ORIGINAL:  # a solver or a kernel, which may be linear in this operand
            unknown = [unit for unit in units if unit.powers is None and not unit.is_data_free]
            return [*unknown, *scaled, unscaled][0]
        if scaled and not is_data_free:
            return unscaled._replace(origins=self.add_error(predicate, scaled[0]))
        return unscaled

    def _unify(self, units: Sequence[Unit], predicate: str) -> Unit:
        """Returns the common unit of several values; it is marked if they are incompatible."""
        origins, is_data_free = _join(units), all(unit.is_data_free for unit in units)
        large = [unit for unit in units if not unit.is_small and (unit.powers is not None or not unit.is_data_free)]
        known = [unit for unit in large or units if unit.powers is not None]
        if not known:
            return Unit(is_data_free=is_data_free, origins=origins)
        if len({unit.powers for unit in known}) > 1 and not is_data_free:
            scaled, *_, other = sorted(known, key=lambda unit: not any(unit.powers or ()))
            origins |= self.add_error(predicate, scaled, other)
        is_small = all(unit.is_small for unit in known)
        finds = next((unit.finds_nonfinite for unit in units if unit.finds_nonfinite), "")
        return Unit(max(unit.powers for unit in known if unit.powers), is_data_free, is_small, finds, origins)

    def add_error(self, predicate: str, *units: Unit) -> Origins:
        """Adds the error of an equation that does what `predicate` says to values of these units, and returns it."""
        said, scaled = [*map(describe_unit, units)], units[0]
        if said[1:] == said[:1]:
            said[1], scaled = said[1].replace("the loss scale", "another loss scale"), Unit()
        error = self.error(predicate.format(" and ".join(said)), scaled)
        self.errors[error] = None
        return frozenset({error})

    def _infer_loop(self, loop: jx.Loop, operands: list[Unit]) -> list[Unit]:
        carry = operands[loop.carry]
        while True:  # a carry that starts as zeros takes the unit that the body returns
            errors_before, inputs = dict(self.errors), operands.copy()
            inputs[loop.carry] = carry
            outs = self.infer(loop.body, self.enter_loop(loop, inputs))
            new = [self.join_carry(init, out) for init, out in zip(carry, outs[: loop.n_carry], strict=True)]
            if new == carry:
                break
            carry, self.errors = new, errors_before
        if loop.cond is not None:
            self.decides |= _join(self.infer(loop.cond, [*operands[loop.cond_consts], *carry]))
        pairs = zip(carry, outs[: loop.n_carry], strict=True)
        return [*[self._unify(units, "carries {} through a loop") for units in pairs], *outs[loop.n_carry :]]


def describe_unit(unit: Unit) -> str:
    """Returns the unit in words, as `"a value multiplied by the loss scale"`."""
    powers = [power for power in unit.powers or () if power]
    power = next(iter(powers), 0)
    if sum(powers) == 0 != power:
        return "a value multiplied by one loss scale and divided by another"
    if abs(power) not in (0, 1):
        return f"a value multiplied by the loss scale to the power {power}"
    verb = "multiplied" if power > 0 else "divided"
    return f"a value {verb} by the loss scale" if power else "an unscaled value"


def _powers(eqn: Any, rule: Rule) -> Sequence[int | Fraction] | None:
    """Returns the powers of the units of the operands, whose product is the unit of the result; None if it is not one.

    The exponent of a `pow` counts if it is a constant. float32 rounds 1/3.
    """
    if rule.kind in (ResultKind.PRODUCT, ResultKind.OUTER_PRODUCT, ResultKind.MATRIX_PRODUCT, ResultKind.QUOTIENT):
        return 1, -1 if rule.kind is ResultKind.QUOTIENT else 1
    power = rule.power
    if rule.kind is ResultKind.POWER and power is None:
        exponent = jx.versions.operands_of(eqn)[1]
        power = float(exponent.val) if isinstance(exponent, Literal) else None
    return None if power is None else [Fraction(power).limit_denominator(100)]


def _finds_nonfinite(eqn: Any, rule: Rule, atoms: Sequence[Any], operands: Sequence[Unit]) -> str:
    name, compares = eqn.primitive.name, rule.keeps_unit and jx.dtype_of(eqn.outvars[0]) == np.bool_
    is_test = name == "is_finite" or (name == "ne" and atoms[0] is atoms[1])
    is_test |= compares and any(NONFINITE in x.origins for x in operands if x.is_data_free)
    if is_test and any(x.is_scaled for x in operands):
        return "all" if jx.shape_of(eqn.outvars[0]) == () else "each"
    found = next((x.finds_nonfinite for x in operands if x.finds_nonfinite), "")
    return "all" if found and name.startswith("reduce") else found


def _join(units: Sequence[Unit]) -> Origins:
    return frozenset[str]().union(*(unit.origins for unit in units))
