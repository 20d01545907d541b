"""The cures of non-finite values: what the conditions and the names in `cures.txt` stand for.

A pattern is a Python expression, `"log(1 + exp(x))"`. A name is a value, the same one wherever it stands (it may be
computed twice), and `_` is any value. A number is a constant. A call is a primitive (`sum` is `reduce_sum`), or one of
`_FUNCTIONS`. `a | b` is either. Casts and changes of shape are ignored.
"""

import ast
import bisect
import dataclasses
import functools
import itertools
import math
import operator
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp_amp._autocast import rule_of
from jmp_amp._jaxpr import holds_jaxprs, is_inexact, is_of_derivative
from jmp_amp.debug._evaluation import (
    Evaluation,
    Node,
    NonFiniteOp,
    Values,
    applies_loss_scale,
    evaluate_in_float32,
    is_low,
)
from jmp_amp.debug._report import location_of

# Functions that may be several ops, each with one parameter `x`.
_FUNCTIONS = {
    "square": "x * x | x ** 2",
    "mean": "sum(x) / _ | sum(x) * _",
    "norm": "sqrt(sum(square(x)))",
    "variance": "mean(square(x)) - square(mean(x))",
    "softmax": "exp(_) / sum(exp(_))",
    "weights": "exp(x) | exp(x) * _ | sum(exp(x) * _) | dot_general(exp(x), _) | dot_general(_, exp(x))",
    "sigmoid": "logistic(x) | 1 / (1 + exp(-x)) | exp(x) / (1 + exp(x))",
}
_PRIMITIVES = {"sum": "reduce_sum", "max": "reduce_max", "prod": "reduce_prod"}
_OPERATORS = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div"}
_COMMUTATIVE = {"add", "mul"}
_LOGARITHMS = ("log", "log2")

# The operand that must not be 0, by primitive.
_NONZERO_OPERANDS = {"div": 1, "rem": 1, "log": 0, "log2": 0, "rsqrt": 0, "integer_pow": 0, "pow": 0}
_DEPTH = 6  # the number of ops between a value and the pattern that it was computed by
_MOST_READERS = 200  # the number of ops, nearest first, that may be the last op of a pattern that an op is in


class Match(NamedTuple):
    """A pattern that was found: the value of each name, and the ops."""

    values: dict[str, Node]
    ops: tuple[Node, ...]


def matches(pattern: str, node: Node) -> Iterator[Match]:
    """Yields each way in which the op that computed a value matches a pattern."""
    yield from _matches(_parsed(pattern), node, Match({}, ()))


@functools.cache
def _parsed(pattern: str) -> ast.expr:
    return ast.parse(pattern, mode="eval").body


@functools.cache
def _forms_of(call: ast.Call) -> ast.expr:
    """Returns all forms of a call of one of `_FUNCTIONS`."""
    (x,), forms = call.args, _FUNCTIONS[call.func.id]  # type: ignore[attr-defined] # patterns call plain names
    return _parsed(re.sub(r"\bx\b", f"({ast.unparse(x)})", forms))


def _matches(pattern: ast.expr, node: Node, found: Match) -> Iterator[Match]:
    node = node.origin
    match pattern:
        case ast.Name("_"):
            yield found
        case ast.Name(name):
            if found.values.get(name, node).number == node.number:
                yield found._replace(values=found.values | {name: node})
        case ast.Constant(value):
            if node.constant == value:
                yield found
        case ast.BinOp(left, ast.BitOr(), right):
            yield from _matches(left, node, found)
            yield from _matches(right, node, found)
        case ast.BinOp(base, ast.Pow(), exponent):
            if _exponent(node) == ast.literal_eval(exponent):
                yield from _op_matches(node.primitive, [base], node, found)
        case ast.BinOp(left, operator, right):
            yield from _op_matches(_OPERATORS[type(operator)], [left, right], node, found)
        case ast.UnaryOp(ast.USub(), operand):
            yield from _op_matches("neg", [operand], node, found)
        case ast.Call(ast.Name(name), args):
            yield from _op_matches(_PRIMITIVES.get(name, name), args, node, found)
            if name in _FUNCTIONS:
                yield from _matches(_forms_of(pattern), node, found)


