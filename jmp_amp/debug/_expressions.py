"""Writes a replacement in the names of the user, for an expression of their code."""

import ast
import functools
import linecache
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jmp_amp import _jaxpr as jx
from jmp_amp.debug._nodes import Node

_COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
_SCOPES = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | _COMPREHENSIONS
_REDUCTIONS = {"sum", "mean", "var", "logsumexp"}

Span = tuple[str, int, int, int, int]  # a file, a line and column, and those of the end


def in_users_names(
    text: str, root: Node, nodes: Sequence[Node], inputs: Mapping[str, Node], numbers: Mapping[str, Any], keeps: bool
) -> tuple[str, str] | None:
    """Returns an expression of the user's code, and its replacement; None if the names of its inputs are not known.

    Args:
        text: the replacement, an expression of the names of the inputs and the numbers.
        root: the value of the expression.
        nodes: the values on the way from the inputs to it.
        inputs: the values that it is computed from.
        numbers: the values of the other names in the text.
        keeps: whether sums along an axis keep it.
    """
    at = span_of(root)
    old = at and _source(at[0])[1].get(at)
    if at is None or old is None:
        return None
    names: dict[str, ast.expr | None] = {name: _name(x, at, nodes) for name, x in inputs.items()}
    if None in names.values():
        return None
    names |= {name: ast.Constant(x) for name, x in numbers.items()}

    is_flat = len(inputs["x"].values.shape) < 2

    class Writer(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> Any:
            return names.get(node.id, node)

        def visit_Call(self, node: ast.Call) -> Any:
            if keeps and getattr(node.func, "attr", "") in _REDUCTIONS:
                node.keywords.append(ast.keyword("keepdims", ast.Constant(True)))
            self.generic_visit(node)
            if is_flat or getattr(node.func, "attr", "") in _REDUCTIONS:  # others read the last axis without one
                node.args = [x for x in node.args if not isinstance(x, ast.Constant) or x.value is not None]
            return node

    source = ast.get_source_segment(_source(at[0])[0], old) or ""
    return " ".join(source.split()), pasted(ast.unparse(Writer().visit(ast.parse(text))).replace("e-0", "e-"))


def pasted(text: str) -> str:
    """Returns an expression, in parentheses unless it means the same wherever it takes the place of another."""
    is_closed = isinstance(ast.parse(text, mode="eval").body, ast.Call | ast.Name | ast.Attribute | ast.Subscript)
    return text if is_closed else f"({text})"


def is_inner(value: Node, readers: Collection[Node]) -> bool:
    """Whether a value, as some of its readers, is inside of an expression, such as a call of the library."""
    span = span_of(value.uncast)  # a cast of autocast belongs to its reader
    return span is not None and any(span_of(x) == span for x in value.readers if x in readers)


def _name(value: Node, at: Span, nodes: Sequence[Node]) -> ast.expr | None:
    """Returns what the code calls a value where it reads it, if it means the same in another place."""
    for reader in nodes:
        span = span_of(reader)
        if span and span != span_of(value.uncast) and value in (x.outside for x in reader.operands):
            same = [x for x in nodes if span_of(x) == span]
            arrays = (y.outside for x in same for y in x.operands if y.is_floating and not y.is_constant)
            arrays = (x.uncast if x in same else x for x in arrays)  # in the order in which they are written
            reads = [x for x in dict.fromkeys(arrays) if x not in same]
            expression = _source(span[0])[1].get(span)
            names = _operands(expression)
            # Functions of several arrays may read them in another order, as `jnp.clip` does.
            is_known = len(reads) == 1 or isinstance(expression, ast.BinOp)
            if is_known and len(reads) == len(names) and value in reads:
                found = names[reads.index(value)]
                if _is_same(found, span, at):
                    return found
    return None


def _operands(expression: Any) -> list[ast.expr]:
    """Returns what an operator or a call reads, but for numbers."""
    match expression:
        case ast.BinOp(left, _, right):
            found = [left, right]
        case ast.UnaryOp(_, operand):
            found = [operand]
        case ast.Call(ast.Attribute(ast.Name("jnp" | "jax" | "lax" | "optax") | ast.Attribute()) | ast.Name(), args):
            found = args
        case ast.Call(ast.Attribute(array), args):  # a method of an array
            found = [array, *args]
        case _:
            return []
    named = (x for x in found if any(isinstance(y, ast.Name) for y in ast.walk(x)))
    return list({ast.unparse(x): x for x in named}.values())


def _is_same(expression: ast.expr, span: Span, at: Span) -> bool:
    """Whether an expression of one place means the same in another."""
    scopes = _scopes(at)
    if span[0] != at[0] or _scopes(span) != scopes:
        return False
    if at[1:3] <= span[1:3] and span[3:] <= at[3:]:  # one is a part of the other
        return True
    names = {x.id for x in ast.walk(expression) if isinstance(x, ast.Name)}
    stored: list[Any] = [x for x in ast.walk(scopes[-1]) if isinstance(getattr(x, "ctx", None), ast.Store)]
    between = [y for x in stored if span[1] <= x.lineno < at[1] for y in ast.walk(x) if isinstance(y, ast.Name)]
    return span[1] <= at[1] and not any(x.id in names for x in between)


def _scopes(span: Span) -> list[Any]:
    """Returns the syntax trees with names of their own around an expression, the innermost last."""
    file, *start, end_line, end_column = span
    tree = _source(file)[2]
    found = [x for x in ast.walk(tree) if isinstance(x, _SCOPES) and [x.lineno, x.col_offset] <= start]
    return [tree, *(x for x in found if (end_line, end_column) <= (x.end_lineno or 0, x.end_col_offset or 0))]


def span_of(node: Node) -> Span | None:
    """Returns where the expression is that computes a value, outside of libraries."""
    for eqn in reversed(node.place.eqns if node.place else ()):
        for span in jx.spans_of(eqn):
            if not jx.Frame(span[0], 0, "").is_of_library:
                return span
    return None


@functools.lru_cache(maxsize=64)
def _source(file: str) -> tuple[str, dict[Span, ast.expr], ast.AST]:
    """Returns the text of a file, its expressions, and its syntax tree."""
    text = "".join(linecache.getlines(file))
    try:
        tree = ast.parse(text)
    except SyntaxError:  # the file has changed since
        tree = ast.Module([], [])
    found = (x for x in ast.walk(tree) if isinstance(x, ast.expr))
    spans = {(file, x.lineno, x.col_offset, x.end_lineno or 0, x.end_col_offset or 0): x for x in found}
    return text, spans, tree
