"""The cures of non-finite values: formulas, and equal functions that stay finite.

A part of the program is found by its meaning: a value, as a function of one or two values that it is computed from, is
equal in float64 to the formula of a row. `_trials.py` then runs the program with the replacement in its place.
"""

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmp_amp._autocast import rule_of
from jmp_amp.debug._evaluation import FLOAT64, Rewrite, evaluate_in, precise, widened
from jmp_amp.debug._expressions import in_users_names, is_inner
from jmp_amp.debug._nodes import Node

_MOST_CUTS, _MOST_INPUTS, _MOST_ELEMENTS = 40, 5, 2**20

# The names in formulas: those of NumPy, and these.
_NUMPY = vars(np) | {
    "det": np.linalg.det,
    "softmax": lambda x, axis: np.exp(x) / np.sum(np.exp(x), axis, keepdims=True),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
}


class Cure(NamedTuple):
    """A row of the table.

    Attributes:
        formula: a Python expression of `x`, `y` and the axis, with functions of NumPy; the row applies to parts of a
            program that are equal to it.
        replacement: an expression with functions of JAX that is equal to it where it is finite.
        why: why the formula, or its derivative, is not finite.
    """

    formula: str
    replacement: str
    why: str

    @property
    def has_axis(self) -> bool:
        """Whether the row is about values along an axis."""
        return "axis" in self.formula

    @property
    def arity(self) -> int:
        """The number of values that the formula reads."""
        return 2 if "y" in _code(self.formula).co_names else 1

    def exact(self, *values: Any, axis: int | None) -> Any:
        """Returns the formula of NumPy arrays."""
        with np.errstate(all="ignore"):
            return eval(_code(self.formula), _NUMPY, {**dict(zip("xy", values, strict=False)), "axis": axis})

    def written(self, axis: int | None, n_axes: int, keeps: bool) -> str:
        """Returns the replacement for arrays of so many axes, one of which is reduced; sums may keep it."""
        is_default = n_axes < 2 or (axis is None and "softmax" not in self.replacement)
        options = [f"axis={axis}"] * (not is_default) + ["keepdims=True"] * keeps
        return self.replacement.replace(", axis", "".join(f", {x}" for x in options))


@functools.cache
def _code(text: str) -> Any:
    return compile(text, "<cure>", "eval")


_OVERFLOWS, _ROUNDS = "overflows or underflows half-way", "takes the logarithm of a value that rounds to 0"
_CANCELS = "subtracts numbers that are equal but for rounding, so its result may be 0 or negative"
_AT_ZERO, _IS_QUOTIENT = "has an infinite derivative at 0", "is 0 / 0 at 0"


def _root(square: str) -> str:
    """Returns the root of a sum of squares, with a derivative of 0 where the sum is 0."""
    return f"jnp.where((square := {square}) == 0, 0.0, jnp.sqrt(jnp.where(square == 0, 1.0, square)))"


# Those of more ops come before those of fewer.
CURES = [
    Cure("log(sum(softmax(x, axis) * y, axis))", "jax.nn.logsumexp(jax.nn.log_softmax(x, axis), axis, b=y)", _ROUNDS),
    Cure("log(softmax(x, axis))", "jax.nn.log_softmax(x, axis)", _ROUNDS),
    Cure("log(sum(exp(x), axis))", "jax.nn.logsumexp(x, axis)", _OVERFLOWS),
    Cure("log(mean(exp(x), axis))", "jax.nn.logmeanexp(x, axis)", _OVERFLOWS),
    Cure("log(cumsum(exp(x), axis))", "jax.lax.cumlogsumexp(x, axis)", _OVERFLOWS),
    Cure("exp(x) / sum(exp(x), axis, keepdims=True)", "jax.nn.softmax(x, axis)", _OVERFLOWS),
    Cure("log(sigmoid(x))", "jax.nn.log_sigmoid(x)", _ROUNDS),
    Cure("log(1 - sigmoid(x))", "jax.nn.log_sigmoid(-x)", _ROUNDS),
    Cure("log(cosh(x))", "jnp.logaddexp(x, -x) - jnp.log(2.0)", _OVERFLOWS),
    Cure("log(exp(x) + exp(y))", "jnp.logaddexp(x, y)", _OVERFLOWS),
    Cure("log(1 + exp(x))", "jax.nn.softplus(x)", _OVERFLOWS),
    Cure("1 / (1 + exp(-x))", "jax.nn.sigmoid(x)", _OVERFLOWS),
    Cure("1 / (1 + exp(x))", "jax.nn.sigmoid(-x)", _OVERFLOWS),
    Cure("log(1 - tanh(x)**2)", "2 * (jnp.log(2.0) - x - jax.nn.softplus(-2 * x))", _ROUNDS),
    Cure("log(1 - exp(x))", "jnp.log(-jnp.expm1(x))", _ROUNDS),
    Cure("log(exp(x) - 1)", "x + jnp.log(-jnp.expm1(-x))", _OVERFLOWS),
    Cure("log(1 + x)", "jnp.log1p(x)", _ROUNDS),
    Cure("log(exp(x))", "x", _OVERFLOWS),
    Cure("exp(x) / exp(y)", "jnp.exp(x - y)", _OVERFLOWS),
    Cure("exp(x * log(y))", "y**x", "is 0 times -inf at 0, or its derivative is"),
    Cure("x * log(x / y)", "jax.scipy.special.rel_entr(x, y)", "is 0 times -inf at 0"),
    Cure("x * log(x)", "jax.scipy.special.xlogy(x, x)", "is 0 times -inf at 0"),
    Cure("x * log(y)", "jax.scipy.special.xlogy(x, y)", "is 0 times -inf where both are 0"),
    Cure("log(abs(det(x)))", "jnp.linalg.slogdet(x)[1]", _OVERFLOWS),
    Cure("log(diag(exp(x)) / sum(exp(x), axis))", "jnp.diag(x) - jax.nn.logsumexp(x, axis)", _OVERFLOWS),
    Cure("log(prod(x, axis))", "jnp.sum(jnp.log(x), axis)", _OVERFLOWS),
    Cure("log(x * y)", "jnp.log(x) + jnp.log(y)", _OVERFLOWS),
    Cure("log(x / y)", "jnp.log(x) - jnp.log(y)", _OVERFLOWS),
    Cure("sin(x) / x", "jnp.sinc(x / jnp.pi)", _IS_QUOTIENT),
    Cure("sqrt(x**2 + y**2)", _root("x**2 + y**2"), _AT_ZERO),
    Cure("sqrt(x**2 + y**2)", "jnp.hypot(x, y)", _OVERFLOWS),
    Cure("arctan(x / y)", "jnp.arctan2(x, y)", "has a derivative of 0 times infinity where it divides by 0"),
    Cure("mean(x**2, axis) - mean(x, axis)**2", "jnp.var(x, axis)", _CANCELS),
    Cure("sqrt(sum(x**2, axis))", _root("jnp.sum(x**2, axis)"), _AT_ZERO),
    Cure("sqrt(mean(x**2, axis))", _root("jnp.mean(x**2, axis)"), _AT_ZERO),
    Cure("std(x, axis)", _root("jnp.var(x, axis)"), _AT_ZERO),
]


