"""Reads the user's code: the numbers in a line, and a replacement in the names of the user."""

import ast
import functools
import linecache
import re
from collections.abc import Iterator, Sequence
from typing import Any

from jmp_amp import _jaxpr as jx
from jmp_amp.debug._nodes import Node

_SCOPES = ast.FunctionDef | ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
_NUMBER = r"(-?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"

Span = tuple[str, int, int, int, int]  # a file, a line and column, and those of the end


def numbers_in(node: Node) -> Iterator[tuple[str, float]]:
    """Yields the numbers in the expressions that compute a value, and those that the file gives to their names."""
    for span in _spans_of(node):
        file, expressions, _ = _source(span[0])
        code = ast.unparse(expressions[span]) if span in expressions else ""
        yield from (("", float(x)) for x in re.findall(rf"(?<![\w.]){_NUMBER}", code))
        for name in re.findall(r"\b[^\W\d]\w*", code):
            yield from ((name, float(x)) for x in re.findall(rf"\b{name}(?:: *\w+)? *= *{_NUMBER}", file))


def in_users_names(text: str, root: Node, value: Node, nodes: Sequence[Node]) -> tuple[str, str] | None:
    """Returns an expression of the user's code, and its replacement; None if the name of what it reads is not known.

    Args:
        text: the replacement, an expression of `x`.
        root: the value of the expression.
        value: what it is computed from.
        nodes: the values on the way from there to the root.
    """
    at = span_of(root)
    old = at and _source(at[0])[1].get(at)
    name = at and _name(value, at, nodes)
    if not at or not old or not name:
        return None
    new = ast.parse(re.sub(r"\bx\b", lambda _: f"({name})", text), mode="eval").body
    written = ast.unparse(new) if isinstance(new, ast.Call | ast.Name) else f"({ast.unparse(new)})"
    return " ".join((ast.get_source_segment(_source(at[0])[0], old) or "").split()), written


def _name(value: Node, at: Span, nodes: Sequence[Node]) -> str | None:
    """Returns what the code calls a value where it alone is read, if it means the same in another place of a scope."""
    scope = _scope(at)
    stores = (x for x in ast.walk(scope) if isinstance(getattr(x, "ctx", None), ast.Store))
    bound = [y for x in stores for y in _names(x)] + [x.arg for x in ast.walk(scope) if isinstance(x, ast.arg)]
    for span in filter(None, map(span_of, nodes)):
        same = [x for x in nodes if span_of(x) == span]
        reads = {y.outside for x in same for y in x.operands if y.is_floating and not y.is_constant}
        reads = {x.uncast if x in same else x for x in reads}.difference(same)
        expression: Any = _source(span[0])[1].get(span, ast.Tuple([]))
        called = getattr(expression, "func", None)  # a method reads its array
        parts = [x if x is not called else getattr(x, "value", x) for x in ast.iter_child_nodes(expression)]
        names = {ast.unparse(x) for x in parts if {*_names(x)} & {*bound}}
        is_inside = at[1:3] <= span[1:3] and span[3:] <= at[3:]
        is_before = span[1] <= at[1] and all(bound.count(x) < 2 for x in _names(expression))
        is_read = reads == {value} and len(names) == 1 and span != span_of(value.uncast)
        if is_read and _scope(span) is scope and (is_inside or is_before):
            return names.pop()
    return None


def _names(tree: ast.AST) -> list[str]:
    return [x.id for x in ast.walk(tree) if isinstance(x, ast.Name)]


def _scope(span: Span) -> ast.AST:
    """Returns the innermost syntax tree with names of its own around an expression."""
    tree = _source(span[0])[2]
    found = (x for x in ast.walk(tree) if isinstance(x, _SCOPES) and (x.lineno, x.col_offset) <= span[1:3])
    return [tree, *(x for x in found if span[3:] <= (x.end_lineno or 0, x.end_col_offset or 0))][-1]


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
