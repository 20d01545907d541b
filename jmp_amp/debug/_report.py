"""What the tools share: checks of their arguments, lines of code, parameters on the host, and tables."""

import html
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jmp_amp._calls import finished, new_figure

T = TypeVar("T")


def check_callable(fun: Any, name: str) -> None:
    """Raises `TypeError` if `fun`, the first argument of the tool `name`, is not callable."""
    if not callable(fun):
        raise TypeError(f"`{name}` takes a function, got {type(fun).__name__}")


def check_without_autocast(fun: Any, name: str, cure: str = "") -> None:
    """Raises `TypeError` if `fun` is not callable, or is already under `autocast`."""
    check_callable(fun, name)
    if hasattr(fun, "autocast_of"):
        raise TypeError(f"`fun` is already under `autocast`; pass the function without it to `{name}`{cure}")


def as_jit_takes(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """Returns the arguments of a call as `jax.jit` takes them: Python numbers in them, but for bools, are arrays.

    An argument that is a number itself stays one, as with `static_argnums`. All numbers stay in an argument that
    `jax.jit` does not take, with a string, a function or a module that can be called, as in `equinox.filter_jit`.
    """
    return [*map(_as_jit_takes, args)], {name: _as_jit_takes(x) for name, x in kwargs.items()}


def _as_jit_takes(arg: Any) -> Any:
    leaves, tree = jax.tree.flatten(arg, is_leaf=callable)
    is_number = [isinstance(x, int | float | complex | np.number) and not isinstance(x, bool) for x in leaves]
    is_taken = [not callable(x) and (hasattr(x, "dtype") or isinstance(x, int | float | complex)) for x in leaves]
    if jax.tree_util.treedef_is_leaf(tree) or not any(is_number) or not all(is_taken):
        return arg
    return jax.tree.unflatten(tree, [jnp.asarray(x) if ok else x for x, ok in zip(leaves, is_number, strict=True)])


def leaf_name(path: tuple[Any, ...]) -> str:
    """Returns the name of the leaf at a key path, such as `layers/0/w`."""
    return jax.tree_util.keystr(path, simple=True, separator="/") or "(leaf)"


def module_name(path: tuple[Any, ...]) -> str:
    """Returns the name of the container of a leaf, such as `layers/0`; a top-level leaf is its own module."""
    return leaf_name(path[:-1] or path)


def flat_on_host(x: Any) -> np.ndarray:
    """Returns an array as a float64[size] NumPy array."""
    return np.asarray(jax.device_get(x)).astype(np.float64).ravel()


def grouped(items: Iterable[T], key: Callable[[T], Any]) -> dict[Any, list[T]]:
    """Returns items by their keys, in the order in which they come."""
    groups = dict[Any, list[T]]()
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def format_table(rows: Iterable[Sequence[str]], align_right: bool = True) -> str:
    """Returns rows of equal length as lines with aligned columns.

    Args:
        rows: the cells, by row.
        align_right: whether to align all columns but the first to the right, as for numbers.
    """
    rows = [tuple(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligns = "<" + (">" if align_right else "<") * len(widths[1:])
    form = "  ".join(f"{{:{align}{width}}}" for align, width in zip(aligns, widths, strict=True))
    return "\n".join(form.format(*row).rstrip() for row in rows)


class Table(NamedTuple):
    """A table of a report: its rows, the first of which is the head, and its title."""

    rows: Sequence[Sequence[str]]
    title: str = ""


Content = tuple[str, Sequence[Table], Sequence[str]]


class Report:
    """A report that `print` and notebooks show as a title, tables and notes. A subclass has this `_content`."""

    _aligns_right = False  # the columns of the tables, as for numbers

    def _content(self) -> Content:
        """Returns the title, the tables, and the notes."""
        raise NotImplementedError

    def _content_of_notebook(self) -> Content:
        """Returns what a notebook shows, whose tables can be folded."""
        return self._content()

    def __str__(self) -> str:
        title, tables, notes = self._content()
        lines = [title] * bool(title)
        for table in tables:
            lines += ["", table.title] if table.title else []
            lines.append(format_table(table.rows, self._aligns_right))
        return "\n".join([*lines, *[""] * any(table.title for table in tables), *notes])

    def _repr_html_(self) -> str:
        title, tables, notes = self._content_of_notebook()
        first, last = ("".join(f"<p>{html.escape(x)}</p>" for x in lines) for lines in (title.splitlines(), notes))
        return "".join([first, *map(_html_table, tables), last])


class Plot(Report):
    """A report that is also a picture. A subclass draws it by `_draw`."""

    def _draw(self, figure: Any) -> None:
        raise NotImplementedError

    def plot(self, path: str | os.PathLike | None = None) -> Any:
        """Plots the report, as the description of its class says.

        Args:
            path: the file to save the plot to, in the format of its extension; None saves nothing.

        Returns:
            A `matplotlib.figure.Figure`.

        Raises:
            ImportError: matplotlib is not installed.
        """
        figure = new_figure("`plot`", 7, 4)
        self._draw(figure)
        return finished(figure, path)


def _html_table(table: Table) -> str:
    """Returns a table in HTML; one with a title can be unfolded."""
    head, *rows = table.rows
    cells = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    text = f"<table>{''.join(f'<th>{column}</th>' for column in head)}{cells}</table>"
    return f"<details><summary>{html.escape(table.title)}</summary>{text}</details>" if table.title else text


def without_numbers(module: str) -> str:
    """Returns the pattern that a module shares with those that differ from it in numbers only: `layer_*/norm`."""
    return re.sub(r"\d+", "*", module)


def format_percent(share: float) -> str:
    """Returns a share in percent; a small positive share is `<0.1%` rather than `0.0%`."""
    if 0 < share < 0.0005:
        return "<0.1%"
    return "0" if share == 0 else f"{share:.1%}"
