"""The cures of non-finite values: formulas, and equal functions that stay finite.

A part of the program is found by its meaning: a value, as a function of one or two values that it is computed from, is
equal in float64 to the formula of a row. `_trials.py` then runs the program with the replacement in its place.
"""

import functools
import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jmp_amp.debug._evaluation import FLOAT64, Replacement, evaluate_in, precise, widened
from jmp_amp.debug._expressions import in_users_names, is_inner
from jmp_amp.debug._nodes import Node

_MOST_CUTS, _MOST_INPUTS, _MOST_ELEMENTS = 40, 5, 2**20

# The names in formulas: those of NumPy, and these; and those in replacements.
_NUMPY = vars(np) | {
    "det": np.linalg.det,
    "softmax": lambda x, axis: np.exp(x) / np.sum(np.exp(x), axis, keepdims=True),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
}
_JAX = {"jax": jax, "jnp": jnp, "optax": optax}


class Cure(NamedTuple):
    """A row of the table.

    Attributes:
        formula: a Python expression of `x`, `y` and the axis, with functions of NumPy.
        replacement: an expression with functions of JAX that is equal to it where it is finite.
    """

    formula: str
    replacement: str

    @property
    def arity(self) -> int:
        """The number of values that the formula reads."""
        return 2 if "y" in _code(self.formula).co_names else 1

    def exact(self, values: Sequence[Any], axis: int | None) -> Any:
        """Returns the formula of NumPy arrays."""
        with np.errstate(all="ignore"):
            return _value(self.formula, _NUMPY | {"axis": axis}, values)

    def written(self, axis: int | None, keeps: bool = False) -> str:
        """Returns the replacement along an axis, which sums may keep."""
        chosen = f", axis={axis}" if axis is not None or "softmax" in self.replacement else ""
        return self.replacement.replace(", axis", chosen + ", keepdims=True" * keeps)


def _value(text: str, names: dict[str, Any], values: Sequence[Any]) -> Any:
    return eval(_code(text), names, dict(zip("xy", values, strict=False)))


@functools.cache
def _code(text: str) -> Any:
    return compile(text, "<cure>", "eval")


# Those of more ops come before those of fewer.
CURES = [
    Cure("log(softmax(x, axis))", "jax.nn.log_softmax(x, axis)"),
    Cure("log(sum(exp(x), axis))", "jax.nn.logsumexp(x, axis)"),
    Cure("log(mean(exp(x), axis))", "jax.nn.logmeanexp(x, axis)"),
    Cure("log(cumsum(exp(x), axis))", "jax.lax.cumlogsumexp(x, axis)"),
    Cure("exp(x) / sum(exp(x), axis, keepdims=True)", "jax.nn.softmax(x, axis)"),
    Cure("log(sigmoid(x))", "jax.nn.log_sigmoid(x)"),
    Cure("log(1 - sigmoid(x))", "jax.nn.log_sigmoid(-x)"),
    Cure("log(exp(x) + exp(y))", "jnp.logaddexp(x, y)"),
    Cure("log(1 + exp(x))", "jax.nn.softplus(x)"),
    Cure("log(1 - tanh(x)**2)", "2 * (jnp.log(2.0) - x - jax.nn.softplus(-2 * x))"),
    Cure("log(1 - exp(x))", "jnp.log(-jnp.expm1(x))"),
    Cure("log(1 + x)", "jnp.log1p(x)"),
    Cure("log(exp(x))", "x"),
    Cure("exp(x) / exp(y)", "jnp.exp(x - y)"),
    Cure("exp(x * log(y))", "y**x"),
    Cure("x * log(x / y)", "jax.scipy.special.rel_entr(x, y)"),
    Cure("x * log(x)", "jax.scipy.special.xlogy(x, x)"),
    Cure("x * log(y)", "jax.scipy.special.xlogy(x, y)"),
    Cure("log(abs(det(x)))", "jnp.linalg.slogdet(x)[1]"),
    Cure("log(prod(x, axis))", "jnp.sum(jnp.log(x), axis)"),
    Cure("log(x * y)", "jnp.log(x) + jnp.log(y)"),
    Cure("log(x / y)", "jnp.log(x) - jnp.log(y)"),
    Cure("sin(x) / x", "jnp.sinc(x / jnp.pi)"),
    Cure("sqrt(x**2 + y**2)", "jnp.hypot(x, y)"),
    Cure("arctan(x / y)", "jnp.arctan2(x, y)"),
    Cure("mean(x**2, axis) - mean(x, axis)**2", "jnp.var(x, axis)"),
    Cure("sqrt(sum(x**2, axis))", "optax.safe_norm(x, 0.0, axis)"),
    Cure("sqrt(mean(x**2))", "optax.safe_root_mean_squares(x, 0.0)"),
    Cure("std(x)", "optax.safe_root_mean_squares(x - jnp.mean(x), 0.0)"),
]


