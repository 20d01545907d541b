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
from jmp_amp.debug._expressions import in_users_names, is_inner
from jmp_amp.debug._nodes import Node

_MOST_CUTS, _MOST_INPUTS = 40, 5
_ELEMENTWISE = {"log", "log2", "log1p", "neg", "sqrt", "exp"}


def _softmax(x: Any, axis: Any) -> Any:
    return np.exp(x) / np.sum(np.exp(x), axis, keepdims=True)


# The names in formulas: those of NumPy, and these.
_NUMPY = vars(np) | {"det": np.linalg.det, "softmax": _softmax, "sigmoid": lambda x: 1 / (1 + np.exp(-x))}
_JAX = {"jax": jax, "jnp": jnp}


class Cure(NamedTuple):
    """A row of the table.

    Attributes:
        formula: a Python expression of `x`, `y`, the axis, and a number `c` of the program, with functions of NumPy;
            the row applies to parts of a program that are equal to it.
        replacement: the expression that is tried in its place. `eps` and `near` are the first of a few numbers that
            pass; `n` is the size of the axis.
        words: why the formula fails.
        kind: `"unselected"` if the values of the program must stay as they are, bit for bit; `"limit"` if the formula
            must have a limit where it is not finite, which the replacement returns, or must not matter there;
            `"other"` if the replacement is another function.
    """

    formula: str
    replacement: str
    words: str
    kind: str = ""

    @property
    def has_axis(self) -> bool:
        """Whether the row is about values along an axis."""
        return "axis" in self.formula

    @property
    def arity(self) -> int:
        """The number of values that the formula reads."""
        return 2 if "y" in _code(self.formula).co_names else 1

    def exact(self, *values: Any, **numbers: Any) -> Any:
        """Returns the formula of NumPy arrays."""
        with np.errstate(all="ignore"):
            return eval(_code(self.formula), _NUMPY, dict(zip("xy", values, strict=False)) | numbers)

    def function(self, eps: float, **numbers: Any) -> Callable[..., Any]:
        """Returns the replacement as a function of JAX arrays."""
        names = _JAX | numbers | {"eps": eps, "near": eps}

        def replaced(*values: Any) -> Any:
            with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
                return eval(_code(self.replacement), names | dict(zip("xy", values, strict=False)))

        return replaced

    def numbers(self, shape: tuple[int, ...], part: "Part") -> Iterator[dict[str, Any]]:
        """Yields the numbers that the formula may have in a part of a program, whose `x` has this shape."""
        names = _code(self.formula).co_names
        axes = (*range(len(shape)), None) if len(shape) > 1 else (None, *range(len(shape)))
        for axis in axes if self.has_axis else (None,):
            for c in part.constants if "c" in names else (1.0,):
                yield {"axis": axis, "n": 1 if axis is None else shape[axis], "c": c}

    def text(self, eps: float) -> str:
        """Returns the replacement with the numbers that were tried."""
        return re.sub(r"\b(eps|near)\b", f"{eps:.0e}".replace("e-0", "e-"), self.replacement)

    @property
    def epsilons(self) -> Sequence[float]:
        """The numbers to try, in this order."""
        names = _code(self.replacement).co_names
        return (1e-12, 1e-6, 1e-4, 1e-3) if "eps" in names else (1e-6, 1e-2) if "near" in names else (0.0,)


@functools.cache
def _code(text: str) -> Any:
    return compile(text, "<cure>", "eval")


_OVERFLOWS, _ROUNDS = "overflows or underflows half-way", "takes the logarithm of a value that rounds to 0"
_CANCELS = "subtracts numbers that are equal but for rounding, so its result may be 0 or negative"
_AT_ZERO, _EDGE = "has an infinite derivative at 0", "has an infinite derivative at the end of its domain"
_BRANCH = "is not selected by `jnp.where` where it is not finite, but its derivative is 0 times infinity there"
_UNSELECTED = "overflows where another value is selected, and its derivative is 0 times infinity there"

# Equal functions first, those of more ops before those of fewer.
CURES = [
    Cure("log(sum(softmax(x, axis) * y, axis))", "jax.nn.logsumexp(jax.nn.log_softmax(x, axis), axis, b=y)", _ROUNDS),
    Cure("log(softmax(x, axis))", "jax.nn.log_softmax(x, axis)", _ROUNDS),
    Cure("log(sum(exp(x), axis))", "jax.nn.logsumexp(x, axis)", _OVERFLOWS),
    Cure("log(mean(exp(x), axis))", "jax.nn.logsumexp(x, axis) - jnp.log(n)", _OVERFLOWS),
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
        "(m := jax.lax.stop_gradient(jnp.max(jnp.abs(x)))) * jnp.sqrt(jnp.sum((x / m)**2, axis))",
        "squares values whose squares overflow or underflow",
    ),
    # The result does not change where `jnp.where` selects it.
    Cure("sqrt(x)", "jnp.sqrt(jnp.where(x > 0, x, 1))", _BRANCH, "unselected"),
    Cure("log(x)", "jnp.log(jnp.where(x > 0, x, 1))", _BRANCH, "unselected"),
    Cure("x / y", "x / jnp.where(y == 0, 1, y)", _BRANCH, "unselected"),
    Cure("1 / x", "1 / jnp.where(x == 0, 1, x)", _BRANCH, "unselected"),
    Cure("exp(x)", "jnp.exp(jnp.minimum(x, 80.0))", _UNSELECTED, "unselected"),
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
        "other",
    ),
    Cure("x * log(x)", "x * jnp.log(jnp.maximum(x, eps))", "is 0 times -inf at 0"),
    Cure("x * log(x / y)", "x * (jnp.log(jnp.maximum(x, eps)) - jnp.log(jnp.maximum(y, eps)))", "is 0 times -inf at 0"),
    Cure("arccos(x)", "jnp.arccos(jnp.clip(x, -1 + near, 1 - near))", _EDGE),
    Cure("arcsin(x)", "jnp.arcsin(jnp.clip(x, -1 + near, 1 - near))", _EDGE),
    Cure("arctanh(x)", "jnp.arctanh(jnp.clip(x, -1 + near, 1 - near))", _EDGE),
    Cure("arccosh(x)", "jnp.arccosh(jnp.maximum(x, 1 + near))", _EDGE),
    Cure("x / y", "x / jnp.where(y == 0, 1, y)", "divides by 0", "limit"),
    Cure("1 / x", "1 / jnp.where(x == 0, 1, x)", "divides by 0", "limit"),
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

        def compute(node: Node) -> Any:
            node = node.outside
            if node not in found:
                if node.eqn is None:
                    found[node] = widened(jnp.asarray(node.held), FLOAT64)
                else:
                    outs = evaluate_in(FLOAT64, node.place, [compute(x) for x in node.operands])
                    if outs is None:
                        raise TypeError(f"{node.primitive} does not run in float64")
                    found[node] = outs[node.index[0]]
            return found[node]

        return compute(self.root)

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
        before = Node(root.values, root.place, root.index, [node])
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


