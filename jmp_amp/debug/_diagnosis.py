"""The properties of a non-finite op that select its cure, such as the patterns of ops that it is in.

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
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jmp_amp._jaxpr import holds_jaxprs, is_inexact, is_of_derivative
from jmp_amp.debug._evaluation import Evaluation, Node, NonFiniteOp, applies_loss_scale, evaluate_in_float32, is_low
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

LOGARITHMS = ("log", "log2")

# The operand that must not be 0, by primitive.
NONZERO_OPERANDS = {"div": 1, "rem": 1, "log": 0, "log2": 0, "rsqrt": 0, "integer_pow": 0, "pow": 0}
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
    match node.primitive:
        case "integer_pow":
            return node.eqn.params["y"]  # type: ignore[union-attr] # an op has an equation
        case "square":
            return 2
        case "pow":
            return node.operands[1].origin.constant
    return None


def upstream(node: Node, depth: float = math.inf) -> Iterator[Node]:
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
        self.is_under_grad = any(is_of_derivative(outer.source_info.name_stack) for outer in op.place.eqns)

        values = [x.value for x in op.operands]
        in_float32 = evaluate_in_float32(eqn, values) if is_low(out.value.dtype) else []
        self.is_opaque = in_float32 is None or holds_jaxprs(eqn)
        largest = max((float(np.abs(np.asarray(x)).max()) for x in in_float32 or () if is_inexact(x)), default=math.inf)
        self.excess = max(largest / self.largest_finite, 1.0) if math.isfinite(largest) else None

        self.divisor, self.divides_by_zero, self.underflow = None, False, None
        if self.primitive in NONZERO_OPERANDS:
            divisor = op.operands[NONZERO_OPERANDS[self.primitive]]
            is_bad = (np.asarray(divisor.value) == 0) & ~np.isfinite(np.asarray(out.value))
            self.divisor, self.divides_by_zero, self.underflow = divisor.node.origin, is_bad.any(), divisor.underflow
        self.logarithms = []
        if self.location.backward and self.primitive == "div":
            self.logarithms = [x for x in self.readers(self.divisor) if x.primitive in LOGARITHMS]

    @functools.cached_property
    def fitting_scale(self) -> int | None:
        """The exponent k of a loss scale that is 2^k times smaller, with which all results are finite.

        0 if there is none down to a loss scale of 1; None if the op does not depend on the scale of
        `amp.value_and_grad`.
        """
        factors = [x.operands[1].values.max or 0.0 for x in upstream(self.node) if x.eqn and applies_loss_scale(x.eqn)]
        if not factors:
            return None
        steps = range(1, math.floor(math.log2(max(*factors, 1.0))) + 1)
        scaled = functools.partial(dataclasses.replace, self._evaluation)
        k = bisect.bisect_left(steps, True, key=lambda k: scaled(loss_factor=2.0**-k).is_finite)
        return steps[k] if k < len(steps) else 0

    @property
    def largest_finite(self) -> float:
        """The largest finite value of the dtype of the result."""
        return float(jnp.finfo(self.result.dtype).max)

    @property
    def has_lost_constant(self) -> bool:
        """Whether the result depends on a low-precision constant that was rounded to 0 or to infinity in the code.

        Tracing rounds constants, so the constant of the code is not known.
        """
        pairs = [(reader, x) for reader in upstream(self.node, _DEPTH) for x in reader.operands]
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
        nodes = {node for reader in upstream(self.node, _DEPTH) for node in (reader, *reader.operands)}
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
        return [node for node in upstream(self.node, _DEPTH) if any(True for _ in matches(pattern, node))]

    def is_derivative_of(self, primitive: str, pattern: str) -> bool:
        """Returns whether the op is the last op of a pattern with an `x` that `primitive` reads, too."""
        return self.is_under_grad and any(
            reader.primitive == primitive
            for found in matches(pattern, self.node)
            for reader in self.readers(found.values["x"])
        )
