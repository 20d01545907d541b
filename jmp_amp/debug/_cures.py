"""The cures of non-finite values: what the conditions and the parts of the texts in `cures.txt` stand for."""

import math
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp_amp.debug._diagnosis import LOGARITHMS, NONZERO_OPERANDS, Diagnosis, upstream
from jmp_amp.debug._evaluation import Node, Values
from jmp_amp.debug._report import location_of

# The functions that an eps must keep finite, by the primitive that computes them, or their derivative.
_NEEDS_EPS: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("div", "rem", "integer_pow"), lambda x: 1 / x),
    **dict.fromkeys(("sqrt", "pow"), jnp.sqrt),
    "rsqrt": lax.rsqrt,
    "log": jnp.log,
    "log2": jnp.log2,
}

# The op with a bounded operand, by primitive.
_DOMAINS = {
    "log": "jnp.log(jnp.maximum(x, {eps}))",
    "log2": "jnp.log2(jnp.maximum(x, {eps}))",
    "log1p": "jnp.log1p(jnp.maximum(x, -1 + {near}))",
    "sqrt": "jnp.sqrt(jnp.maximum(x, {eps}))",
    "rsqrt": "jax.lax.rsqrt(jnp.maximum(x, {eps}))",
    "pow": "jnp.maximum(x, {eps}) ** y",
    "asin": "jnp.arcsin(jnp.clip(x, -1 + {near}, 1 - {near}))",
    "acos": "jnp.arccos(jnp.clip(x, -1 + {near}, 1 - {near}))",
    "atanh": "jnp.arctanh(jnp.clip(x, -1 + {near}, 1 - {near}))",
    "acosh": "jnp.arccosh(jnp.maximum(x, 1 + {near}))",
    "erf_inv": "jax.lax.erf_inv(jnp.clip(x, -1 + {near}, 1 - {near}))",
}

# The derivatives of inverse functions, which are infinite at the ends of their domains.
_ARCS = {
    **dict.fromkeys(("asin", "acos"), "rsqrt(1 - square(x)) | rsqrt(one_minus_square(x))"),
    "acosh": "rsqrt(square(x) - 1) | rsqrt(x - 1)",
}

# The largest operand, by primitive, of which the result is a factor of 1000 below the largest float32.
_LARGEST_EXPONENTS = {"exp": 80, "expm1": 80, "cosh": 80, "sinh": 80, "exp2": 115}
_LINEAR_ALGEBRA = {"cholesky", "lu", "triangular_solve", "custom_linear_solve", "eigh", "eig", "svd"}
_SUMS = {"reduce_sum", "cumsum", "reduce_window_sum"}
_PRODUCTS = {"log", "mul", "reduce_prod"}  # and logarithms of them
_READ_VARIANCES = {"sqrt", "rsqrt", "div", "log", "pow", "integer_pow"}


def cure_of(d: Diagnosis) -> tuple[str, str]:
    """Returns the cause and the cure of a non-finite op: the first row that applies; the last applies to every op."""
    rows = (row for row in CURES.items() if all(_holds(each, d) for each in row[1][0].split("; ")))
    cause, (_, text) = next(rows)
    return cause, _filled(text, d)


def _holds(condition: str, d: Diagnosis) -> Any:
    kind, _, rest = condition.partition(" ")
    return _KINDS[kind](d, rest) if kind in _KINDS else _named(condition, d)


def _named(name: str, d: Diagnosis) -> Any:
    found = _NAMES.get(name)
    if found is None:
        return getattr(d, name.replace(" ", "_"))
    return _filled(found, d) if isinstance(found, str) else found(d)


def _filled(text: str, d: Diagnosis) -> str:
    return re.sub(r"\{(.+?)\}", lambda found: str(_named(found[1], d)), " ".join(text.split()))


def _is_variance(d: Diagnosis) -> bool:
    reads_variance = d.primitive in _READ_VARIANCES
    return d.is_in("variance(x)") or (reads_variance and any(map(_cancels, d.found_behind("variance(x)"))))


def _cancels(difference: Node) -> bool:
    """Returns whether a difference is no larger than the rounding errors of what it is the difference of."""
    low, high = difference.values.min, difference.operands[0].values.max
    eps = float(jnp.finfo(difference.values.dtype).eps)
    return low is not None and high is not None and low <= 16 * eps * high


def _has_nonzero_factors(d: Diagnosis) -> bool:
    """Returns whether no factor of a product is 0; the gradient of `jnp.prod` is computed with a tree of products."""
    waiting = list(d.logarithms or [d.node])
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if node.primitive in _PRODUCTS:
            new = {x.origin for x in node.operands} - seen
            seen |= new
            waiting += new
        elif node.values.zeros:
            return False
    return True


def _is_in_other_branch(d: Diagnosis) -> bool:
    """Returns whether `jnp.where` selects between the op of which this is the derivative, and another value."""
    is_root = d.divisor.primitive == "sqrt"
    for op in [d.divisor] if is_root else [x for x in d.readers(d.divisor) if x.primitive in NONZERO_OPERANDS]:
        for result in (op, *d.readers(op)):
            for select in d.readers(result):
                branches = [x.origin for x in select.operands[1:]] if select.primitive == "select_n" else []
                if result in branches and not all(op in upstream(x) for x in branches):
                    return True
    return False


def _arc(d: Diagnosis) -> str:
    """Returns the inverse function whose derivative the op is part of; empty if there is none."""
    return next((name for name, pattern in _ARCS.items() if d.is_derivative_of(name, pattern)), "")