class Part:
    """A part of a program: a value as a function of others that it is computed from.

    Attributes:
        root: the value.
        inputs: the values that it is computed from.
        taken: the elements that the program takes before it computes the root, as in `log(p[i])`; the root is then what
            it would compute of all elements. None if it takes none.
        nodes: the values on the way from the inputs to the root, the root first.
    """

    def __init__(self, root: Node, inputs: tuple[Node, ...], taken: Node | None = None) -> None:
        self.root, self.inputs, self.taken, self.nodes = root, inputs, taken, [root]
        for node in self.nodes:
            self.nodes += [x for x in _reads(node) if x.eqn and x not in (*self.nodes, *inputs)]
        self._samples, self._drawn = _samples(self), list[Any]()

    def draws(self) -> Iterator[tuple[Sequence[np.ndarray], np.ndarray | None]]:
        """Yields samples of the inputs, and the root in float64; None if an op has no float64."""
        yield from self._drawn
        for values in self._samples:
            try:
                with precise(FLOAT64):
                    out = np.asarray(self._evaluated(*map(jnp.asarray, values)))
            except Exception:
                out = None
            self._drawn.append((values, out))
            yield values, out

    def _evaluated(self, *values: Any) -> Any:
        found = dict(zip(self.inputs, values, strict=True))
        for node in sorted(self.nodes, key=lambda x: x.number):
            operands = [found[x] if x in found else widened(jnp.asarray(x.held), FLOAT64) for x in _reads(node)]
            outs = evaluate_in(FLOAT64, node.place, operands) or ()  # an op may not run in float64
            found[node] = outs[node.index[0]]
        return found[self.root]

    @property
    def constants(self) -> list[float]:
        """The numbers that these values are computed from."""
        numbers = (x.values for node in self.nodes for x in node.operands if x.is_constant)
        return list({x.min: None for x in numbers if x.min is not None and x.min == x.max})

    @property
    def axes(self) -> list[int | None]:
        """The axes that these values are reduced along; None if it is all of them."""
        params = [x.eqn.params for x in self.nodes]
        reduced = [x["axes"] for x in params if "axes" in x] + [(x["axis"],) for x in params if "axis" in x]
        n = len(self.inputs[0].values.shape)
        return [*dict.fromkeys(None if len(x) == n else x[0] for x in reduced if len(x) in (1, n))] or [None]

    @property
    def ops(self) -> list[tuple[str, int]]:
        """The ops that compute these values, and their numbers of axes: those of the same lines in another layer."""
        return [(x.primitive, len(x.values.shape)) for x in self.nodes]


def _reads(node: Node) -> list[Node]:
    return [x.outside for x in node.operands]


def parts(root: Node) -> Iterator[Part]:
    """Yields the parts of a program that compute a value from one or two others, those of fewer ops first."""
    yield from _parts(root)
    taken = root.operands[0]
    if taken.eqn and rule_of(taken.eqn).takes and root.primitive == "log":
        yield from _parts(Node(root.values, root.place, root.index, taken.operands[:1], number=root.number), taken)


