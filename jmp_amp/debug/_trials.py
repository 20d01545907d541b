"""Tries cures: runs the program with each, and compares values and gradients with float64."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmp_amp import _jaxpr as jx
from jmp_amp.debug._cures import Cure, Match, matches, parts
from jmp_amp.debug._evaluation import FLOAT32, FLOAT64, Evaluation, Rewrite, precise
from jmp_amp.debug._expressions import is_inner
from jmp_amp.debug._nodes import Node, Values
from jmp_amp.debug._report import location_of

_DEPTH, _MOST_ROOTS = 7, 24
# How much the arguments are moved, and how large they are then at most. Where they are large, float64 may round, too.
# By -1, each is moved the other way than by 1, so that both signs are met.
_MOVES = ((0.0, math.inf), (1e-2, math.inf), (0.1, 1.0), (1.0, 1.0), (-1.0, 1.0))
_TINY = float(np.finfo(np.float32).tiny)  # what is smaller may be 0 in float32
# A variant runs once, so it is compiled as fast as it can be; low precision is rounded as the program says.
_QUICK = {"xla_allow_excess_precision": False, "xla_backend_optimization_level": 0}


class Diagnosis(NamedTuple):
    """The cause of non-finite values, and its cure.

    Attributes:
        cause: the formula or the name of the cause.
        cure: what to change.
        tried: what was seen when the program ran with the cure; empty if the cause is outside of the program.
    """

    cause: str
    cure: str
    tried: str = ""


def nearest(
    nodes: Iterable[Node], neighbors: Callable[[Node], Iterable[Node]] = lambda x: x.parents, depth: float = math.inf
) -> dict[Node, int]:
    """Returns nodes and those that at most `depth` steps lead to, with the numbers of steps, nearest first."""
    found = dict.fromkeys(nodes, 0)
    waiting = list(found)
    for node in waiting:
        for x in neighbors(node) if found[node] < depth else ():
            if x not in found:
                found[x] = found[node] + 1
                waiting.append(x)
    return found


class Trials:
    """A program with a non-finite op.

    Attributes:
        evaluation: its evaluation.
        node: the first non-finite result of the op.
        targets: the values that must become finite: the loss that is differentiated, or all results.
        has_gradient: whether the gradients of the targets are tried, too.
        primal: the values that a cure may change.
    """

    def __init__(self, evaluation: Evaluation, node: Node) -> None:
        self.evaluation, self.node = evaluation, node
        results = [x.node for x in evaluation.results if x.node.is_floating]
        nodes = evaluation.nodes
        self.targets = results
        if any(_is_derivative(x) for x in nodes):
            forward = [x for x in results if not x.is_backward and any(map(_is_derivative, nearest([x])))]
            # The values of a gradient alone: the loss is read by nothing, or by what computes the gradient.
            ends = [x for x in nodes if x.eqn and x.is_floating and not x.is_backward and _is_derivative(x)]
            ends = [x for x in ends if not x.place.iteration and not all(y.is_backward for y in x.readers or ())]
            self.targets = forward or ends[-1:]
        self.targets = [x for x in self.targets if not x.values.shape] or self.targets
        self.primal = nearest(self.targets)
        self.has_gradient = bool(self.targets) and (node in self.primal or _is_derivative(node))
        if not self.has_gradient:
            self.targets, self.primal = results, dict.fromkeys((x for x in nodes if not _is_derivative(x)), 0)

    def name(self, i: int) -> str:
        """Returns the path of an argument of the program."""
        names: Any = jx.open_jaxpr(self.evaluation.program)[0].debug_info.arg_names
        return str(names[i])

    @property
    def leaf(self) -> str:
        """The path of the nearest leaf of an argument that the op was computed from; empty if there is none."""
        read = (x.index[1] for x in nearest([self.node]) if x.is_floating and x.place and not x.place.eqns)
        return next((name for name in map(self.name, read) if name.endswith("]") or "." in name), "")

    @functools.cached_property
    def sites(self) -> list[Node]:
        """The values near the op that a cure may compute otherwise, nearest first."""
        start = [self.node]
        if self.node not in self.primal:  # an op of the derivative: those that it is the derivative of
            read = nearest(start, lambda x: [] if x in self.primal else x.parents, _DEPTH)
            start = [x for x in read if x in self.primal and x.is_floating and not x.is_constant]
            start = [*start, *(y for x in start for y in x.readers if y in self.primal)]
        start = [x for x in nearest(start, lambda x: x.operands, 3) if x in self.primal]  # what was lost before the op
        near = nearest(start, lambda x: [y for y in x.readers if y in self.primal], _DEPTH)
        return [x for x in near if x.eqn and x.is_floating and x.place][:_MOST_ROOTS]

    def _variant(self, **changes: Any) -> Evaluation:
        return dataclasses.replace(self.evaluation, enters_all=False, trip_counts={}, **changes)

    def compiled(
        self, wide: Any = None, rewrites: Callable[[Any], Sequence[Rewrite]] = lambda number: ()
    ) -> Callable[..., list[np.ndarray]]:
        """Returns a function that returns the targets and their gradients in a variant of the program.

        Its arguments are the number in the rewrites and, in float64, how much the arguments of the program are moved.
        """
        arrays, keeps = list(self.evaluation.arrays), [x.key for x in self.targets]
        is_floating = [jx.is_floating(x) for x in arrays]

        def targets(floats: Sequence[Any], arrays: Sequence[Any], number: Any) -> tuple[Any, Any]:
            inputs = jx.combine(is_floating, floats, arrays)
            kept = self._variant(arrays=inputs, wide=wide, rewrites=rewrites(number), keeps=keeps).kept
            values = [kept[key] for key in keeps]
            return sum(jnp.sum(jnp.real(x).astype(wide or FLOAT32)) for x in values), values

        call = jax.value_and_grad(targets, has_aux=True) if self.has_gradient else targets
        run = jax.jit(call, compiler_options=_QUICK)

        def found(number: float, by: float = 0.0, most: float = math.inf) -> list[np.ndarray]:
            rng, floats = np.random.default_rng(0), list(itertools.compress(arrays, is_floating))
            if wide:
                floats = [_moved(np.asarray(x, wide), rng, by, most) for x in floats]
            with precise(wide):
                outs = jax.tree.leaves(run(floats, arrays, jnp.asarray(number, wide or FLOAT32)))
            return [np.asarray(x).astype(np.complex128 if np.iscomplexobj(x) else np.float64) for x in outs]

        return found

    @functools.cached_property
    def _exact(self) -> Callable[..., list[np.ndarray]]:
        return self.compiled(FLOAT64)

    @functools.cached_property
    def exact(self) -> Callable[[float, float], list[np.ndarray]]:
        """Returns the targets and their gradients in float64; NaN where they depend on rounding errors."""

        @functools.cache
        def exact(by: float, most: float) -> list[np.ndarray]:
            pairs = zip(self._exact(0.0, by, most), self._exact(0.0, by + 1e-7, most), strict=True)
            with np.errstate(invalid="ignore"):
                return [np.where(np.abs(x - y) <= 0.01 * np.abs(x), x, np.nan) for x, y in pairs]

        return exact

    def tried(
        self,
        rewrites: Callable[[Any], Sequence[Rewrite]],
        numbers: Sequence[float] = (0.0,),
        is_equal: bool = True,
    ) -> tuple[float, str] | None:
        """Returns the first number with which rewrites are a cure, and what is seen then; None if there is none.

        A cure makes values and gradients finite. In float64 they are those of the program: for its arguments, and for
        arguments that are moved a little, wherever the program is finite.

        Args:
            rewrites: returns the rewrites with a number.
            numbers: those to try.
            is_equal: whether the values and gradients must be those of the program.
        """
        run, run_exactly = self.compiled(None, rewrites), self.compiled(FLOAT64, rewrites)
        try:
            for number in numbers:
                found, exactly = run(number), functools.partial(run_exactly, number)
                is_cure = all(np.isfinite(x).all() for x in found) and not self._loses_gradient(found)
                if is_cure and is_equal:
                    is_cure = all(self._agree(exactly, number, *move) for move in _MOVES)
                if is_cure and not self._is_arbitrary(run_exactly, number):
                    exact = exactly()
                    if is_equal:  # the program itself is known where it is finite
                        pairs = zip(self.exact(*_MOVES[0]), exact, strict=True)
                        exact = [np.where(np.isfinite(x), x, y) for x, y in pairs]
                    if seen := self._seen(found, exact):
                        return number, seen
        except Exception:  # an op that has no derivative, or does not run in float64
            pass
        return None

    def _agree(self, run: Callable[..., list[np.ndarray]], number: float, by: float, most: float) -> bool:
        """Whether a variant is equal to the program in float64, for arguments that are moved, up to its eps."""
        if number >= 1:  # where the program is finite, nothing changes
            relative = slack = 1e-12
        elif by:  # an eps changes a root of x**2 by eps / (2 * x**2)
            relative = slack = max(1e-6, 10 * number / by**2)
        else:
            relative, slack = 1e-3, max(1e-5, math.sqrt(number))
        return _are_close(run(by, most), self.exact(by, most), relative, slack)

    def _is_arbitrary(self, run: Callable[[float], list[np.ndarray]], number: float) -> bool:
        """Whether values, and if the number is not small gradients, depend on it where the program is not finite."""
        if not 0 < number < 1:
            return not _are_close(run(0.99 * number - 0.01), run(number), 1e-9, 1e-9)
        values = slice(self._n_values)
        if all(np.isfinite(x).all() for x in self._exact(0.0)[values]):
            return False
        nearer = (run(k * number)[values] for k in (1, 10, 100))  # they converge to the limit of the program, if any
        return any((abs(x - y) > 0.5 * abs(y - z) + 1e-3 * abs(x)).any() for x, y, z in zip(*nearer, strict=True))

    def _loses_gradient(self, found: Sequence[np.ndarray]) -> bool:
        """Whether all gradients are 0, and those of the program in float64 are not."""
        exact = self.exact(*_MOVES[0])[self._n_values :]
        return any((np.abs(np.nan_to_num(x)) > _TINY).any() for x in exact) and not any(
            x.any() for x in found[self._n_values :]
        )

    @property
    def _n_values(self) -> int:
        return 1 + len(self.targets)

    def _seen(self, found: Sequence[np.ndarray], exact: Sequence[np.ndarray]) -> str:
        norm = lambda arrays: math.hypot(*(float(np.linalg.norm(x)) for x in arrays))  # noqa: E731
        size = norm(exact) and max(norm(exact), _TINY)
        error = norm([x - y for x, y in zip(found, exact, strict=True)]) / (size or 1.0)
        what = "value and gradient are" if self.has_gradient else "all results are"
        return f"{what} finite, within {max(error, 1e-7):.0e} of float64" if error < 0.1 else ""

    def compared(self, **changes: Any) -> str:
        """Returns what is seen in another evaluation of the whole program; empty if it is no cure."""
        found = self._results(**changes)
        return self._seen(found, self._exact_results) if all(np.isfinite(x).all() for x in found) else ""

    @functools.cached_property
    def _exact_results(self) -> list[np.ndarray]:
        return self._results(wide=FLOAT64)

    @property
    def is_finite_in_float32(self) -> bool:
        """Whether all results are finite in float32."""
        return all(np.isfinite(x).all() for x in self._results(wide=FLOAT32))

    @property
    def in_float64(self) -> Values | None:
        """The result of the op in float64, if it is finite there."""
        at, nodes = (self.node.place.id, self.node.index), self._variant(wide=FLOAT64).nodes
        found = next((x.values for x in nodes if x.place and (x.place.id, x.index) == at), None)
        return found if found and found.is_finite else None

    def _results(self, wide: Any, **changes: Any) -> list[np.ndarray]:
        """Returns the floating results of another evaluation, as one program: this compiles faster than its ops do."""
        is_floating = [x.node.is_floating for x in self.evaluation.results]

        def results(arrays: Sequence[Any]) -> list[Any]:
            found = self._variant(arrays=arrays, wide=wide, **changes).results
            return [x.value for x in itertools.compress(found, is_floating)]

        with precise(wide):
            arrays = [*map(jnp.asarray, self.evaluation.arrays)]
            is_sharded = any(x.place and x.place.mesh for x in self.evaluation.nodes)
            run = results if is_sharded else jax.jit(results, compiler_options=_QUICK)
            try:
                found = run(arrays)
            except Exception:  # batched loops, and branches of two dtypes, run op by op only
                found = results(arrays)
        return [np.asarray(x).astype(np.float64) for x in found]

    def cured(self, cures: Sequence[Cure]) -> Diagnosis | None:
        """Returns the first cure of a table that passes."""
        found = [part for site in self.sites for part in parts(site)]
        found.sort(key=lambda part: any(is_inner(x, part.nodes) for x in part.inputs))  # what users can write first
        return next(filter(None, map(self._cured_by, matches(cures, found))), None)

    def _cured_by(self, match: Match) -> Diagnosis | None:
        # The derivative of a part comes from its lines; that of a custom rule does not.
        if self.node not in self.primal and all(_line(self.node) != _line(x) for x in match.part.nodes):
            return None
        cure, same = match.cure, self._everywhere(match)
        passed = self.tried(lambda number: [x.rewrite(number) for x in same], cure.tries, cure.is_equal)
        if passed is None:
            return None
        text = f"`{cure.formula}` {cure.words}: use {match.text(passed[0], self.primal)}"
        return Diagnosis(cure.formula, text, passed[1])

    def _everywhere(self, match: Match) -> list[Match]:
        """Returns a match, and those of the same ops from the same line of code, as in other layers."""
        root = match.part.root
        found = {root.key: match}
        for node in self.primal:
            if node.primitive == root.primitive and node.key not in found and _line(node) == _line(root):
                same = (match._replace(part=x) for x in parts(node) if x.ops == match.part.ops)
                found[node.key] = next(same, match)
        return list(found.values())


def _line(node: Node) -> str:
    return location_of(node.place.eqns).source


def _are_close(new: Sequence[np.ndarray], old: Sequence[np.ndarray], relative: float, slack: float) -> bool:
    """Whether arrays are close to others where these are finite: by the slack times the largest value of each."""
    known = [np.isfinite(x) for x in old]
    sizes = [np.abs(x[at]).max(initial=0.0) for x, at in zip(old, known, strict=True)]
    largest = max(sizes) or 1.0
    slacks = [slack * (x or largest) + 1e-12 * largest for x in sizes]  # what is smaller is rounding, as of a gradient
    return all(np.allclose(x[at], y[at], relative, s) for x, y, at, s in zip(new, old, known, slacks, strict=True))


def _moved(x: np.ndarray, rng: np.random.Generator, by: float, most: float) -> np.ndarray:
    """Returns an array that is scaled down to some size, and moved; 0 stays 0 if it is moved very little."""
    x = x / max(1.0, np.abs(x).max(initial=0.0) / most)
    return x * (1 + by * rng.normal(size=x.shape)) + (by * rng.normal(size=x.shape) if abs(by) > 1e-6 else 0.0)


def _is_derivative(node: Node) -> bool:
    return node.place is not None and any(jx.is_of_derivative(eqn.source_info.name_stack) for eqn in node.place.eqns)