def _run_in_float32(d: Diagnosis) -> str:
    """Returns how to run the op in float32."""
    rule = f' or `rules={{"{d.location.scope}": "full"}}`' if d.location.scope else ""
    return (
        f"use `with amp.full_precision():` around that line{rule} if autocast chose {d.result.dtype}, or "
        "`.astype(jnp.float32)` if the code itself casts"
    )


def _eps(d: Diagnosis, primitive: str) -> str:
    """Returns the smallest power of ten at which an op and its derivative are finite in `d.eps_dtype`, as code.

    It is a normal number of that dtype, and at least 1e-12: float32 rounds to 1e-7.
    """
    for exponent in range(-12, 0):
        if 10.0**exponent >= float(jnp.finfo(d.eps_dtype).tiny):
            x = jnp.asarray(10.0**exponent, d.eps_dtype)
            if np.isfinite(jax.value_and_grad(_NEEDS_EPS[primitive])(x)).all():
                return f"1e{exponent}"
    return "1e-1"


def _larger_eps(d: Diagnosis) -> str:
    """Returns the eps to add where the op divides by 0, or takes the logarithm of 0."""
    if d.found_behind("sqrt(_)"):
        return f"a larger eps inside the square root, `jnp.sqrt(x + {_eps(d, 'rsqrt')})`"
    eps = _eps(d, d.primitive)
    return f"a larger eps, {eps}: with it `{d.primitive}` and its derivative are finite in {d.eps_dtype}"


def _in_domain(d: Diagnosis, primitive: str) -> str:
    """Returns the op with a bounded operand, as code."""
    near = f"1e-{6 if jnp.finfo(d.result.dtype).bits >= 32 else 2}"  # 1 - near is not 1, nor is its square
    eps = _eps(d, primitive if primitive in _NEEDS_EPS else "sqrt")
    return f"`{_DOMAINS[primitive].format(eps=eps, near=near)}`"


def _magnitudes(x: Values) -> tuple[float, float]:
    return abs(x.min or 0.0), abs(x.max or 0.0)


# The conditions with a pattern, or with names of primitives; other conditions are names.
_KINDS: Mapping[str, Callable[[Diagnosis, str], Any]] = {
    "in": Diagnosis.is_in,
    "ends": Diagnosis.ends,
    "behind": Diagnosis.found_behind,
    "of": lambda d, rest: d.is_derivative_of(*rest.split(" ", 1)),
    "op": lambda d, rest: d.primitive in rest.split(),
    "not": lambda d, rest: not _named(rest, d),
}

# What a name in the table stands for: as a condition, or as `{name}` in a text. Other names, such as `is opaque`, are
# properties of `Diagnosis`.
_NAMES: Mapping[str, str | Callable[[Diagnosis], Any]] = {
    "any op": lambda d: True,
    "backward": lambda d: d.location.backward,
    "backward underflow": lambda d: location_of(d.underflow.eqns).backward,
    "infinite operand": lambda d: any(x.infs for x in d.operands),
    "constant": lambda d: d.node.is_constant,
    "logarithm": lambda d: d.primitive in LOGARITHMS or d.logarithms,
    "nonzero factors": _has_nonzero_factors,
    "other branch": _is_in_other_branch,
    "variance": _is_variance,
    "arc": _arc,
    "exponential": lambda d: d.primitive in _LARGEST_EXPONENTS,
    "has a domain": lambda d: d.primitive in _DOMAINS and (d.result.nans or d.primitive != "pow"),
    "linear algebra": lambda d: d.primitive in _LINEAR_ALGEBRA,
    "sum": lambda d: d.node.origin.primitive in _SUMS,
    "fits in float32": lambda d: d.excess is not None,
    "no scale fits": lambda d: d.fitting_scale == 0,
    "dtype": lambda d: d.result.dtype,
    "largest": lambda d: f"{d.largest_finite:.5g}",
    "times too large": lambda d: f"{d.excess:.3g} times too large for {d.result.dtype}",
    "too large": "the result is {times too large}, whose largest finite value is {largest}",
    "excess exponent": lambda d: max(math.ceil(math.log2(d.excess or 1)), 1),
    "run in float32": _run_in_float32,
    "rounded to 0": lambda d: f"`{d.underflow.eqn.primitive.name}` {location_of(d.underflow.eqns).where} underflows",
    "eps of 1 / x": lambda d: _eps(d, "div"),
    "eps of sqrt": lambda d: _eps(d, "sqrt"),
    "eps of rsqrt": lambda d: _eps(d, "rsqrt"),
    "eps of log": lambda d: _eps(d, "log"),
    "a larger eps": _larger_eps,
    "bounded arc": lambda d: _in_domain(d, _arc(d)),
    "bounded log": lambda d: _in_domain(d, (d.logarithms or [d.node])[0].primitive),
    "bounded op": lambda d: _in_domain(d, d.primitive),
    "first operand": lambda d: f"{d.operands[0].min:.4g}",
    "smallest operand": lambda d: f"{min(_magnitudes(d.operands[-1])):.4g}",
    "largest operand": lambda d: f"{max(_magnitudes(d.operands[0])):.4g}",
    "largest exponent": lambda d: _LARGEST_EXPONENTS[d.primitive],
}


# The conditions and the text of each cause.
_ROWS = re.compile(r"^([^\s#].*): (.*)\n((?: .*\n)+)", re.MULTILINE)
_TABLE = pathlib.Path(__file__).with_name("cures.txt").read_text("utf-8")
CURES = {row[1]: row.group(2, 3) for row in _ROWS.finditer(_TABLE)}