class Part:
    """A part of a program: a value as a function of others that it is computed from.

    Attributes:
        root: the value.
        inputs: the values that it is computed from.
        nodes: the values on the way from the inputs to the root, the root first.
    """

    def __init__(self, root: Node, inputs: tuple[Node, ...]) -> None:
        self.root, self.inputs, self.nodes = root, inputs, [root]
        for node in self.nodes:
            self.nodes += [x for x in _reads(node) if x.eqn and x not in (*self.nodes, *inputs)]
        self.draw = functools.cache(self._draw)
        self.samples = _samples(inputs, [x.values.min for y in self.nodes for x in y.operands if x.is_constant])

    def _draw(self, i: int) -> tuple[Sequence[np.ndarray], np.ndarray | None]:
        """Returns a sample of the inputs, and the root in float64; None if an op has no float64."""
        try:
            with precise(FLOAT64):
                return self.samples[i], np.asarray(self._evaluated(*map(jnp.asarray, self.samples[i])))
        except Exception:
            return self.samples[i], None

    def _evaluated(self, *values: Any) -> Any:
        found = dict(zip(self.inputs, values, strict=True))
        for node in sorted(self.nodes, key=lambda x: x.number):
            operands = [found[x] if x in found else widened(jnp.asarray(x.held), FLOAT64) for x in _reads(node)]
            outs = evaluate_in(FLOAT64, node.place, operands) or ()  # an op may not run in float64
            found[node] = outs[node.index[0]]
        return found[self.root]

    @property
    def axes(self) -> list[int | None]:
        """The axes that these values are reduced along; None if it is all of them."""
        params = [x.eqn.params for x in self.nodes]
        reduced = [x["axes"] for x in params if "axes" in x] + [(x["axis"],) for x in params if "axis" in x]
        n = len(self.inputs[0].values.shape)
        return [*dict.fromkeys(None if len(x) == n else x[0] for x in reduced if len(x) in (1, n))] or [None]


def _reads(node: Node) -> list[Node]:
    return [x.outside for x in node.operands]


def parts(root: Node) -> Iterator[Part]:
    """Yields the parts of a program that compute a value from one or two others, those of fewer ops first."""
    cuts = [_inputs(root.operands)]
    for cut in cuts:
        nodes = sorted(cut, key=lambda x: x.number)
        if 0 < len(nodes) <= 2 and sum(np.prod(x.values.shape) for x in nodes) < _MOST_ELEMENTS:
            yield from (Part(root, inputs) for inputs in itertools.permutations(nodes))
        for node in nodes if len(nodes) <= 2 else nodes[-1:]:
            new = _inputs([*(cut - {node}), *node.operands]) if node.eqn else cut
            if len(new) <= _MOST_INPUTS and new not in cuts and len(cuts) < _MOST_CUTS:
                cuts.append(new)


def _inputs(nodes: Iterable[Node]) -> frozenset[Node]:
    """Returns the floating values among some, and those that the integers and flags among them are computed from."""
    found = frozenset[Node]()
    for x in (x.outside for x in nodes):
        found |= _inputs(x.operands) if not x.is_floating else frozenset({x} if not x.is_constant else ())
    return found


class Match(NamedTuple):
    """A part of a program that is equal to the formula of a cure, and the replacement of `x` and `y` that fits it."""

    cure: Cure
    part: Part
    text: str

    def replacement(self) -> Replacement:
        """Returns the program with the replacement in place of the part."""
        function = functools.partial(_replaced, self.text)
        return Replacement(self.part.root.key, [x.key for x in self.part.inputs], function)

    def written(self, primal: Collection[Node]) -> tuple[str, str] | None:
        """Returns an expression of the user, and what to write in its place; None if their names are not known."""
        root, inputs = self.part.root, dict(zip("xy", self.part.inputs, strict=False))
        is_batched = any("vmap" in str(x.source_info.name_stack) for x in root.place.eqns)
        return (
            None if is_batched or is_inner(root, primal) else in_users_names(self.text, root, self.part.nodes, inputs)
        )


def _replaced(text: str, *values: Any) -> Any:
    return _value(text, _JAX, values)


def matches(found: Sequence[Part]) -> Iterator[Match]:
    """Yields the parts of a program that are equal to formulas, in the order of the cures."""
    for cure, part in itertools.product(CURES, found):
        for axis in (part.axes if "axis" in cure.formula else [None]) * (len(part.inputs) == cure.arity):
            draws = (part.draw(i) for i in range(len(part.samples)))  # until one is not equal
            if all(_is_equal(cure, axis, *draw) for draw in draws) and np.isfinite(part.draw(0)[1]).any():
                texts = dict.fromkeys(cure.written(axis, keeps) for keeps in (False, True))
                yield from (Match(cure, part, text) for text in texts if _fits(text, part))


def _fits(text: str, part: Part) -> bool:
    shapes = [jax.ShapeDtypeStruct(x.values.shape, np.float32) for x in part.inputs]
    try:
        return jax.eval_shape(functools.partial(_replaced, text), *shapes).shape == part.root.values.shape
    except (TypeError, ValueError):  # shapes that it does not take, or a promotion that is forbidden
        return False


def _samples(inputs: Sequence[Node], constants: Iterable[float | None]) -> list[list[np.ndarray]]:
    """Returns inputs of a part: random ones, and some at 0 and at its constants."""
    rng = np.random.default_rng(0)
    drawn = [[rng.normal(size=x.values.shape) for x in inputs] for _ in range(4)]
    edges = [[0.0], [0.0, 1.0, -1.0], [6.0, -6.0, 3.0], *([c / 2, c, 2 * c] for c in dict.fromkeys(constants) if c)]
    turns = itertools.product(edges, range(3))
    return drawn + [[np.resize(np.roll(x, k + i), y.values.shape) for i, y in enumerate(inputs)] for x, k in turns]


def _is_equal(cure: Cure, axis: int | None, values: Sequence[np.ndarray], expected: np.ndarray | None) -> bool:
    """Whether a formula of some values is equal to what a part of a program computes; an axis may be kept."""
    try:
        result = np.asarray(cure.exact(values, axis))
    except Exception:  # of shapes that the formula does not take
        return False
    if expected is None or np.squeeze(result).shape != np.squeeze(expected).shape:
        return False
    return np.allclose(result.reshape(expected.shape), expected, 1e-6, 1e-7, equal_nan=True)