def _parts(root: Node, taken: Node | None = None) -> Iterator[Part]:
    cuts = [_inputs(root.operands)]
    for cut in cuts:
        nodes = sorted(cut, key=lambda x: x.number)
        if 0 < len(nodes) <= 2 and sum(np.prod(x.values.shape) for x in nodes) < _MOST_ELEMENTS:
            yield from (Part(root, inputs, taken) for inputs in itertools.permutations(nodes))
        for node in nodes if len(nodes) <= 2 else nodes[-1:]:
            new = _inputs([*(cut - {node}), *node.operands]) if node.eqn else cut
            if len(new) <= _MOST_INPUTS and new not in cuts and len(cuts) < _MOST_CUTS:
                cuts.append(new)


def _inputs(nodes: Iterable[Node]) -> frozenset[Node]:
    """Returns the floating values among some, and those that the integers and flags among them are computed from."""
    found: set[Node] = set()
    for node in (x.outside for x in nodes):
        if node.is_floating and not node.is_constant:
            found.add(node)
        elif not node.is_floating:
            found |= _inputs(node.operands)
    return frozenset(found)


class Match(NamedTuple):
    """A part of a program that is equal to the formula of a cure, along an axis."""

    cure: Cure
    part: Part
    axis: int | None

    @property
    def text(self) -> str:
        """The replacement of `x` and `y`, as it is written in the program."""
        shapes = [jax.ShapeDtypeStruct(x.values.shape, np.float32) for x in self.part.inputs]
        text = self.cure.written(self.axis, len(shapes[0].shape), False)
        root = self.part.taken.operands[0] if self.part.taken else self.part.root
        keeps = jax.eval_shape(_function(text), *shapes).shape != root.values.shape
        return self.cure.written(self.axis, len(shapes[0].shape), True) if keeps else text

    def rewrite(self) -> Rewrite:
        """Returns the program with the replacement in place of the part."""
        function, taken = _function(self.text), self.part.taken

        def run(*values: Any) -> Any:
            x = function(*values)
            outs = taken and evaluate_in(x.dtype, taken.place, [x, *(i.held for i in taken.operands[1:])])
            return outs[0] if outs else x

        return Rewrite(self.part.root.key, [x.key for x in self.part.inputs], run)

    def written(self, primal: Collection[Node]) -> tuple[str, str] | None:
        """Returns an expression of the user, and what to write in its place; None if their names are not known."""
        root, inputs = self.part.root, dict(zip("xy", self.part.inputs, strict=False))
        is_batched = any("vmap" in str(x.source_info.name_stack) for x in root.place.eqns)
        if is_inner(root, primal) or (is_batched and self.cure.has_axis):
            return None
        return in_users_names(self.text, root, self.part.nodes, inputs, self.part.taken)


def _function(text: str) -> Callable[..., Any]:
    return lambda *values: eval(_code(text), {"jax": jax, "jnp": jnp, **dict(zip("xy", values, strict=False))})


def matches(found: Sequence[Part]) -> Iterator[Match]:
    """Yields the parts of a program that are equal to formulas, in the order of the cures."""
    for cure, part in itertools.product(CURES, found):
        if len(part.inputs) == cure.arity:
            for axis in part.axes if cure.has_axis else (None,):
                is_equal = all(_is_equal(cure, axis, *draw) for draw in part.draws())
                if is_equal and any(np.any(np.isfinite(x)) for _, x in part.draws() if x is not None):
                    yield Match(cure, part, axis)


def _samples(part: Part) -> Iterator[list[np.ndarray]]:
    """Yields inputs of a part: random ones in their range and outside of it, and some at 0 and at its constants."""
    rng = np.random.default_rng(0)
    for scale, by in ((1, 0.1), (0, 1), (0, 1), (0, 1)):
        yield [scale * _in_range(x, rng) + by * rng.normal(size=x.values.shape) for x in part.inputs]
    edges = [[0.0], [0.0, 1.0, -1.0], [6.0, -6.0, 3.0], *([c / 2, c, 2 * c] for c in part.constants)]
    for edge, first in itertools.product(edges, range(3)):
        yield [np.resize(np.roll(edge, first + i), x.values.shape) for i, x in enumerate(part.inputs)]


def _in_range(x: Node, rng: np.random.Generator) -> np.ndarray:
    """Returns random values of the range of a value, divided by its size."""
    low, high = x.values.min or 0.0, x.values.max or 0.0
    return rng.uniform(low, high, x.values.shape) / max(1.0, -low, high)


def _is_equal(cure: Cure, axis: int | None, values: Sequence[np.ndarray], expected: np.ndarray | None) -> bool:
    """Whether a formula of some values is equal to what a part of a program computes; an axis may be kept."""
    try:
        result = np.asarray(cure.exact(*values, axis=axis))
    except Exception:  # of shapes that the formula does not take
        return False
    if expected is None or np.squeeze(result).shape != np.squeeze(expected).shape:
        return False
    return np.allclose(result.reshape(expected.shape), expected, 1e-6, 1e-7, equal_nan=True)
