"""What to try against an op that made values non-finite: a table, whose first row that fits counts."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jmp_amp._jaxpr import holds_jaxprs
from jmp_amp.debug._cells import in_float32, is_low
from jmp_amp.debug._evaluate import Event
from jmp_amp.debug._location import Location, location_of
from jmp_amp.debug._nonfinite_report import Values, floating, values_of


class Facts(NamedTuple):
    """What the table asks.

    Attributes:
        primitive: the name of the op.
        location: where it is from.
        operands: its floating operands.
        result: its result that is not finite.
        divides_by_zero: whether it does where it is not finite, or takes the logarithm of 0.
        rounded: where these zeros are from, if a float16 op made them.
        rounded_by: the name of that op.
        constant: whether all of its operands are constants.
        opaque: whether it is a program of its own, or something that knows no float32.
        excess: how many times larger than what its dtype holds the result is in float32; None if that is infinite
            too, and for ops of 32 bits.
    """

    primitive: str
    location: Location
    operands: tuple[Values, ...]
    result: Values
    divides_by_zero: bool
    rounded: Location | None
    rounded_by: str
    constant: bool
    opaque: bool
    excess: float | None

    @property
    def limit(self) -> str:
        """The largest number of the result's dtype."""
        return f"{float(jnp.finfo(self.result.dtype).max):.5g}"

    @property
    def zeros(self) -> str:
        """Where the zeros are from."""
        source = self.rounded.line if self.rounded else ""
        return f"the operand is 0 since `{self.rounded_by}` {source}, in float16, where all below 6e-8 is 0"

    @property
    def in_full(self) -> str:
        """How to run the op in float32."""
        rule = f' or `rules={{"{self.location.scope}": "full"}}`' if self.location.scope else ""
        return (
            f"`with amp.full_precision():` around that line{rule} where autocast made it {self.result.dtype}, "
            "`.astype(jnp.float32)` where the code itself did"
        )


def cure(event: Event, location: Location) -> str:
    """Returns what to try."""
    facts = _facts(event, location)
    return next(text(facts) for fits, text in _TABLE if fits(facts))


_EXPONENTIALS = {"exp", "exp2", "expm1", "cosh", "sinh"}
_DIVISORS = {"div": 1, "rem": 1, "log": 0, "log2": 0, "rsqrt": 0, "integer_pow": 0, "pow": 0}
_DOMAINS = {"log", "log2", "log1p", "sqrt", "rsqrt", "pow", "asin", "acos", "acosh", "atanh", "erf_inv"}
_LINEAR_ALGEBRA = {"cholesky", "lu", "triangular_solve", "custom_linear_solve", "eigh", "eig", "svd"}

