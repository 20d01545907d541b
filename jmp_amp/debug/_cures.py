"""The cures of non-finite values: formulas, and equal functions that stay finite.

A part of the program is found by its meaning: a value, as a function of one that it is computed from, is equal in
float64 to the formula of a row. `_trials.py` then runs the program with the replacement in its place.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jmp_amp.debug._evaluation import FLOAT64, evaluate_in, precise, widened
from jmp_amp.debug._nodes import Node, nearest

_MOST_CUTS, _MOST_INPUTS, _MOST_ELEMENTS = 40, 5, 2**20

# By formula, a Python expression of `x` and the axis with functions of NumPy, an expression with functions of JAX that
# is equal to it where it is finite. Those of more ops come before those of fewer.
CURES = {
    "log(exp(x) / sum(exp(x), axis, keepdims=True))": "jax.nn.log_softmax(x, axis)",
    "log(sum(exp(x), axis))": "jax.nn.logsumexp(x, axis)",
    "log(mean(exp(x), axis))": "jax.nn.logmeanexp(x, axis)",
    "log(cumsum(exp(x), axis))": "jax.lax.cumlogsumexp(x, axis)",
    "exp(x) / sum(exp(x), axis, keepdims=True)": "jax.nn.softmax(x, axis)",
    "log(1 / (1 + exp(-x)))": "jax.nn.log_sigmoid(x)",
    "log(1 - 1 / (1 + exp(-x)))": "jax.nn.log_sigmoid(-x)",
    "log(1 + exp(x))": "jax.nn.softplus(x)",
    "log(1 - tanh(x)**2)": "2 * (jnp.log(2.0) - x - jax.nn.softplus(-2 * x))",
    "log(1 - exp(x))": "jnp.log(-jnp.expm1(x))",
    "log(1 + x)": "jnp.log1p(x)",
    "log(exp(x))": "x",
    "x * log(x)": "jax.scipy.special.xlogy(x, x)",
    "log(abs(linalg.det(x)))": "jnp.linalg.slogdet(x)[1]",
    "log(prod(x, axis))": "jnp.sum(jnp.log(x), axis)",
    "sin(x) / x": "jnp.sinc(x / jnp.pi)",
    "mean(x**2, axis) - mean(x, axis)**2": "jnp.var(x, axis)",
    "sqrt(sum(x**2, axis))": "optax.safe_norm(x, 0.0, axis)",
    "sqrt(mean(x**2))": "optax.safe_root_mean_squares(x, 0.0)",
}


class Part:
    """A part of a program: a value as a function of another that it is computed from.

    Attributes:
        root: the value.
        x: the value that it is computed from.
        nodes: the values on the way from there to the root, the root first.
        samples: values of `x`: random ones, and some at 0 and at the constants of the part.
        draw: returns the root in float64 for the sample at an index; None if an op has no float64.
    """

    def __init__(self, root: Node, x: Node) -> None:
        self.root, self.x, self.draw = root, x, functools.cache(self._draw)
        self.nodes = [*nearest([root], lambda node: [y for y in node.reads if y.eqn and y is not x])]
        rng, constants = np.random.default_rng(0), [y for z in self.nodes for y in z.operands if y.is_constant]
        numbers = dict.fromkeys(y.summary.min for y in constants if y.summary.min)
        edges = [[0.0], [0.0, 1.0, -1.0], [6.0, -6.0, 3.0], *([y / 2, y, 2 * y] for y in numbers)]
        self.samples = [rng.normal(size=x.summary.shape) for _ in range(4)]
        self.samples += [np.resize(np.roll(y, k), x.summary.shape) for y in edges for k in range(3)]

    def _draw(self, i: int) -> np.ndarray | None:
        try:
            with precise(FLOAT64):
                found = {self.x: jnp.asarray(self.samples[i])}
                for node in sorted(self.nodes, key=lambda x: x.number):
                    operands = [found[x] if x in found else widened(jnp.asarray(x.held), FLOAT64) for x in node.reads]
                    outs = evaluate_in(FLOAT64, node.eqn, operands) or ()  # an op may not run in float64
                    found[node] = outs[node.index[0]]
                return np.asarray(found[self.root])
        except Exception:
            return None

    @property
    def axes(self) -> list[int | None]:
        """The axes that these values are reduced along; None if it is all of them."""
        params, n = [x.eqn.params for x in self.nodes], len(self.x.summary.shape)
        reduced = [x["axes"] for x in params if "axes" in x] + [(x["axis"],) for x in params if "axis" in x]
        return [*dict.fromkeys(None if len(x) == n else x[0] for x in reduced if len(x) in (1, n))] or [None]


def parts(root: Node) -> Iterator[Part]:
    """Yields the parts of a program that compute a value from one other, those of fewer ops first."""
    cuts = [_inputs(root.operands)]
    for cut in cuts:
        nodes = sorted(cut, key=lambda x: x.number)
        if len(nodes) == 1 and 0 < np.prod(nodes[0].summary.shape) < _MOST_ELEMENTS:
            yield Part(root, nodes[0])
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


def matches(found: Sequence[Part]) -> Iterator[tuple[Part, str]]:
    """Yields the parts of a program that are equal to formulas, and the replacements, in the order of the cures."""
    for (formula, replacement), part in itertools.product(CURES.items(), found):
        for axis in part.axes if "axis" in formula else [None]:
            if all(_is_equal(formula, axis, x, part.draw, i) for i, x in enumerate(part.samples)):
                keeps = np.shape(exact(formula, part.samples[0], axis)) != part.root.summary.shape
                yield part, written(replacement, axis, keeps)


def exact(formula: str, x: Any, axis: int | None) -> Any:
    """Returns a formula of a NumPy array."""
    with np.errstate(all="ignore"):
        return eval(formula, vars(np), {"x": x, "axis": axis})


def written(replacement: str, axis: int | None, keeps: bool = False) -> str:
    """Returns a replacement along an axis, which sums may keep."""
    chosen = f", axis={axis}" if axis is not None or "softmax" in replacement else ""
    return replacement.replace(", axis", chosen + ", keepdims=True" * keeps)


def _is_equal(formula: str, axis: int | None, x: np.ndarray, draw: Callable[..., Any], i: int) -> bool:
    """Whether a formula of a sample is what a part of a program computes; an axis may be kept."""
    try:
        result, expected = np.asarray(exact(formula, x, axis)), draw(i)
        is_same = np.squeeze(result).shape == np.squeeze(expected).shape and (i or np.isfinite(expected).any())
        return is_same and np.allclose(result.reshape(expected.shape), expected, 1e-6, 1e-7, equal_nan=True)
    except Exception:  # a shape that the formula does not take, or an op that has no float64
        return False
