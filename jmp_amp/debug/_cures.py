"""The cures of non-finite values: functions that are equal to a part of the program, and that stay finite.

A cure is tried before it is reported. The part of the program is found by its meaning: a value, as a function of one or
two values that it is computed from, is equal in float64 to the formula of a row. The program then runs with the
replacement in place of that part; see `_trials.py`.
"""

import collections
import functools
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmp_amp._autocast import rule_of
from jmp_amp.debug._evaluation import FLOAT64, Rewrite, evaluate_in, precise, widened
from jmp_amp.debug._expressions import in_users_names, is_inner, pasted
from jmp_amp.debug._nodes import Node

_MOST_CUTS, _MOST_INPUTS = 40, 5
_ELEMENTWISE = {"log", "log2", "log1p", "neg", "sqrt", "exp"}


def _softmax(x: Any, axis: Any) -> Any:
    return np.exp(x) / np.sum(np.exp(x), axis, keepdims=True)


# The names in formulas: those of NumPy, and these.
_NUMPY = vars(np) | {"det": np.linalg.det, "softmax": _softmax, "sigmoid": lambda x: 1 / (1 + np.exp(-x))}
_EPS = (1e-12, 1e-18, 1e-24, 1e-10, 1e-8, 1e-6, 1e-4, 1e-3)
# The names of arbitrary numbers in replacements, and what is tried. The result must not depend on them. The exponential
# of `most` is the largest in float32.
NUMBERS = {"eps": _EPS, "near": (1e-6, 1e-2), "fill": (1,), "other": (0,), "most": (88.72,)}


class Cure(NamedTuple):
    """A row of the table.

    Attributes:
        formula: a Python expression of `x`, `y`, the axis, and a number `c` of the program, with functions of NumPy;
            the row applies to parts of a program that are equal to it.
        replacement: the expression that is tried in its place. It may read one of the names in `NUMBERS`.
        words: why the formula fails.
        is_equal: whether the replacement is equal to the formula where that is finite.
    """

    formula: str
    replacement: str
    words: str
    is_equal: bool = True

    @property
    def has_axis(self) -> bool:
        """Whether the row is about values along an axis."""
        return "axis" in self.formula

    @property
    def arity(self) -> int:
        """The number of values that the formula reads."""
        return 2 if "y" in _code(self.formula).co_names else 1

    @property
    def tries(self) -> Sequence[float]:
        """The numbers to try in the replacement, in this order; 0 if it has none."""
        return next((x for name, x in NUMBERS.items() if name in _code(self.replacement).co_names), (0.0,))

    def exact(self, *values: Any, **numbers: Any) -> Any:
        """Returns the formula of NumPy arrays."""
        with np.errstate(all="ignore"):
            return eval(_code(self.formula), _NUMPY, dict(zip("xy", values, strict=False)) | numbers)

    def function(self, number: Any, **numbers: Any) -> Callable[..., Any]:
        """Returns the replacement as a function of JAX arrays."""
        names = {"jax": jax, "jnp": jnp, **dict.fromkeys(NUMBERS, number), **numbers}

        def replaced(*values: Any) -> Any:
            with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
                return eval(_code(self.replacement), names | dict(zip("xy", values, strict=False)))

        return replaced

    def numbers(self, shape: tuple[int, ...], part: "Part") -> Iterator[dict[str, Any]]:
        """Yields the numbers that the formula may have in a part of a program, whose `x` has this shape."""
        names = _code(self.formula).co_names
        axes = [*range(len(shape)), None] if len(shape) > 1 else [None, *range(len(shape))]
        reduced = [tuple(x.eqn.params["axes"]) for x in part.nodes if "axes" in x.eqn.params]
        if 1 in shape and reduced:  # the values do not tell an axis from all axes
            axes = [x for x in axes if (tuple(range(len(shape))) if x is None else (x,)) in reduced]
        for axis in axes if self.has_axis else (None,):
            for c in part.constants if "c" in names else (1.0,):
                yield {"axis": axis, "c": c}

    def text(self, number: float) -> str:
        """Returns the replacement with the number that was tried."""
        written = f"{number:.0e}".replace("e-0", "e-") if 0 < number < 1 else str(number)
        return re.sub(rf"\b({'|'.join(NUMBERS)})\b", written, self.replacement)