def _op_matches(primitive: str, args: list[ast.expr], node: Node, found: Match) -> Iterator[Match]:
    """Yields the matches of an op and its operands; operands beyond `args` are ignored."""
    if node.primitive != primitive:
        return
    for order in (args, args[::-1]) if primitive in _COMMUTATIVE else (args,):
        partial = [found._replace(ops=(*found.ops, node))]
        for arg, operand in zip(order, node.operands, strict=False):
            partial = [more for one in partial for more in _matches(arg, operand, one)]
        yield from partial


def _exponent(node: Node) -> float | None:
    """Returns the exponent of a power; None if the node is none, or if the exponent is no constant."""
    if node.primitive == "pow":
        return node.operands[1].origin.constant
    return None if node.eqn is None else rule_of(node.eqn).power


def _upstream(node: Node, depth: float = math.inf) -> Iterator[Node]:
    """Yields the node and the nodes that it was computed from by at most `depth` ops, nearest first."""
    return _connected(node, lambda x: [operand.origin for operand in x.operands], depth)


def _connected(node: Node, neighbors: Callable[[Node], list[Node]], depth: float = math.inf) -> Iterator[Node]:
    level, seen = [node.origin], {node.origin}
    while level and depth >= 0:
        yield from level
        level = list(dict.fromkeys(x for node in level for x in neighbors(node) if x not in seen))
        seen.update(level)
        depth -= 1


