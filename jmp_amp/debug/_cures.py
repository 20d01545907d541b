"""The cures of non-finite values: formulas, and equal functions that stay finite.

A part of the program is found by its meaning: a value, as a function of one or two values that it is computed from, is
equal in float64 to the formula of a row. `_trials.py` then runs the program with the replacement in its place.
"""

import collections
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmp_amp._autocast import rule_of
from jmp_amp.debug._evaluation import FLOAT64, Rewrite, evaluate_in, precise, widened
from jmp_amp.debug._expressions import in_users_names, is_inner, with_numbers
from jmp_amp.debug._nodes import Node

_MOST_CUTS, _MOST_INPUTS, _MOST_ELEMENTS = 40, 5, 2**20
_EXPONENTIALS = {"exp", "exp2", "expm1", "log", "log2", "log1p", "logistic", "tanh", "cosh", "sinh"}
_ELEMENTWISE = {"log", "log2", "log1p", "neg", "sqrt", "exp"}

# The names in formulas: those of NumPy, and these.
_NUMPY = vars(np) | {
    "det": np.linalg.det,
    "softmax": lambda x, axis: np.exp(x) / np.sum(np.exp(x), axis, keepdims=True),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
}


class Cure(NamedTuple):
    """A row of the table.

    Attributes:
        formula: a Python expression of `x`, `y`, the axis, and a number `c` of the program, with functions of NumPy;
            the row applies to parts of a program that are equal to it.
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

    @property
    def is_exponential(self) -> bool:
        """Whether the formula has exponentials or logarithms, which a sum over one element does not show."""
        return "exp" in self.formula or "log" in self.formula

    def exact(self, *values: Any, **numbers: Any) -> Any:
        """Returns the formula of NumPy arrays."""
        with np.errstate(all="ignore"):
            return eval(_code(self.formula), _NUMPY, dict(zip("xy", values, strict=False)) | numbers)

    def numbers(self, shape: tuple[int, ...], part: "Part") -> Iterator[dict[str, Any]]:
        """Yields the numbers that the formula may have in a part of a program, whose `x` has this shape."""
        axes = [*range(len(shape)), None] if len(shape) > 1 else [None, *range(len(shape))]
        reduced = [tuple(x.eqn.params["axes"]) for x in part.nodes if "axes" in x.eqn.params]
        if 1 in shape and reduced:  # the values do not tell an axis from all axes
            axes = [x for x in axes if (tuple(range(len(shape))) if x is None else (x,)) in reduced]
        for axis in axes if self.has_axis else (None,):
            for c in part.constants if "c" in _code(self.formula).co_names else (1.0,):
                yield {"axis": axis, "c": c}


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
    Cure("log(sum(y * exp(x), axis))", "jax.nn.logsumexp(x, axis, b=y)", _OVERFLOWS),
    Cure("log(exp(x) @ y)", "jax.nn.logsumexp(x[..., None] + jnp.log(y), -2)", _OVERFLOWS),
    Cure("exp(x) / sum(exp(x), axis, keepdims=True)", "jax.nn.softmax(x, axis)", _OVERFLOWS),
    Cure("y * exp(x) / sum(exp(x), axis, keepdims=True)", "y * jax.nn.softmax(x, axis)", _OVERFLOWS),
    Cure("sum(y * exp(x), axis) / sum(exp(x), axis)", "jnp.sum(y * jax.nn.softmax(x, axis), axis)", _OVERFLOWS),
    Cure("exp(x) @ y / sum(exp(x), -1)", "jax.nn.softmax(x, -1) @ y", _OVERFLOWS),
    Cure("exp(x) @ y / sum(exp(x), -1, keepdims=True)", "jax.nn.softmax(x, -1) @ y", _OVERFLOWS),
    Cure("(exp(x) - exp(-x)) / (exp(x) + exp(-x))", "jnp.tanh(x)", _OVERFLOWS),
    Cure("(exp(x) - 1) / (exp(x) + 1)", "jnp.tanh(x / 2)", _OVERFLOWS),
    Cure("log(sigmoid(x))", "jax.nn.log_sigmoid(x)", _ROUNDS),
    Cure("log(1 - sigmoid(x))", "jax.nn.log_sigmoid(-x)", _ROUNDS),
    Cure("log(cosh(x))", "jnp.logaddexp(x, -x) - jnp.log(2.0)", _OVERFLOWS),
    Cure("log(exp(x) + exp(y))", "jnp.logaddexp(x, y)", _OVERFLOWS),
    Cure("log(1 + exp(x))", "jax.nn.softplus(x)", _OVERFLOWS),
    Cure("1 / (1 + exp(-x))", "jax.nn.sigmoid(x)", _OVERFLOWS),
    Cure("1 / (1 + exp(x))", "jax.nn.sigmoid(-x)", _OVERFLOWS),
    Cure("y / (1 + exp(-x))", "y * jax.nn.sigmoid(x)", _OVERFLOWS),
    Cure("y / (1 + exp(x))", "y * jax.nn.sigmoid(-x)", _OVERFLOWS),
    Cure("log(1 - tanh(x)**2)", "2 * (jnp.log(2.0) - x - jax.nn.softplus(-2 * x))", _ROUNDS),
    Cure("log(1 - exp(x))", "jnp.log(-jnp.expm1(x))", _ROUNDS),
    Cure("log(exp(x) - 1)", "x + jnp.log(-jnp.expm1(-x))", _OVERFLOWS),
    Cure("log(1 + x)", "jnp.log1p(x)", _ROUNDS),
    Cure("log(exp(x) * y)", "x + jnp.log(y)", _OVERFLOWS),
    Cure("log(exp(x) / y)", "x - jnp.log(y)", _OVERFLOWS),
    Cure("log(exp(x))", "x", _OVERFLOWS),
    Cure("exp(x) / exp(y)", "jnp.exp(x - y)", _OVERFLOWS),
    Cure("exp(x * log(y))", "y**x", "is 0 times -inf at 0, or its derivative is"),
    Cure("x * log(x / y)", "jax.scipy.special.rel_entr(x, y)", "is 0 times -inf at 0"),
    Cure("x * log(x)", "jax.scipy.special.xlogy(x, x)", "is 0 times -inf at 0"),
    Cure("x * log(y)", "jax.scipy.special.xlogy(x, y)", "is 0 times -inf where both are 0"),
    Cure("x * log(1 + y)", "jax.scipy.special.xlog1py(x, y)", "is 0 times -inf where both are 0"),
    Cure("log(abs(det(x)))", "jnp.linalg.slogdet(x)[1]", _OVERFLOWS),
    Cure("log(exp(x) / sum(exp(y), axis))", "x - jax.nn.logsumexp(y, axis)", _OVERFLOWS),
    Cure("log(diag(exp(x)) / sum(exp(x), axis))", "jnp.diag(x) - jax.nn.logsumexp(x, axis)", _OVERFLOWS),
    Cure("log(c * i0(x))", "jnp.log(c * jax.scipy.special.i0e(x)) + jnp.abs(x)", _OVERFLOWS),
    Cure("log(prod(x, axis))", "jnp.sum(jnp.log(x), axis)", _OVERFLOWS),
    Cure("log(x * y)", "jnp.log(x) + jnp.log(y)", _OVERFLOWS),
    Cure("log(x / y)", "jnp.log(x) - jnp.log(y)", _OVERFLOWS),
    Cure("sin(x) / x", "jnp.sinc(x / jnp.pi)", _IS_QUOTIENT),
    Cure("(1 - cos(x)) / x**2", "0.5 * jnp.sinc(x / (2 * jnp.pi))**2", _IS_QUOTIENT),
    Cure("log(x + sqrt(x**2 + 1))", "jnp.arcsinh(x)", _OVERFLOWS),
    Cure("sqrt(1 + x**2)", "jnp.hypot(1.0, x)", _OVERFLOWS),
    Cure("sqrt(x**2 + y**2)", _root("x**2 + y**2"), _AT_ZERO),
    Cure("sqrt(x**2 + y**2)", "jnp.hypot(x, y)", _OVERFLOWS),
    Cure("minimum(x, c) / x", "c / jnp.maximum(x, c)", _IS_QUOTIENT),
    Cure("arctan(x / y)", "jnp.arctan2(x, y)", "has a derivative of 0 times infinity where it divides by 0"),
    Cure("mean(x**2, axis) - mean(x, axis)**2", "jnp.var(x, axis)", _CANCELS),
    Cure("sqrt(sum(x**2, axis))", _root("jnp.sum(x**2, axis)"), _AT_ZERO),
    Cure("sqrt(mean(x**2, axis))", _root("jnp.mean(x**2, axis)"), _AT_ZERO),
    Cure("std(x, axis)", _root("jnp.var(x, axis)"), _AT_ZERO),
]


class Part(NamedTuple):
    """A part of a program: a value as a function of others that it is computed from.

    Attributes:
        root: the value, before `moves`.
        inputs: the values that it is computed from.
        moves: the ops that move the elements of the root; they come before it in the program, as in `log(p[i])`.
    """

    root: Node
    inputs: tuple[Node, ...]
    moves: tuple[Node, ...] = ()

    def __call__(self, *values: Any) -> Any:
        """Returns the root in float64."""
        found = dict(zip(self.inputs, values, strict=True))
        for node in sorted(self.nodes, key=lambda x: x.number):
            operands = [x.outside for x in node.operands]
            arrays = [found[x] if x in found else widened(jnp.asarray(x.held), FLOAT64) for x in operands]
            outs = evaluate_in(FLOAT64, node.place, arrays) or ()  # an op may not run in float64
            found[node] = outs[node.index[0]]
        return found[self.root]

    @property
    def nodes(self) -> list[Node]:
        """The values on the way from the inputs to the root, the root first."""
        found = [self.root]
        for node in found:
            found += [x for x in (y.outside for y in node.operands) if x.eqn and x not in (*found, *self.inputs)]
        return found

    @property
    def constants(self) -> list[float]:
        """The numbers that these values are computed from, and 1."""
        numbers = (x.values for node in self.nodes for x in node.operands if x.is_constant)
        return [1.0, *{float(f"{x.min:.7g}"): None for x in numbers if x.min is not None and x.min == x.max}]

    @property
    def is_exponential(self) -> bool:
        """Whether there are exponentials or logarithms among these ops."""
        return not _EXPONENTIALS.isdisjoint(x.primitive for x in self.nodes)

    @property
    def ops(self) -> list[tuple[str, int]]:
        """The ops that compute these values, and their numbers of axes: those of the same lines in another layer."""
        return [(x.primitive, len(x.values.shape)) for x in self.nodes]


def parts(root: Node) -> Iterator[Part]:
    """Yields the parts of a program that compute a value from one or two others, those of fewer ops first."""
    yield from (Part(root, cut) for cut in _cuts(root))
    node, moves = root.operands[0] if len(root.operands) == 1 else root, list[Node]()
    while node.eqn is not None and (rule_of(node.eqn).moves or rule_of(node.eqn).takes):
        if rule_of(node.eqn).is_cast is False:
            moves.insert(0, node)
        node = node.operands[0]
    if moves and root.primitive in _ELEMENTWISE:
        before = Node(root.values, root.place, root.index, [node], number=root.number)
        yield from (Part(before, cut, tuple(moves)) for cut in _cuts(before))


def _cuts(root: Node) -> Iterator[tuple[Node, ...]]:
    waiting = collections.deque([_inputs(root.operands)])
    seen = set(waiting)
    for _ in range(_MOST_CUTS):
        if not waiting:
            return
        cut = waiting.popleft()
        nodes = sorted(cut, key=lambda x: x.number)
        if 0 < len(nodes) <= 2 and sum(np.prod(x.values.shape) for x in nodes) < _MOST_ELEMENTS:
            yield tuple(nodes)
        for node in nodes if len(nodes) <= 2 else nodes[-1:]:
            if node.eqn is not None:
                same_op = {x for x in nodes if x.place == node.place}
                new = _inputs([*(cut - same_op), *node.operands])
                if len(new) <= _MOST_INPUTS and new not in seen:
                    seen.add(new)
                    waiting.append(new)


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
    """A part of a program that is equal to the formula of a cure: the cure, its inputs in order, and its numbers."""

    cure: Cure
    part: Part
    numbers: Mapping[str, Any]

    @property
    def text(self) -> str:
        """The replacement of `x` and `y`, as it is written in the program."""
        part = self.part
        shape = (part.moves[0].operands[0] if part.moves else part.root).values.shape
        is_flat = len(part.inputs[0].values.shape) < 2
        plain = with_numbers(self.cure.replacement, self.numbers, is_flat, False)
        shapes = [jax.ShapeDtypeStruct(x.values.shape, np.float32) for x in part.inputs]
        keeps = jax.eval_shape(_function(plain), *shapes).shape != shape
        return with_numbers(self.cure.replacement, self.numbers, is_flat, True) if keeps else plain

    def rewrite(self) -> Rewrite:
        """Returns the program with the replacement in place of the part."""
        moves, n = self.part.moves, len(self.part.inputs)
        others = [x for move in moves for x in move.operands[1:]]

        def moved(*values: Any) -> Any:
            x, rest = _function(self.text)(*values[:n]), iter(values[n:])
            for move in moves:
                operands = [x, *(y.held if y.held is not None else next(rest) for y in move.operands[1:])]
                (x,) = evaluate_in(np.dtype(x.dtype), move.place, operands) or [x]
            return x

        inputs = [x.key for x in (*self.part.inputs, *(x for x in others if x.held is None))]
        return Rewrite(self.part.root.key, inputs, moved)

    def written(self, primal: Collection[Node]) -> tuple[str, str] | None:
        """Returns an expression of the user, and what to write in its place; None if their names are not known."""
        part, root = self.part, self.part.root
        is_batched = any("vmap" in str(x.source_info.name_stack) for x in root.place.eqns)
        if is_inner(root, primal) or (is_batched and self.cure.has_axis):
            return None
        names = dict(zip("xy", part.inputs, strict=False))
        return in_users_names(self.text, root, part.nodes, names, part.moves)


def _function(text: str) -> Callable[..., Any]:
    return lambda *values: eval(_code(text), {"jax": jax, "jnp": jnp, **dict(zip("xy", values, strict=False))})


def matches(found: Sequence[Part]) -> Iterator[Match]:
    """Yields the parts of a program that are equal to formulas, in the order of the cures."""
    drawn = [(part, _Draws(part)) for part in found]
    for cure, (part, draws) in itertools.product(CURES, drawn):
        if len(part.inputs) != cure.arity or (cure.is_exponential and not part.is_exponential):
            continue
        for order in itertools.permutations(range(cure.arity)):
            inputs = [part.inputs[i] for i in order]
            for numbers in cure.numbers(inputs[0].values.shape, part):
                if all(_is_equal(cure, order, numbers, draw) for draw in draws) and draws.are_finite:
                    yield Match(cure, part._replace(inputs=tuple(inputs)), numbers)


class _Draws:
    """Samples of the inputs of a part, and what it computes, once it is needed; None if an op has no float64."""

    def __init__(self, part: Part) -> None:
        self._part, self._samples = part, _samples(part)
        self._known: list[tuple[Sequence[np.ndarray], np.ndarray | None]] = []

    def __iter__(self) -> Iterator[tuple[Sequence[np.ndarray], np.ndarray | None]]:
        yield from self._known
        while (values := next(self._samples, None)) is not None:
            try:
                with precise(FLOAT64):
                    out = np.asarray(self._part(*map(jnp.asarray, values)))
            except Exception:
                out = None
            self._known.append((values, out))
            yield values, out

    @property
    def are_finite(self) -> bool:
        """Whether some value is finite."""
        return any(np.isfinite(out).any() for _, out in self if out is not None)


def _samples(part: Part) -> Iterator[list[np.ndarray]]:
    """Yields inputs of a part: random ones in their range and outside of it, and some at 0 and at its constants."""
    rng = np.random.default_rng(0)
    for scale, by in ((1, 0.1), (1, 0.1), (0, 1), (0, 1), (0, 1)):
        yield [scale * _in_range(x, rng) + by * rng.normal(size=x.values.shape) for x in part.inputs]
    edges = [[0.0], [0.0, 1.0, -1.0], [6.0, -6.0, 3.0], *([c / 2, c, 2 * c] for c in part.constants)]
    for edge, first in itertools.product(edges, range(3)):
        yield [np.resize(np.roll(edge, first + i), x.values.shape) for i, x in enumerate(part.inputs)]


def _in_range(x: Node, rng: np.random.Generator) -> np.ndarray:
    """Returns random values of the range of a value, divided by its size."""
    low, high = x.values.min or 0.0, x.values.max or 0.0
    return rng.uniform(low, high, x.values.shape) / max(1.0, -low, high)


def _is_equal(cure: Cure, order: Sequence[int], numbers: Mapping[str, Any], draw: tuple[Any, Any]) -> bool:
    """Whether a formula, of values in some order, is equal to what a part of a program computes."""
    values, expected = [draw[0][i] for i in order], draw[1]
    try:
        result = np.asarray(cure.exact(*values, **numbers))
    except Exception:  # of shapes that the formula does not take
        return False
    if expected is None or expected.ndim not in (result.ndim, values[0].ndim):  # an axis may be kept
        return False
    if np.squeeze(result).shape != np.squeeze(expected).shape:
        return False
    return np.allclose(result.reshape(expected.shape), expected, 1e-6, 1e-7, equal_nan=True)