@functools.cache
def _code(text: str) -> Any:
    return compile(text, "<cure>", "eval")


_OVERFLOWS, _ROUNDS = "overflows or underflows half-way", "takes the logarithm of a value that rounds to 0"
_CANCELS = "subtracts numbers that are equal but for rounding, so its result may be 0 or negative"
_AT_ZERO, _EDGE = "has an infinite derivative at 0", "has an infinite derivative at the end of its domain"
_BRANCH = "is not selected by `jnp.where` where it is not finite, but its derivative is 0 times infinity there"
_DIVIDES = "divides by 0 where the result does not matter"
_UNSELECTED = "overflows where another value is selected, and its derivative is 0 times infinity there"

# Equal functions first, those of more ops before those of fewer.
CURES = [
    Cure("log(sum(softmax(x, axis) * y, axis))", "jax.nn.logsumexp(jax.nn.log_softmax(x, axis), axis, b=y)", _ROUNDS),
    Cure("log(softmax(x, axis))", "jax.nn.log_softmax(x, axis)", _ROUNDS),
    Cure("log(sum(exp(x), axis))", "jax.nn.logsumexp(x, axis)", _OVERFLOWS),
    Cure("log(mean(exp(x), axis))", "jax.nn.logsumexp(x, axis) - jnp.log(jnp.sum(jnp.ones_like(x), axis))", _OVERFLOWS),
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
    Cure("log(exp(x) * y)", "x + jnp.log(y)", _OVERFLOWS),
    Cure("log(exp(x) / y)", "x - jnp.log(y)", _OVERFLOWS),
    Cure("log(exp(x))", "x", _OVERFLOWS),
    Cure("exp(x) / exp(y)", "jnp.exp(x - y)", _OVERFLOWS),
    Cure("log(abs(det(x)))", "jnp.linalg.slogdet(x)[1]", _OVERFLOWS),
    Cure("log(exp(x) / sum(exp(y), axis))", "x - jax.nn.logsumexp(y, axis)", _OVERFLOWS),
    Cure("log(diag(exp(x)) / sum(exp(x), axis))", "jnp.diag(x) - jax.nn.logsumexp(x, axis)", _OVERFLOWS),
    Cure("log(c * i0(x))", "jnp.log(c * jax.scipy.special.i0e(x)) + jnp.abs(x)", _OVERFLOWS),
    Cure("log(prod(x, axis))", "jnp.sum(jnp.log(x), axis)", _OVERFLOWS),
    Cure("log(x * y)", "jnp.log(x) + jnp.log(y)", _OVERFLOWS),
    Cure("log(x / y)", "jnp.log(x) - jnp.log(y)", _OVERFLOWS),
    Cure("sin(x) / x", "jnp.sinc(x / jnp.pi)", "is 0 / 0 at 0"),
    Cure("(1 - cos(x)) / x**2", "0.5 * jnp.sinc(x / (2 * jnp.pi))**2", "is 0 / 0 at 0"),
    Cure("log(x + sqrt(x**2 + 1))", "jnp.arcsinh(x)", _OVERFLOWS),
    Cure("sqrt(1 + x**2)", "jnp.hypot(1.0, x)", _OVERFLOWS),
    Cure("minimum(x, c) / x", "c / jnp.maximum(x, c)", "is 0 / 0 at 0"),
    Cure("arctan(x / y)", "jnp.arctan2(x, y)", "has a derivative of 0 times infinity where it divides by 0"),
    Cure("mean(x**2, axis) - mean(x, axis)**2", "jnp.var(x, axis)", _CANCELS),
    Cure(
        "sqrt(sum(x**2, axis))",
        "(m := jax.lax.stop_gradient(jnp.maximum(jnp.max(jnp.abs(x)), 1e-30))) * jnp.sqrt(jnp.sum((x / m)**2, axis))",
        "squares values whose squares overflow or underflow",
    ),
    # What the formula returns where it is not finite, or has no derivative, does not matter.
    Cure("sqrt(x)", "jnp.where(x > 0, jnp.sqrt(jnp.where(x > 0, x, 1)), other)", _BRANCH),
    Cure("log(x)", "jnp.log(jnp.where(x > 0, x, fill))", _BRANCH),
    Cure("x / y", "jnp.where(y == 0, fill, x) / jnp.where(y == 0, 1, y)", _DIVIDES),
    Cure("1 / x", "1 / jnp.where(x == 0, fill, x)", _DIVIDES),
    Cure("exp(x)", "jnp.exp(jnp.minimum(x, most))", _UNSELECTED),
    # The result changes by an eps at most.
    Cure("sqrt(sum(x**2, axis))", "jnp.sqrt(jnp.sum(x**2, axis) + eps)", _AT_ZERO),
    Cure("std(x, axis)", "jnp.sqrt(jnp.var(x, axis) + eps)", f"{_AT_ZERO}, or {_CANCELS}"),
    Cure("1 / sqrt(x)", "jax.lax.rsqrt(x + eps)", "is infinite at 0"),
    Cure("sqrt(x)", "jnp.sqrt(x + eps)", _AT_ZERO),
    Cure("cbrt(x)", "jnp.where(x == 0, 0, jnp.cbrt(jnp.where(x == 0, 1, x)))", _AT_ZERO),
    Cure("arctan2(x, y)", "jnp.arctan2(x, jnp.where((x == 0) & (y == 0), 1, y))", "has no derivative at (0, 0)"),
]