class Diagnosis:
    """The properties of a non-finite op that select its cure.

    Attributes:
        primitive: its name.
        location: its location.
        operands: its floating-point operands.
        result: its first non-finite result.
        node: the place of that result in the dataflow.
        is_under_grad: whether it is part of a program that JAX differentiates.
        is_opaque: whether it contains a jaxpr, or does not run in float32.
        excess: the largest magnitude of its result in float32, over the largest finite value of the dtype of its
            result; None if the op is not low precision, or its result is non-finite in float32 too.
        divisor: the operand that must not be 0; None if the op has none.
        divides_by_zero: whether it divides by 0, or takes the logarithm of 0, where its result is non-finite.
        underflow: the place of the float16 op that rounded that operand to 0; None if there is none.
        largest_finite: the largest finite value of the dtype of its result.
        logarithms: the logarithms that the op is the derivative of.
    """

    divisor: Any
    underflow: Any

    def __init__(self, op: NonFiniteOp, evaluation: Evaluation) -> None:
        self._evaluation = evaluation
        eqn, out = op.place.eqn, next(x for x in op.outs if not x.is_finite)
        self.primitive, self.location = eqn.primitive.name, location_of(op.place.eqns)
        self.operands = tuple(x.node.values for x in op.operands if x.node.values.dtype)
        self.node, self.result = out.node, out.node.values
        self.largest_finite = float(jnp.finfo(self.result.dtype).max)
        self.is_under_grad = any(is_of_derivative(outer.source_info.name_stack) for outer in op.place.eqns)

        in_float32 = evaluate_in_float32(eqn, [x.value for x in op.operands]) if is_low(out.value.dtype) else []
        self.is_opaque = in_float32 is None or holds_jaxprs(eqn)
        largest = max((float(np.abs(np.asarray(x)).max()) for x in in_float32 or () if is_inexact(x)), default=math.inf)
        self.excess = max(largest / self.largest_finite, 1.0) if math.isfinite(largest) else None

        self.divisor, self.divides_by_zero, self.underflow = None, False, None
        if self.primitive in _NONZERO_OPERANDS:
            divisor = op.operands[_NONZERO_OPERANDS[self.primitive]]
            is_bad = (np.asarray(divisor.value) == 0) & ~np.isfinite(np.asarray(out.value))
            self.divisor, self.divides_by_zero, self.underflow = divisor.node.origin, is_bad.any(), divisor.underflow
        self.logarithms = []
        if self.location.backward and self.primitive == "div":
            self.logarithms = [x for x in self.readers(self.divisor) if x.primitive in _LOGARITHMS]

    def __getitem__(self, name: str) -> Any:
        """Returns what a condition, or the `{name}` in a text, of `cures.txt` stands for."""
        kind, _, rest = name.partition(" ")
        if kind in _KINDS:
            return _KINDS[kind](self, rest)
        found = _NAMES.get(name) or operator.attrgetter(name.replace(" ", "_"))
        return found.format_map(self) if isinstance(found, str) else found(self)

    @functools.cached_property
    def fitting_scale(self) -> int | None:
        """The exponent k of a loss scale that is 2^k times smaller, with which all results are finite.

        0 if there is none down to a loss scale of 1; None if the op does not depend on the scale of
        `amp.value_and_grad`.
        """
        factors = [x.operands[1].values.max or 0.0 for x in _upstream(self.node) if x.eqn and applies_loss_scale(x.eqn)]
        if not factors:
            return None
        steps = range(1, math.floor(math.log2(max(*factors, 1.0))) + 1)
        scaled = functools.partial(dataclasses.replace, self._evaluation)
        k = bisect.bisect_left(steps, True, key=lambda k: scaled(loss_factor=2.0**-k).is_finite)
        return steps[k] if k < len(steps) else 0

    @property
    def has_lost_constant(self) -> bool:
        """Whether the result depends on a low-precision constant that was rounded to 0 or to infinity in the code.

        Tracing rounds constants, so the constant of the code is not known.
        """
        pairs = [(reader, x) for reader in _upstream(self.node, _DEPTH) for x in reader.operands]
        lows = [(reader, x) for reader, x in pairs if x.values.dtype and is_low(jnp.dtype(x.values.dtype))]
        return any(
            x.values.min is None or (x.constant == 0 and reader.primitive in ("add", "max"))
            for reader, x in lows
            if x.is_constant and x.eqn is None
        )

    @property
    def eps_dtype(self) -> Any:
        """The dtype in which an eps must work: the lowest of the values that the result was computed from.

        No ops but products compute in float8.
        """
        nodes = {node for reader in _upstream(self.node, _DEPTH) for node in (reader, *reader.operands)}
        dtypes = [jnp.dtype(node.values.dtype) for node in nodes if node.values.dtype]
        real = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 1]
        return min(real, key=lambda dtype: dtype.itemsize, default=np.dtype(np.float32))

    def readers(self, node: Node) -> list[Node]:
        """Returns the results of the ops that read a value, also after casts and changes of shape."""
        return self._evaluation.readers.get(node.origin, [])

    def ends(self, pattern: str) -> bool:
        """Returns whether the op is the last op of a pattern."""
        return any(True for _ in matches(pattern, self.node))

    def is_in(self, pattern: str) -> bool:
        """Returns whether the op is one of the ops of a pattern; see `matches`."""
        return any(
            op in found.ops
            for op in (self.node.origin, *self.logarithms)
            for node in itertools.islice(_connected(op, self.readers), _MOST_READERS)
            for found in matches(pattern, node)
        )

    def found_behind(self, pattern: str) -> list[Node]:
        """Returns the results of a pattern from which the result of the op was computed by a few ops."""
        return [node for node in _upstream(self.node, _DEPTH) if any(True for _ in matches(pattern, node))]

    def is_derivative_of(self, primitive: str, pattern: str) -> bool:
        """Returns whether the op is the last op of a pattern with an `x` that `primitive` reads, too."""
        return self.is_under_grad and any(
            reader.primitive == primitive
            for found in matches(pattern, self.node)
            for reader in self.readers(found.values["x"])
        )


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


def cure_of(d: Diagnosis) -> tuple[str, str]:
    """Returns the cause and the cure of a non-finite op: the first row that applies; the last applies to every op."""
    rows = ((cause, text) for cause, (conditions, text) in CURES.items() if all(d[x] for x in conditions.split("; ")))
    cause, text = next(rows)
    return cause, " ".join(text.split()).format_map(d)


def _is_variance(d: Diagnosis) -> bool:
    needs_eps = d.primitive in _NEEDS_EPS
    return d.is_in("variance(x)") or (needs_eps and any(map(_cancels, d.found_behind("variance(x)"))))


