"""`check_loss_scaling`: checks that a train step scales and unscales its gradients consistently."""

import functools
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal

from jmp_amp import _jaxpr as jx
from jmp_amp._autocast import OpClass, ResultKind, Rule, rule_of
from jmp_amp._calls import transformation, warn
from jmp_amp._loss_scale import LossScaleState
from jmp_amp.debug._report import check_callable, location_of

_MAX_ERRORS = 5
_STILL_SCALED = (
    "the gradients are still scaled here; unscale them first, with `dynamic_loss_scale` around the whole optimizer"
)
_NEVER_SCALED = (
    "the gradients are unscaled twice, or were never scaled by this scale, or a factor comes from the norm of "
    "gradients that are still scaled; pass `opt_state=opt_state` to `amp.value_and_grad`, unscale once, then clip"
)


def _powers(eqn: JaxprEqn, rule: Rule) -> Sequence[int | Fraction] | None:
    """Returns the powers of the units of the operands, whose product is the unit of the result; None if it is not one.

    The exponent of a `pow` counts if it is a constant. float32 rounds 1/3.
    """
    if rule.kind in (ResultKind.PRODUCT, ResultKind.OUTER_PRODUCT, ResultKind.MATRIX_PRODUCT, ResultKind.QUOTIENT):
        return 1, -1 if rule.kind is ResultKind.QUOTIENT else 1
    power = rule.power
    if rule.kind is ResultKind.POWER and power is None and isinstance(eqn.invars[1], Literal):
        power = float(eqn.invars[1].val)
    return None if power is None else [Fraction(power).limit_denominator(100)]


_HIDES = (
    "replaces non-finite values of gradients that are still scaled, so that the loss scale does not see overflows: "
    "leave them in; `dynamic_loss_scale` skips the step"
)
_IS_LOGGED = "divide it by the scale, or log `amp.metrics(opt_state)['grad_norm']`"


# What an error message says of a primitive, if not "applies `primitive` to {}"; `{}` stands for its operands.
_PREDICATES = {
    **dict.fromkeys(("add", "add_any"), "adds {}"),
    "sub": "subtracts {}",
    "select_n": "selects between {}",
    **dict.fromkeys(("max", "min", "eq", "ne", "lt", "le", "gt", "ge"), "compares {}"),
    "clamp": "clips {}",
    "concatenate": "concatenates {}",
}


@transformation
def check_loss_scaling(step: Callable) -> Callable[..., None]:
    """Returns a function that raises if a train step does not scale and unscale its gradients consistently.

    It traces `step` and runs nothing. The check is a dimensional analysis with the loss scale as its unit: the loss has
    no unit, the scaled loss and its gradients have the unit of the scale, and unscaled gradients have none. Values that
    are added, compared or selected between must have the same unit; exponentials and logarithms take values without a
    unit. The check finds these errors, in any optimizer:

    - The loss is not scaled, or scaled by another scale than the one that divides the gradients. If the step uses
      `dynamic_loss_scale`, tracing the step already raises for this.
    - The gradients are unscaled twice, in part, or not at all, before they reach the optimizer state or the parameters.
    - The gradients are clipped, or weight decay or noise is added, while they are scaled.

    It warns of what may be intended: `jnp.nan_to_num` of scaled gradients, and scalar results that are scaled, such as
    a logged norm of gradients.

    Args:
        step: the train step, jitted or not. Its arguments contain the loss scale, as the state of `dynamic_loss_scale`
            or as a `LossScaleState`.

    Returns:
        A function with the signature of `step` that returns None. Its array arguments may be `jax.ShapeDtypeStruct`.

    Raises:
        TypeError: `step` is not callable.
        ValueError: the returned function found an error, and names its lines; or its arguments contain no loss scale.

    Examples:
        >>> import jax, jax.numpy as jnp, optax
        >>> import jmp_amp as amp
        >>> tx = amp.dynamic_loss_scale(optax.sgd(0.1))
        >>> def step(params, state, decay=0.0):
        ...     scale = amp.get_loss_scale(state)
        ...     loss, grads = amp.value_and_grad(lambda w: jnp.sum(w**2), loss_scale=scale)(params)
        ...     grads = grads + decay * params if decay else grads
        ...     updates, state = tx.update(grads, state, params)
        ...     return optax.apply_updates(params, updates), state, loss
        >>> params = jnp.ones(3)
        >>> amp.debug.check_loss_scaling(step)(params, tx.init(params))
        >>> amp.debug.check_loss_scaling(step)(params, tx.init(params), decay=0.1)
        Traceback (most recent call last):
          ...
        ValueError: `step` does not scale and unscale its gradients consistently:
        - at ... (step), the program adds a value multiplied by the loss scale and an unscaled value: the ...

    References:
        torch's `GradScaler` records a stage for each optimizer, and raises if `unscale_` is called twice.
    """
    check_callable(step, "check_loss_scaling")

    @functools.wraps(step, updated=())
    def check(*args: Any, **kwargs: Any) -> None:
        args, kwargs = jx.as_jit_takes(step, args, kwargs, jax.ShapeDtypeStruct)
        program, arrays, rebuild = jx.trace_call(step, args, kwargs, jax.ShapeDtypeStruct)
        # The loss scale of each `LossScaleState`, by its position among the arrays.
        states = jax.tree.leaves((args, kwargs), is_leaf=lambda x: isinstance(x, LossScaleState))
        found = [jax.tree.leaves(x.loss_scale)[0] for x in states if isinstance(x, LossScaleState)]
        is_scale = [any(x is scale for scale in found) for x in arrays]
        if not any(is_scale):
            raise ValueError(
                "the arguments contain no loss scale; pass the state of `dynamic_loss_scale`, or a `LossScaleState`"
            )
        checker = UnitChecker(sum(is_scale))
        results = checker.infer(program, jx.combine(is_scale, checker.scales, [checker.unscaled] * len(arrays)))
        if checker.errors:
            lines = "\n".join(f"- {error}" for error in list(checker.errors)[:_MAX_ERRORS])
            raise ValueError(f"`step` does not scale and unscale its gradients consistently:\n{lines}")
        is_scalar = [jx.shape_of(var) == () for var in jx.open_jaxpr(program)[0].outvars]
        scaled = [x if ok and _is_scaled(x) else None for x, ok in zip(results, is_scalar, strict=True)]
        for path, x in jax.tree.leaves_with_path(rebuild(scaled), is_leaf=lambda x: isinstance(x, Unit)):
            if isinstance(x, Unit):
                name = jax.tree_util.keystr(path)
                checker.warnings[f"`step` returns `result{name}`, {_describe(x)}: {_IS_LOGGED}"] = None
        for warning in checker.warnings:
            warn(warning)

    return check


