"""Reads the user's code: the names of values, the numbers in a line, and a replacement in these names."""

import ast
import functools
import linecache
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from jmp_amp import _jaxpr as jx
from jmp_amp.debug._nodes import Node

_COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda

Span = tuple[str, int, int, int, int]  # a file, a line and column, and those of the end


def in_users_names(
    text: str, root: Node, nodes: Sequence[Node], inputs: Mapping[str, Node], taken: Node | None
) -> tuple[str, str] | None:
    """Returns an expression of the user's code, and its replacement; None if the names of its inputs are not known.

    Args:
        text: the replacement, an expression of the names of the inputs.
        root: the value of the expression.
        nodes: the values on the way from the inputs to it.
        inputs: the values that it is computed from.
        taken: the elements of the replacement that the expression takes; None if it takes all.
    """
    at = span_of(root)
    old = at and _source(at[0])[1].get(at)
    names = {name: at and _name(x, at, nodes) for name, x in inputs.items()}
    if at is None or old is None or None in names.values():
        return None
    if "square" in text and "square" in _stored(_scopes(at)[-1]):  # a name that the replacement gives a value
        return None

    class Writer(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> Any:
            return names.get(node.id, node)

    new = Writer().visit(ast.parse(text, mode="eval")).body
    if taken:
        span = span_of(taken)
        subscript = span and _source(span[0])[1].get(span)
        if span is None or not isinstance(subscript, ast.Subscript) or not _is_same(subscript, span, at):
            return None
        new = ast.Subscript(new, subscript.slice, ast.Load())
    source = ast.get_source_segment(_source(at[0])[0], old) or ""
    written = ast.unparse(new)
    is_closed = isinstance(new, ast.Call | ast.Name | ast.Attribute | ast.Subscript)
    return " ".join(source.split()), written if is_closed else f"({written})"


def is_inner(value: Node, readers: Collection[Node]) -> bool:
    """Whether a value, as some of its readers, is inside of an expression, such as a call of the library."""
    span = span_of(value.uncast)  # a cast of autocast belongs to its reader
    return span is not None and any(span_of(x) == span for x in value.readers if x in readers)


def numbers_in(node: Node) -> Iterator[tuple[str, float]]:
    """Yields the numbers in the expressions that compute a value, and those that their names stand for in the file."""
    for span in _spans_of(node):
        _, spans, tree = _source(span[0])
        if expression := spans.get(span):
            yield from (("", x) for x in _numbers(expression))
            names = {getattr(x, "id", getattr(x, "attr", None)) for x in ast.walk(expression)}
            bound = (pair for pair in _bindings(tree) if pair[0] in names)
            yield from ((name, x) for name, value in bound for x in _numbers(value))


def _numbers(tree: ast.AST) -> list[float]:
    constants = (x.value for x in ast.walk(tree) if isinstance(x, ast.Constant))
    return [x for x in constants if isinstance(x, int | float) and not isinstance(x, bool)]


def _bindings(tree: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yields the names that a file gives values, and these."""
    for x in ast.walk(tree):
        match x:
            case ast.arguments():
                positional = [*x.posonlyargs, *x.args][::-1]
                pairs = [
                    *zip(positional, x.defaults[::-1], strict=False),
                    *zip(x.kwonlyargs, x.kw_defaults, strict=True),
                ]
                yield from ((arg.arg, default) for arg, default in pairs if default)
            case ast.Assign([ast.Name(name) | ast.Attribute(_, name)], value) | ast.keyword(str(name), value):
                yield name, value
            case ast.AnnAssign(ast.Name(name), _, ast.AST() as value):
                yield name, value


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
    """Whether an expression of one place means the same in another, further down."""
    scopes = _scopes(at)
    if span[0] != at[0] or _scopes(span) != scopes:
        return False
    if at[1:3] <= span[1:3] and span[3:] <= at[3:]:  # one is a part of the other
        return True
    stored = _stored(scopes[-1])
    return span[1] <= at[1] and all(stored.count(x.id) < 2 for x in ast.walk(expression) if isinstance(x, ast.Name))


def _stored(scope: ast.AST) -> list[str]:
    """Returns the names that a scope gives values, or stores into, each as often as it does."""
    stores = (x for x in ast.walk(scope) if isinstance(getattr(x, "ctx", None), ast.Store))
    stores = (x for x in stores if isinstance(x, ast.Name | ast.Attribute | ast.Subscript))
    arguments = [x.arg for x in ast.walk(scope) if isinstance(x, ast.arg)]
    return arguments + [y.id for x in stores for y in ast.walk(x) if isinstance(y, ast.Name)]


def _scopes(span: Span) -> list[Any]:
    """Returns the syntax trees with names of their own around an expression, the innermost last."""
    file, *start, end_line, end_column = span
    tree = _source(file)[2]
    found = (x for x in ast.walk(tree) if isinstance(x, _FUNCTIONS | _COMPREHENSIONS))
    found = (x for x in found if [x.lineno, x.col_offset] <= start)
    return [tree, *(x for x in found if (end_line, end_column) <= (x.end_lineno or 0, x.end_col_offset or 0))]


def span_of(node: Node) -> Span | None:
    """Returns where the expression is that computes a value, outside of libraries."""
    return next(_spans_of(node), None)


def _spans_of(node: Node) -> Iterator[Span]:
    for eqn in reversed(node.place.eqns if node.place else ()):
        yield from (span for span in jx.spans_of(eqn) if not jx.Frame(span[0], 0, "").is_of_library)


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