def _cancels(difference: Node) -> bool:
    """Returns whether a difference is no larger than the rounding errors of what it is the difference of."""
    low, high = difference.values.min, difference.operands[0].values.max
    eps = float(jnp.finfo(difference.values.dtype).eps)
    return low is not None and high is not None and low <= 16 * eps * high


def _has_nonzero_factors(d: Diagnosis) -> bool:
    """Returns whether no factor of a product is 0; the gradient of `jnp.prod` is computed with a tree of products."""

    def factors(node: Node) -> list[Node]:
        return [x.origin for x in node.operands] if node.primitive in ("log", "mul", "reduce_prod") else []

    nodes = (node for root in d.logarithms or [d.node] for node in _connected(root, factors))
    return not any(node.values.zeros for node in nodes if not factors(node))


def _is_in_other_branch(d: Diagnosis) -> bool:
    """Returns whether `jnp.where` selects between the op whose derivative this is, and another value."""
    is_root = d.divisor.primitive == "sqrt"
    for op in [d.divisor] if is_root else [x for x in d.readers(d.divisor) if x.primitive in _NONZERO_OPERANDS]:
        for result in (op, *d.readers(op)):
            for select in d.readers(result):
                branches = [x.origin for x in select.operands[1:]] if select.primitive == "select_n" else []
                if result in branches and not all(op in _upstream(x) for x in branches):
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


# What the first word of a condition, or of a name in a text, stands for, given the rest.
_KINDS: Mapping[str, Callable[[Diagnosis, str], Any]] = {
    "in": Diagnosis.is_in,
    "ends": Diagnosis.ends,
    "behind": Diagnosis.found_behind,
    "of": lambda d, rest: d.is_derivative_of(*rest.split(" ", 1)),
    "op": lambda d, rest: d.primitive in rest.split(),
    "not": lambda d, rest: not d[rest],
    "eps": lambda d, rest: _eps(d, rest.removeprefix("of ")),
}

# What other names stand for. A name that is not here is an attribute of `Diagnosis`.
_NAMES: Mapping[str, str | Callable[[Diagnosis], Any]] = {
    "any op": lambda d: True,
    "backward underflow": lambda d: location_of(d.underflow.eqns).backward,
    "infinite operand": lambda d: any(x.infs for x in d.operands),
    "logarithm": lambda d: d.primitive in _LOGARITHMS or d.logarithms,
    "nonzero factors": _has_nonzero_factors,
    "other branch": _is_in_other_branch,
    "variance": _is_variance,
    "arc": _arc,
    "has a domain": lambda d: d.primitive in _DOMAINS and (d.result.nans or d.primitive != "pow"),
    "sum": lambda d: d.node.origin.primitive in ("reduce_sum", "cumsum", "reduce_window_sum"),
    "fits in float32": lambda d: d.excess is not None,
    "no scale fits": lambda d: d.fitting_scale == 0,
    "times too large": "{excess:.3g} times too large for {result.dtype}",
    "too large": "the result is {times too large}, whose largest finite value is {largest_finite:.5g}",
    "excess exponent": lambda d: max(math.ceil(math.log2(d.excess or 1)), 1),
    "run in float32": _run_in_float32,
    "rounded to 0": lambda d: f"`{d.underflow.eqn.primitive.name}` {location_of(d.underflow.eqns).where} underflows",
    "a larger eps": _larger_eps,
    "bounded arc": lambda d: _in_domain(d, _arc(d)),
    "bounded log": lambda d: _in_domain(d, (d.logarithms or [d.node])[0].primitive),
    "bounded op": lambda d: _in_domain(d, d.primitive),
    "smallest operand": lambda d: f"{min(_magnitudes(d.operands[-1])):.4g}",
    "largest operand": lambda d: f"{max(_magnitudes(d.operands[0])):.4g}",
    # With it, the result is a factor of 1000 below the largest float32.
    "largest exponent": lambda d: 115 if d.primitive == "exp2" else 80,
}


# The conditions and the text of each cause.
_ROWS = re.compile(r"^([^\s#].*): (.*)\n((?: .*\n)+)", re.MULTILINE)
_TABLE = pathlib.Path(__file__).with_name("cures.txt").read_text("utf-8")
CURES = {row[1]: row.group(2, 3) for row in _ROWS.finditer(_TABLE)}