def _samples(node: Node, rng: np.random.Generator, is_moved: bool) -> np.ndarray:
    """Returns random values of a shape, where functions are regular, in the range that the values suggest."""
    low, high = node.values.min, node.values.max
    if low is None or high is None or low == high == 0 or is_moved:
        return rng.normal(size=node.values.shape)
    if low >= 0:
        return rng.uniform(0.05, 0.95 if high <= 1 else 2.0, node.values.shape)
    if max(-low, high) <= 1.0001:
        return rng.uniform(-0.95, 0.95, node.values.shape)
    return rng.normal(size=node.values.shape) if high > 0 else -rng.uniform(0.05, 2.0, node.values.shape)


class Match(NamedTuple):
    """A part of a program that is equal to the formula of a cure: the cure, its inputs in order, and its numbers."""

    cure: Cure
    part: Part
    numbers: Mapping[str, Any]

    def rewrite(self, eps: float) -> Rewrite:
        """Returns the program with the replacement in place of the part."""
        return self.part.rewrite(self.cure.function(eps, **self.numbers))

    def filled(self, fill: Any) -> Rewrite:
        """Returns the program with the replacement, plus a number where the part is not finite."""
        function = self.cure.function(0.0, **self.numbers)
        return self.part.rewrite(lambda *x: function(*x) + jnp.where(jnp.isfinite(self.part(*x)), 0, fill))

    def text(self, eps: float, primal: Collection[Node]) -> str:
        """Returns what to write in a program of some values, in the names of the user if these are known."""
        text, root = self.cure.text(eps), self.part.root
        names = dict(zip("xy", self.part.inputs, strict=False))
        shapes = [jax.ShapeDtypeStruct(x.values.shape, np.float32) for x in self.part.inputs]
        keeps = jax.eval_shape(self.cure.function(eps, **self.numbers), *shapes).shape != root.values.shape
        is_batched = any("vmap" in str(x.source_info.name_stack) for x in root.place.eqns)
        if self.part.moves or is_inner(root, primal) or (is_batched and self.cure.has_axis):
            return f"`{text}`"
        found = in_users_names(text, root, self.part.nodes, names, self.numbers, keeps)
        return "`{1}` in place of `{0}`".format(*found) if found else f"`{text}`"


def matches(cures: Sequence[Cure], found: Sequence[Part]) -> Iterator[Match]:
    """Yields the parts of a program that are equal to formulas, in the order of the cures."""
    draws = []
    with precise(FLOAT64):
        for part in found:
            rng = np.random.default_rng(0)
            for_part = []
            for is_moved in (False, False, True):
                values = [_samples(x, rng, is_moved) for x in part.inputs]
                try:
                    for_part.append((values, np.asarray(part(*map(jnp.asarray, values)))))
                except Exception:  # an op that does not run in float64
                    break
            else:
                draws.append((part, for_part))
    for cure in cures:
        for part, for_part in draws:
            if len(part.inputs) == cure.arity:
                for order in itertools.permutations(range(cure.arity)):
                    inputs = tuple(part.inputs[i] for i in order)
                    ordered = [([values[i] for i in order], out) for values, out in for_part]
                    for numbers in cure.numbers(inputs[0].values.shape, part):
                        if _are_equal(cure, ordered, numbers):
                            yield Match(cure, part._replace(inputs=inputs), numbers)


def _are_equal(cure: Cure, draws: Sequence[tuple[Sequence[Any], np.ndarray]], numbers: Mapping[str, Any]) -> bool:
    """Whether a formula is equal to what a part of a program computes, where that is finite."""
    n_finite = 0
    for values, expected in draws:
        try:
            result = np.asarray(cure.exact(*values, **numbers))
        except (
            ValueError,
            TypeError,
            np.exceptions.AxisError,
            np.linalg.LinAlgError,
        ):  # of shapes that the formula does not take
            return False
        shapes = [result.shape]
        if cure.has_axis and result.ndim < values[0].ndim:  # the axis may be kept
            axis = numbers["axis"]
            shapes.append(np.expand_dims(result, tuple(range(values[0].ndim)) if axis is None else axis).shape)
        if expected.shape not in shapes:
            return False
        if cure.kind == "other" and (np.isnan(result) != np.isnan(expected)).any():
            return False
        is_finite = np.isfinite(expected)
        n_finite += is_finite.sum()
        if not np.allclose(result.reshape(expected.shape)[is_finite], expected[is_finite], 1e-6, 1e-9):
            return False
    return n_finite > 0
