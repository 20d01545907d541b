"""Patterns of ops, written as Python expressions: `"log(1 + exp(x))"`.

A name is a value, the same one wherever it stands (it may be computed twice), and `_` is any value. A number is a
constant. A call is a primitive (`sum` is `reduce_sum`), or one of the functions below. `a | b` is either. Casts and
changes of shape are ignored.
"""

import ast
import functools
from collections.abc import Iterator
from typing import NamedTuple

from jmp_amp.debug._node import Node

# Functions that may be several ops, each with one parameter `x`.
_FUNCTIONS = {
    "square": "x * x | x ** 2",
    "mean": "sum(x) / _ | sum(x) * _",
    "softmax": "exp(_) / sum(exp(_))",
    "sigmoid": "logistic(x) | 1 / (1 + exp(-x)) | exp(x) / (1 + exp(x))",
}
_PRIMITIVES = {"sum": "reduce_sum", "max": "reduce_max", "prod": "reduce_prod"}
_OPERATORS = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div"}
_COMMUTATIVE = {"add", "mul"}


class Match(NamedTuple):
    """A pattern that was found: the value of each name, and the ops."""

    values: dict[str, Node]
    ops: tuple[Node, ...]


def matches(pattern: str, node: Node) -> Iterator[Match]:
    """Yields each way in which the op that computed a value matches a pattern."""
    yield from _matches(_parsed(pattern), node, Match({}, ()))


@functools.cache
def _parsed(pattern: str) -> ast.expr:
    return _Expanded().visit(ast.parse(pattern, mode="eval").body)


class _Expanded(ast.NodeTransformer):
    """Replaces the calls of `_FUNCTIONS` by all of their forms."""

    def visit_Call(self, call: ast.Call) -> ast.expr:
        call.args = [self.visit(arg) for arg in call.args]
        name = call.func.id  # type: ignore[attr-defined] # patterns call plain names
        if name not in _FUNCTIONS:
            return call
        forms = ast.parse(_FUNCTIONS[name], mode="eval").body
        return ast.BinOp(call, ast.BitOr(), _Substituted(call.args[0]).visit(forms))


class _Substituted(ast.NodeTransformer):
    """Replaces the name `x` by an expression."""

    def __init__(self, x: ast.expr) -> None:
        self.x = x

    def visit_Name(self, name: ast.Name) -> ast.expr:
        return self.x if name.id == "x" else name


def _matches(pattern: ast.expr, node: Node, found: Match) -> Iterator[Match]:
    node = node.origin
    match pattern:
        case ast.Name("_"):
            yield found
        case ast.Name(name):
            if is_same(found.values.get(name, node), node):
                yield found._replace(values=found.values | {name: node})
        case ast.Constant(float() | int() as value):
            if node.constant == value:
                yield found
        case ast.BinOp(left, ast.BitOr(), right):
            yield from _matches(left, node, found)
            yield from _matches(right, node, found)
        case ast.BinOp(base, ast.Pow(), exponent):
            if _exponent(node) == ast.literal_eval(exponent):
                yield from _operands_match([base], node, found)
        case ast.BinOp(left, operator, right):
            yield from _op_matches(_OPERATORS[type(operator)], [left, right], node, found)
        case ast.UnaryOp(ast.USub(), operand):
            yield from _op_matches("neg", [operand], node, found)
        case ast.Call(ast.Name(name), args):
            yield from _op_matches(_PRIMITIVES.get(name, name), args, node, found)
        case _:
            raise ValueError(f"a pattern holds names, numbers, calls and operators, got {ast.unparse(pattern)}")


def _op_matches(primitive: str, args: list[ast.expr], node: Node, found: Match) -> Iterator[Match]:
    if node.primitive != primitive:
        return
    yield from _operands_match(args, node, found)
    if primitive in _COMMUTATIVE:
        yield from _operands_match(args[::-1], node, found)


def _operands_match(args: list[ast.expr], node: Node, found: Match) -> Iterator[Match]:
    """Yields the matches of the operands of an op; operands beyond `args` are ignored."""
    partial = [found._replace(ops=(*found.ops, node))]
    for arg, operand in zip(args, node.operands, strict=False):
        partial = [more for one in partial for more in _matches(arg, operand, one)]
    yield from partial


def is_same(x: Node, y: Node) -> bool:
    """Returns whether two nodes are one value, or were computed in the same way from the same values."""
    x, y = x.origin, y.origin
    if x is y:
        return True
    if x.eqn is None or y.eqn is None:
        return x.constant is not None and x.constant == y.constant
    same_op = x.primitive == y.primitive and x.eqn.params == y.eqn.params and len(x.operands) == len(y.operands)
    return same_op and all(map(is_same, x.operands, y.operands))


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