_TABLE: Sequence[tuple[Callable[[Facts], bool], Callable[[Facts], str]]] = (
    (
        lambda f: any(x.infs for x in f.operands),
        lambda f: (
            "an infinity that is meant (a mask of -inf) was subtracted from itself or multiplied by 0. A row that is "
            "masked whole has no softmax: mask with a large finite number, `jnp.finfo(x.dtype).min`, and by "
            "`jnp.where` rather than by sums and products. If it is not meant: a constant such as -1e9 is -inf in "
            "float16"
        ),
    ),
    (
        lambda f: f.constant,
        lambda f: (
            f"the constant {f.operands[0].min:.4g} is beyond the {f.limit} of {f.result.dtype}: in a mask, take "
            f"`jnp.finfo(x.dtype).min`; or keep what reads it in float32 (autocast does, of code written in float32)"
        ),
    ),
    (
        lambda f: f.primitive in _EXPONENTIALS,
        lambda f: (
            "subtract the maximum before the exponential, as `jax.nn.softmax`, `jax.nn.logsumexp` and "
            "`jax.nn.log_softmax` do: `jnp.exp(x - jnp.max(x, axis, keepdims=True))`"
        ),
    ),
    (
        lambda f: f.divides_by_zero and f.rounded is not None and f.rounded.backward,
        lambda f: (
            f"{f.zeros}. Gradients that vanish need a loss scale, or a larger one: "
            "`amp.value_and_grad(fun, loss_scale=scale)`, and `amp.dynamic_loss_scale` to find it"
        ),
    ),
    (
        lambda f: f.divides_by_zero and f.rounded is not None,
        lambda f: (
            f"{f.zeros}: a square, a probability, an eps. Run that in full: {f.in_full}; or take a larger eps; or need "
            "no such value: `jax.nn.log_softmax` and `jax.nn.log_sigmoid` take the logarithm without the probability"
        ),
    ),
    (
        lambda f: f.divides_by_zero,
        lambda f: (
            "the operand is 0: add an eps to it (in float16 one above 6e-8), inside a square root rather than outside, "
            "or replace the zeros by `jnp.where` in front of the op (behind it, the gradient is still NaN); for the "
            "logarithm of a probability, take `jax.nn.log_softmax` or `jax.nn.log_sigmoid`"
        ),
    ),
    (
        lambda f: f.primitive in _DOMAINS and f.result.nans > 0,
        lambda f: "the operand is outside of the domain: `jnp.maximum(x, eps)` or `jnp.clip` in front of it",
    ),
    (
        lambda f: f.primitive in _LINEAR_ALGEBRA,
        lambda f: (
            "the matrix is singular, or not positive definite as far as rounding tells: add a multiple of the "
            "identity, `a + eps * jnp.eye(n)`, and make it in float32"
        ),
    ),
    (
        lambda f: f.opaque,
        lambda f: (
            f"`{f.primitive}` counts as one op: call `first_nonfinite` on the function inside it, on one shard or "
            "block; or run it in float32, to see whether precision is the cause"
        ),
    ),
    (
        lambda f: f.excess is not None and f.location.backward and f.excess < 2.0**24,
        lambda f: (
            f"the gradient is {f.excess:.3g} times too large for {f.result.dtype}. If the loss is scaled, a scale that "
            f"is 2^{max(math.ceil(math.log2(f.excess or 1)), 1)} times smaller fits: it gets there by itself, by "
            "skipping a step for each halving, or from a smaller `init_scale`. If the scale is 1, or falls that far "
            f"again and again, run this op in full: {f.in_full}"
        ),
    ),
    (
        lambda f: f.excess is not None,
        lambda f: (
            f"the result is {f.excess:.3g} times too large for {f.result.dtype}, which ends at {f.limit}. Run this op "
            f"in full: {f.in_full}; or scale its operands down"
        ),
    ),
    (
        lambda f: True,
        lambda f: (
            "precision is not the cause: the op runs in float32, or float32 does not hold its result either. Look at "
            "the inputs, the initial values and the learning rate"
        ),
    ),
)


def _facts(event: Event, location: Location) -> Facts:
    name = event.eqn.primitive.name
    values = [x.value for x in event.operands]
    bad = first_bad(event.outs)
    divisor = event.operands[_DIVISORS[name]] if name in _DIVISORS else None
    rounded = divisor.rounded if divisor is not None else None
    full = in_float32(event.eqn, event.operands) if is_low(bad.dtype) else []
    return Facts(
        name,
        location,
        tuple(map(values_of, floating(values))),
        values_of(bad),
        divisor is not None and bool(np.any((np.asarray(divisor.value) == 0) & ~np.isfinite(np.asarray(bad)))),
        location_of(rounded.eqns) if rounded else None,
        rounded.eqns[-1].primitive.name if rounded else "",
        all(x.constant for x in event.operands),
        full is None or holds_jaxprs(event.eqn),
        _excess(full, bad.dtype) if full else None,
    )


def first_bad(values: Sequence[Any]) -> Any:
    """The first array that is not finite."""
    return next(x for x in floating(values) if not np.isfinite(np.asarray(x)).all())


def _excess(full: Sequence[Any], dtype: Any) -> float | None:
    largest = max(float(np.abs(np.asarray(x)).max()) for x in floating(full))
    return max(largest / float(jnp.finfo(dtype).max), 1.0) if math.isfinite(largest) else None