# What to do about values for which the function of the program is infinite, or not defined, in any precision.
BOUNDS = [
    Cure(
        "log(maximum(x, 0))",
        "jnp.log(jax.nn.softplus(x))",
        "is infinite where its operand is negative, in any precision; `softplus` is positive, but not equal to `relu`",
        is_equal=False,
    ),
    Cure("x * log(x)", "x * jnp.log(jnp.maximum(x, eps))", "is 0 times -inf at 0"),
    Cure("x * log(x / y)", "x * (jnp.log(jnp.maximum(x, eps)) - jnp.log(jnp.maximum(y, eps)))", "is 0 times -inf at 0"),
    Cure("arccos(x)", "jnp.arccos(jnp.clip(x, -1 + near, 1 - near))", _EDGE),
    Cure("arcsin(x)", "jnp.arcsin(jnp.clip(x, -1 + near, 1 - near))", _EDGE),
    Cure("arctanh(x)", "jnp.arctanh(jnp.clip(x, -1 + near, 1 - near))", _EDGE),
    Cure("arccosh(x)", "jnp.arccosh(jnp.maximum(x, 1 + near))", _EDGE),
    Cure("log(x)", "jnp.log(jnp.maximum(x, eps))", "is infinite at 0, or NaN below it"),
    Cure("log1p(x)", "jnp.log1p(jnp.maximum(x, -1 + near))", "is infinite at -1, or NaN below it"),
    Cure("sqrt(x)", "jnp.sqrt(jnp.maximum(x, eps))", "is NaN below 0"),
    Cure("1 / sqrt(x)", "jax.lax.rsqrt(jnp.maximum(x, eps))", "is NaN below 0"),
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
    def ops(self) -> list[tuple[str, int]]:
        """The ops that compute these values, and their numbers of axes: those of the same lines in another layer."""
        return [(x.primitive, len(x.values.shape)) for x in self.nodes]

    def rewrite(self, function: Callable[..., Any]) -> Rewrite:
        """Returns the program with a function of the inputs in place of this part."""
        others = [x for move in self.moves for x in move.operands[1:]]
        inputs = [x.key or x.held for x in (*self.inputs, *others)]

        def moved(*values: Any) -> Any:
            x, rest = function(*values[: len(self.inputs)]), iter(values[len(self.inputs) :])
            for move in self.moves:
                operands = [x, *itertools.islice(rest, len(move.operands) - 1)]
                (x,) = evaluate_in(np.dtype(x.dtype), move.place, operands) or [x]
            return x

        return Rewrite(self.root.key, inputs, moved)


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
        if 0 < len(nodes) <= 2:
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

    def rewrite(self, number: Any) -> Rewrite:
        """Returns the program with the replacement in place of the part."""
        return self.part.rewrite(self.cure.function(number, **self.numbers))

    def text(self, number: float, primal: Collection[Node]) -> str:
        """Returns what to write in a program of some values, in the names of the user if these are known."""
        text, root = self.cure.text(number), self.part.root
        plain = f"`{pasted(text)}`"
        names = dict(zip("xy", self.part.inputs, strict=False))
        shapes = [jax.ShapeDtypeStruct(x.values.shape, np.float32) for x in self.part.inputs]
        keeps = jax.eval_shape(self.cure.function(number, **self.numbers), *shapes).shape != root.values.shape
        is_batched = any("vmap" in str(x.source_info.name_stack) for x in root.place.eqns)
        if self.part.moves or is_inner(root, primal) or (is_batched and self.cure.has_axis):
            return plain
        found = in_users_names(text, root, self.part.nodes, names, self.numbers, keeps)
        return "`{1}` in place of `{0}`".format(*found) if found else plain


def matches(cures: Sequence[Cure], found: Sequence[Part]) -> Iterator[Match]:
    """Yields the parts of a program that are equal to formulas, in the order of the cures."""
    draws = [(part, _draws(part, _samples(part))) for part in found]
    for cure, (part, drawn) in itertools.product(cures, draws):
        if not drawn or len(part.inputs) != cure.arity:
            continue
        for order in itertools.permutations(range(cure.arity)):
            inputs = [part.inputs[i] for i in order]
            for numbers in cure.numbers(inputs[0].values.shape, part):
                is_equal = functools.partial(_is_equal, cure, order, numbers)
                if all(map(is_equal, drawn)) and all(map(is_equal, _draws(part, _edges(part)))):
                    yield Match(cure, part._replace(inputs=tuple(inputs)), numbers)


def _draws(part: Part, samples: Iterable[Sequence[np.ndarray]]) -> list[tuple[Sequence[np.ndarray], np.ndarray]]:
    """Returns samples of the inputs of a part, and what it computes.

    Returns nothing if it is never finite, or if an op does not run in float64.
    """
    try:
        with precise(FLOAT64):
            draws = [(values, np.asarray(part(*map(jnp.asarray, values)))) for values in samples]
    except Exception:
        return []
    return draws if any(np.isfinite(out).any() for _, out in draws) else []


def _samples(part: Part) -> Iterator[list[np.ndarray]]:
    """Yields random inputs of a part, in their range and outside of it."""
    rng = np.random.default_rng(0)
    for scale, by in ((1, 0.1), (1, 0.1), (0, 1), (0, 1), (0, 1)):
        yield [_unit_samples(x, rng, scale, by) for x in part.inputs]


def _edges(part: Part) -> Iterator[list[np.ndarray]]:
    """Yields inputs of a part at 0, at its constants, and on both sides of them."""
    edges = [[0.0], [0.0, 1.0, -1.0], [6.0, -6.0, 3.0], *([c / 2, c, 2 * c] for c in part.constants)]
    for edge, first in itertools.product(edges, range(3)):
        yield [np.resize(np.roll(edge, first + i), x.values.shape) for i, x in enumerate(part.inputs)]


def _unit_samples(x: Node, rng: np.random.Generator, scale: float, by: float) -> np.ndarray:
    """Returns random values of the range of a value, divided by its size, plus some others."""
    low, high = x.values.min or 0.0, x.values.max or 0.0
    return scale * rng.uniform(low, high, x.values.shape) / max(1.0, -low, high) + by * rng.normal(size=x.values.shape)


def _is_equal(cure: Cure, order: Sequence[int], numbers: Mapping[str, Any], draw: tuple[Any, np.ndarray]) -> bool:
    """Whether a formula, of values in some order, is equal to what a part of a program computes."""
    values, expected = [draw[0][i] for i in order], draw[1]
    try:
        result = np.asarray(cure.exact(*values, **numbers))
    except Exception:  # of shapes that the formula does not take
        return False
    is_kept = expected.ndim in (result.ndim, values[0].ndim)  # an axis may be kept
    if not is_kept or np.squeeze(result).shape != np.squeeze(expected).shape:
        return False
    return np.allclose(result.reshape(expected.shape), expected, 1e-6, 1e-7, equal_nan=True)