class Unit(NamedTuple):
    """The power of each loss scale that multiplies a value.

    Attributes:
        powers: the power of each loss scale; all 0 for an unscaled value.
        is_data_free: whether the value was computed from loss scales and constants alone. Such values are compatible
            with each other, whatever their units.
        finds_nonfinite: whether the value is a flag for each element of scaled gradients: whether it is finite, or NaN.
    """

    powers: tuple[Fraction, ...]
    is_data_free: bool = False
    finds_nonfinite: bool = False


# None is the unit of constants that contain only 0, infinities and NaN; it is compatible with every unit.
OptionalUnit = Unit | None


class UnitChecker:
    """Infers the unit of each value of a program and collects an error for each equation with incompatible units.

    Attributes:
        unscaled: the unit of an unscaled value.
        scales: the unit of each loss scale.
        errors: the errors, in the order of the equations.
        warnings: what may be intended.
    """

    def __init__(self, n_scales: int) -> None:
        """Takes the number of loss scales."""
        self.unscaled = Unit((Fraction(0),) * n_scales)
        self.scales = [Unit(tuple(Fraction(i == k) for i in range(n_scales)), True) for k in range(n_scales)]
        self.errors, self.warnings = dict[str, None](), dict[str, None]()
        self._path: list[JaxprEqn] = []  # the equation, after those that contain it

    def infer(self, jaxpr: Any, inputs: Sequence[OptionalUnit]) -> list[OptionalUnit]:
        """Returns the units of the results of a jaxpr."""

        def apply(eqn: JaxprEqn, operands: list[OptionalUnit]) -> list[OptionalUnit]:
            self._path.append(eqn)
            units = self._infer_equation(eqn, operands)
            self._path.pop()
            return units

        return jx.evaluate(jaxpr, inputs, apply, self._constant, lambda atom: self._constant(atom.val))

    def _constant(self, x: Any) -> OptionalUnit:
        if not isinstance(x, jax.core.Tracer) and jnp.issubdtype(jnp.result_type(x), jnp.number):
            values = np.asarray(x).astype(np.complex128)
            if np.all((values == 0) | ~np.isfinite(values)):
                return None
        return self.unscaled._replace(is_data_free=True)

    def _infer_equation(self, eqn: JaxprEqn, operands: list[OptionalUnit]) -> list[OptionalUnit]:
        rule = rule_of(eqn)
        # A linear solve counts as one op: its result is linear in the right-hand side, however it iterates.
        match None if rule.demand else jx.structure_of(eqn):
            case jx.Call(jaxpr, inputs):
                return self.infer(jaxpr, [operands[i] for i in inputs])
            case jx.Branches(jaxprs, inputs):
                branches = [self.infer(jaxpr, [operands[i] for i in inputs]) for jaxpr in jaxprs]
                return [self._unify(units, "returns from different branches") for units in zip(*branches, strict=True)]
            case jx.Loop() as loop:
                return self._infer_loop(loop, operands)
        casts_integers = rule.is_cast and not jx.is_inexact(eqn.invars[0])  # as of the 0 of `jnp.where(mask, x, 0)`
        if casts_integers or (rule.op_class is OpClass.FOLLOW and len(operands) == len(eqn.outvars) > 1):
            return operands
        units = [unit for unit, atom in zip(operands, eqn.invars, strict=True) if jx.is_inexact(atom)]
        replaces_nonfinite = rule.kind is ResultKind.SELECTED and any(x and x.finds_nonfinite for x in operands)
        if replaces_nonfinite and any(map(_is_scaled, units)):
            self.warnings[f"{location_of(self._path).where}, `step` {_HIDES}"] = None
        unit = self._infer_op(eqn, rule, units)
        flag = self.unscaled._replace(finds_nonfinite=_finds_nonfinite(eqn, operands))
        return [unit if jx.is_inexact(var) else flag for var in eqn.outvars]

    def _infer_op(self, eqn: JaxprEqn, rule: Rule, units: list[OptionalUnit]) -> OptionalUnit:
        name = eqn.primitive.name
        is_data_free = bool(units) and all(unit is None or unit.is_data_free for unit in units)
        unscaled = self.unscaled._replace(is_data_free=is_data_free)
        if not units or rule.drops_unit:
            return unscaled
        exponents = _powers(eqn, rule)
        if exponents is not None:
            if None in units[: len(exponents)]:
                return None
            factors = [[power * n for power in unit.powers] for unit, n in zip(units, exponents, strict=False) if unit]
            return Unit(tuple(sum(each, Fraction(0)) for each in zip(*factors, strict=True)), is_data_free)
        if rule.kind is ResultKind.SELECTED:  # a constant may stand in for a value: `jnp.where(norm > 0, norm, 1)`
            units = [unit for unit in units if not (unit and unit.is_data_free and not any(unit.powers))] or units
        predicate = _PREDICATES.get(name, f"applies `{name}` to {{}}")
        if rule.passes_on or rule.sums or rule.is_cast or rule.keeps_unit:
            return self._unify(units, predicate)
        scaled = [unit for unit in units if unit and any(unit.powers)]
        if scaled and rule.op_class is OpClass.ORIGINAL:
            return scaled[0]  # a solver or a kernel, which may be linear in this operand
        if scaled and not is_data_free:
            self._add_error(predicate, scaled[0])
        return unscaled

    def _unify(self, units: Sequence[OptionalUnit], predicate: str) -> OptionalUnit:
        """Returns the common unit of several values; adds an error if they are incompatible."""
        known = [unit for unit in units if unit is not None]
        if not known:
            return None
        different = {unit.powers for unit in known}
        is_data_free = all(unit.is_data_free for unit in known)
        if len(different) > 1 and not is_data_free:
            scaled, *_, other = sorted(known, key=lambda unit: not any(unit.powers))
            self._add_error(predicate, scaled, other)
        return Unit(max(different), is_data_free)

    def _add_error(self, predicate: str, *units: Unit) -> None:
        cure = _STILL_SCALED if sum(units[0].powers) > 0 else _NEVER_SCALED
        predicate = predicate.format(" and ".join(map(_describe, units)))
        self.errors[f"{location_of(self._path).where}, the program {predicate}: {cure}"] = None

    def _infer_loop(self, loop: jx.Loop, operands: list[OptionalUnit]) -> list[OptionalUnit]:
        consts, carry, xs = operands[loop.consts], operands[loop.carry], operands[loop.xs]
        while True:  # a carry that starts as zeros takes the unit that the body returns
            errors_before = dict(self.errors)
            outs = self.infer(loop.body, [*consts, *carry, *xs])
            new = [_join_carry(init, out) for init, out in zip(carry, outs[: loop.n_carry], strict=True)]
            if new == carry:
                break
            carry, self.errors = new, errors_before
        predicate = "carries {} through a loop"
        results = [self._unify(units, predicate) for units in zip(carry, outs[: loop.n_carry], strict=True)]
        return [*results, *outs[loop.n_carry :]]


def _is_scaled(unit: OptionalUnit) -> bool:
    return unit is not None and any(unit.powers) and not unit.is_data_free


def _finds_nonfinite(eqn: JaxprEqn, operands: Sequence[OptionalUnit]) -> bool:
    name = eqn.primitive.name
    if name == "is_finite" or (name == "ne" and eqn.invars[0] is eqn.invars[1]):
        return _is_scaled(operands[0]) and jx.shape_of(eqn.invars[0]) != ()
    return not name.startswith("reduce") and any(x and x.finds_nonfinite for x in operands)


def _join_carry(init: OptionalUnit, out: OptionalUnit) -> OptionalUnit:
    """Returns the unit of a carry, from its initial unit and the unit that the body returns."""
    if init is None or out is None:
        return init or out
    return init._replace(is_data_free=init.is_data_free and out.is_data_free)


def _describe(unit: Unit) -> str:
    power = next(filter(None, unit.powers), 0)
    if abs(power) not in (0, 1):
        return f"a value multiplied by the loss scale to the power {power}"
    verb = "multiplied" if power > 0 else "divided"
    return f"a value {verb} by the loss scale" if power else "an unscaled value"
