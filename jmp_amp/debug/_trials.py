"""Tries cures: runs the program with each, and compares values and gradients with float64."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmp_amp import _jaxpr as jx
from jmp_amp.debug._cures import Match, Part, matches, parts
from jmp_amp.debug._evaluation import FLOAT32, FLOAT64, QUICK, Evaluation, Rewrite, precise
from jmp_amp.debug._expressions import span_of
from jmp_amp.debug._nodes import Node, merge_equal, nearest
from jmp_amp.debug._report import location_of

_DEPTH, _MOST_ROOTS, _MOST_TRIALS = 7, 24, 4
# How much the arguments are moved, and how large they are then at most. By -1, each is moved the other way than by 1,
# so that both signs are met.
_MOVES = ((0.0, math.inf), (1e-2, math.inf), (1.0, 1.0), (-1.0, 1.0))
_TINY = float(np.finfo(np.float32).tiny)  # what is smaller may be 0 in float32


class Cured(NamedTuple):
    """What the user is told of a cure.

    Attributes:
        cure: what to write.
        tried: what was seen when the program ran so.
        left_out: what was not tried, for lack of time.
    """

    cure: str = ""
    tried: str = ""
    left_out: str = ""


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
        self._merged = merge_equal(evaluation.nodes)
        self.evaluation, self.node = evaluation, self._merged[node]
        results = [self._merged[x.node] for x in evaluation.results if x.node.is_floating]
        nodes = evaluation.nodes
        self.targets, self._is_differentiated = results, any(map(is_derivative, nodes))
        if self._is_differentiated:
            forward = [x for x in results if not x.is_backward and any(map(is_derivative, nearest([x])))]
            # The values of a gradient alone: the loss is read by nothing, or by what computes the gradient.
            ends = [x for x in nodes if x.eqn and x.is_floating and not x.is_backward and is_derivative(x)]
            ends = [x for x in ends if not x.place.iteration and not all(y.is_backward for y in x.readers or ())]
            self.targets = forward or ends[-1:]
        self.targets = [x for x in self.targets if not x.values.shape] or self.targets
        self.primal = nearest(self.targets)
        self.has_gradient = bool(self.targets) and (self.node in self.primal or is_derivative(node))
        if not self.has_gradient:
            self.targets, self.primal = results, dict.fromkeys((x for x in nodes if not is_derivative(x)), 0)

    def cure(self) -> Cured:
        """Returns the equal functions with which the program is finite; the first is for the op at hand."""
        texts, rewrites, n_trials = list[str](), list[Rewrite](), 0
        clock = self.evaluation.evaluator.clock
        for fault in dict.fromkeys([self.node, *(self._merged[x] for x in self.evaluation.nonfinite.values())]):
            for match in self._matches(fault):
                if clock.is_late or n_trials == _MOST_TRIALS:
                    reason = "the time was over" if clock.is_late else f"{n_trials} were tried"
                    return Cured(left_out=f"other formulas: {reason}")
                written = self._written(match)
                everywhere = self._everywhere(match) if written else []
                if not (written and everywhere):
                    continue
                clock.tick("ops and trials")
                n_trials += 1
                roots = {x.root for x in rewrites}
                new = [*rewrites, *(x for x in everywhere if x.root not in roots)]
                is_cured, seen = self._is_cured(new)
                if seen or (is_cured and self._contains(match.part, fault)):
                    rewrites = new
                    formula = f"`{match.cure.formula}` {match.cure.why}"
                    texts.append(f"{formula}: use `{written[1]}` in place of `{written[0]}`")
                    if seen:
                        return Cured("; then ".join(texts), seen)
                    break
            else:
                break
        return Cured()

    def _matches(self, fault: Node) -> Iterator[Match]:
        """Yields the parts of the program with a non-finite op, and then those near it, that are equal to formulas."""
        found = [part for site in self._sites(fault) for part in parts(site)]
        if fault not in self.primal:  # the derivative of a part comes from its lines
            found = [part for part in found if any(span_of(fault) == span_of(x) for x in part.nodes)]
        for is_inside in (True, False):
            yield from matches([part for part in found if self._contains(part, fault) == is_inside])

    def _contains(self, part: Part, fault: Node) -> bool:
        return fault not in self.primal or fault in part.nodes

    def _written(self, match: Match) -> tuple[str, str] | None:
        try:
            return match.written(self.primal)
        except (TypeError, ValueError):  # shapes that the replacement does not take, or a promotion that is forbidden
            return None

    def _sites(self, fault: Node) -> list[Node]:
        """The values near a non-finite op that a cure may compute otherwise, nearest first."""
        start = [fault]
        if fault not in self.primal:  # an op of the derivative: those that it is the derivative of
            read = nearest(start, lambda x: [] if x in self.primal else x.parents, _DEPTH)
            start = [x for x in read if x in self.primal and x.is_floating and not x.is_constant]
            start = [*start, *(y for x in start for y in x.readers if y in self.primal)]
        start = [x for x in nearest(start, lambda x: x.operands, 3) if x in self.primal]  # what was lost before the op
        near = nearest(start, lambda x: [y for y in x.readers if y in self.primal], _DEPTH)
        return [x for x in near if x.eqn and x.is_floating and x.uncast is x][:_MOST_ROOTS]  # a cast is not written

    def _everywhere(self, match: Match) -> list[Rewrite]:
        """Returns the rewrites of a match, and of what the same expression computes elsewhere, as in other layers.

        It returns none if the expression computes something else there, such as an array of more axes.
        """
        root, found = match.part.root, {match.part.root.key: match.rewrite()}
        for node in self.primal:
            if node.primitive == root.primitive and node.key not in found and span_of(node) == span_of(root):
                pairs = zip(parts(root), parts(node), strict=False)
                same = [y for x, y in pairs if x.inputs == match.part.inputs and x.ops == y.ops]
                if not same:
                    return []
                found[node.key] = match._replace(part=same[0]).rewrite()
        return list(found.values())

    def _compiled(self, wide: Any, rewrites: Sequence[Rewrite] = ()) -> Callable[..., list[np.ndarray]]:
        """Compiles the targets and their gradients, as a function of how the arguments are moved."""
        arrays = [*map(jnp.asarray, self.evaluation.evaluator.arrays)]
        is_floating, keeps = [*map(jx.is_floating, arrays)], [x.key for x in self.targets]
        changes: dict[str, Any] = {"wide": wide, "rewrites": rewrites, "keeps": keeps}

        def targets(floats: Sequence[Any], arrays: Sequence[Any]) -> tuple[Any, Any]:
            inputs = jx.combine(is_floating, floats, arrays)
            kept = dataclasses.replace(self.evaluation.evaluator, arrays=inputs, **changes).run().kept
            values = [kept[key] for key in keeps]
            return sum(jnp.sum(jnp.real(x).astype(wide or FLOAT32)) for x in values), values

        call = jax.value_and_grad(targets, has_aux=True) if self.has_gradient else targets
        run = jax.jit(call, compiler_options=QUICK)

        def found(by: float = 0.0, most: float = math.inf) -> list[np.ndarray]:
            rng = np.random.default_rng(0)
            floats: list[Any] = list(itertools.compress(arrays, is_floating))
            if wide:
                floats = [_moved(np.asarray(x, wide), rng, by, most) for x in floats]
            with precise(wide):
                outs = jax.tree.leaves(run(floats, arrays))
            return [np.asarray(x).astype(np.complex128 if np.iscomplexobj(x) else np.float64) for x in outs]

        return found

    @functools.cached_property
    def _exact(self) -> Callable[[float, float], list[np.ndarray]]:
        """Returns the targets and their gradients in float64."""
        return functools.cache(self._compiled(FLOAT64))

    def _is_cured(self, rewrites: Sequence[Rewrite]) -> tuple[bool, str]:
        """Returns whether rewrites are equal to the program, and finite; and what is seen if all results are.

        In float64, values and gradients are those of the program wherever these are finite: for its arguments, and for
        arguments that are moved.
        """
        try:
            found, exactly = self._compiled(None, rewrites)(), self._compiled(FLOAT64, rewrites)
            if not all(_are_close(exactly(*move), self._exact(*move)) for move in _MOVES):
                return False, ""
            # A program that is not differentiated may have an infinite derivative, as x * log(x) has at 0.
            n_values = 1 + len(self.targets)
            groups = [slice(n_values), slice(n_values, None)][: 1 + self._is_differentiated]
            if all(np.isfinite(x).all() for group in groups for x in found[group]):
                exact = [_known(*x) for x in zip(exactly(), exactly(1e-7), found, strict=True)]
                seen = _compared([found[x] for x in groups], [exact[x] for x in groups])
                what = "value and gradient are" if self._is_differentiated else "all results are"
                return bool(seen), seen and f"{what} finite, {seen}"
            variant = dataclasses.replace(self.evaluation.evaluator, rewrites=rewrites).run()
            roots = {x.root for x in rewrites}
            return all(x.values.is_finite for x in variant.nodes if x.key in roots), ""
        except Exception:  # an op that has no derivative, does not run in float64, or a promotion that is forbidden
            return False, ""

    def results(self, **changes: Any) -> list[np.ndarray]:
        """Returns the floating results of another evaluation, as one program: this compiles faster than its ops do.

        Raises:
            TimeoutError: the program runs op by op only, and the time was over.
        """
        evaluator, is_floating = self.evaluation.evaluator, [x.node.is_floating for x in self.evaluation.results]

        def results(arrays: Sequence[Any]) -> list[Any]:
            run = dataclasses.replace(evaluator, arrays=arrays, **changes).run()
            if run.is_stopped:
                raise TimeoutError
            return [x.value for x in itertools.compress(run.results, is_floating)]

        with precise(changes.get("wide")):
            arrays = [*map(jnp.asarray, evaluator.arrays)]
            is_sharded = any(x.place and x.place.mesh for x in self.evaluation.nodes)
            run = results if is_sharded else jax.jit(results, compiler_options=QUICK)
            try:
                found = run(arrays)
            except Exception:  # batched loops, and branches of two dtypes, run op by op only
                found = results(arrays)
        return [np.asarray(x).astype(np.float64) for x in found]

    def in_float32(self, *places: Any) -> Cured:
        """Returns the lines, or the module, of the first of some places that are enough to compute in float32."""
        exact = self.results(wide=FLOAT32)
        for location in dict.fromkeys(location_of(x.eqns) for x in places):
            scope, (lines, in_lines) = location.scope, self._lines_in_float32([location.source], exact)
            in_scope = scope and self._seen_in_float32(_in_float32(functools.partial(_is_in, scope)), exact)
            if in_lines or in_scope:
                ways = ["`with amp.full_precision():`"] * bool(in_lines)
                ways += [f'`rules={{"{scope}": "full"}}`'] * bool(in_scope)
                ways[-1] += " if autocast chose the dtype, `.astype(jnp.float32)` if the code did"
                what = " and ".join(lines) if in_lines else f"the scope {scope}"
                return Cured(f"compute {what} in float32: {' or '.join(ways)}", in_lines or in_scope)
        return Cured()

    def _lines_in_float32(self, lines: list[str], exact: Sequence[np.ndarray]) -> tuple[list[str], str]:
        """Returns lines, and what was seen if they are enough; adds that of the next op that is not finite, once."""
        numbers = {_number(x) for x in lines}
        changes = _in_float32(lambda x: _number(x.source) in numbers)
        if (seen := self._seen_in_float32(changes, exact)) or len(lines) == 2:
            return lines, seen
        nonfinite = dataclasses.replace(self.evaluation.evaluator, **changes).run().nonfinite.values()
        others = [x for x in (location_of(x.place.eqns).source for x in nonfinite) if _number(x) not in numbers]
        return self._lines_in_float32([*lines, others[0]], exact) if others else (lines, "")

    def _seen_in_float32(self, changes: dict[str, Any], exact: Sequence[np.ndarray]) -> str:
        found = self.results(**changes)
        seen = _compared([found], [exact]) if all(np.isfinite(x).all() for x in found) else ""
        return seen and f"all results are finite, {seen.replace('64', '32')}"


def _is_in(scope: str, location: Any) -> bool:
    return scope in location.scope


def _in_float32(region: Callable[[Any], bool]) -> dict[str, Any]:
    return {"wide": FLOAT32, "region": functools.cache(lambda eqns: region(location_of(eqns)))}


def _number(source: str) -> str:
    """Returns the file and the number of a line, without the function: a lambda is one of its own."""
    return source.partition(" (")[0]


def _known(exact: np.ndarray, moved: np.ndarray, found: np.ndarray) -> np.ndarray:
    """Returns exact values; what was found where they depend on rounding errors of the arguments."""
    return np.where(np.abs(exact - moved) <= 0.01 * np.abs(exact), exact, found)


def _compared(found: Sequence[Sequence[np.ndarray]], exact: Sequence[Sequence[np.ndarray]]) -> str:
    """Returns how near groups of finite arrays are to exact ones; empty if they are not."""
    error = max(_norm(map(np.subtract, x, y)) / max(_norm(y), _TINY) for x, y in zip(found, exact, strict=True))
    return f"within {max(error, 1e-7):.0e} of float64" if error < 0.1 else ""


def _norm(arrays: Iterable[np.ndarray]) -> float:
    return math.hypot(*(float(np.linalg.norm(x)) for x in arrays))


def _are_close(new: Sequence[np.ndarray], old: Sequence[np.ndarray]) -> bool:
    """Whether arrays are close to others where these are finite, by the largest value of each."""
    known = [np.isfinite(x) for x in old]
    sizes = [np.abs(x[at]).max(initial=0.0) for x, at in zip(old, known, strict=True)]
    slacks = [1e-3 * x + 1e-12 * (max(sizes) or 1.0) for x in sizes]  # what is smaller is rounding
    return all(np.allclose(x[at], y[at], 1e-3, s) for x, y, at, s in zip(new, old, known, slacks, strict=True))


def _moved(x: np.ndarray, rng: np.random.Generator, by: float, most: float) -> np.ndarray:
    """Returns an array that is moved relative to its elements, or scaled down to some size and moved."""
    noise = by * rng.normal(size=x.shape)
    return x * (1 + noise) if most == math.inf else x / max(1.0, np.abs(x).max(initial=0.0) / most) + noise


def is_derivative(node: Node) -> bool:
    """Whether an op belongs to the derivative of a function."""
    return node.place is not None and any(jx.is_of_derivative(eqn.source_info.name_stack) for eqn in node.place.eqns)
