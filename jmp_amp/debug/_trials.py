"""Tries cures: runs the program with each, and compares values and gradients with float64."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jmp_amp import _jaxpr as jx
from jmp_amp.debug._cures import Part, matches, parts
from jmp_amp.debug._evaluation import FLOAT32, FLOAT64, QUICK, Evaluator, Interpretation, Replacement, precise
from jmp_amp.debug._expressions import in_users_names, span_of
from jmp_amp.debug._nodes import Node, merge_equal, nearest

_DEPTH, _MOST_ROOTS, _MOST_TRIALS = 7, 24, 4
# How much the arguments are moved, and how large they are then at most. -1 moves each the other way than 1 does, so
# that both signs occur.
_MOVES = ((0.0, math.inf), (1e-7, math.inf), (1e-2, math.inf), (1.0, 1.0), (-1.0, 1.0))


class Cure(NamedTuple):
    """What to write, what was seen when the program ran so, and what was not tried; as in `NonFinite`."""

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

    def __init__(self, evaluation: Interpretation, node: Node) -> None:
        merged = merge_equal(evaluation.nodes)
        self.evaluation, self.node, nodes = evaluation, merged[node], evaluation.nodes
        self._faults = dict.fromkeys([self.node, *(merged[x] for x in evaluation.nonfinite.values())])
        results = [merged[x.node] for x in evaluation.results if x.node.is_floating]
        self.targets, self._is_differentiated = results, any(map(is_derivative, nodes))
        if self._is_differentiated:
            forward = [x for x in results if not x.is_backward and any(map(is_derivative, nearest([x])))]
            # Of a gradient alone, the last value that the forward pass reads.
            ends = [x for x in nodes if x.eqn and x.is_floating and not x.is_backward and is_derivative(x)]
            ends = [x for x in ends if not x.place.iteration and not all(y.is_backward for y in x.readers)]
            self.targets = forward or ends[-1:]
        self.targets = [x for x in self.targets if not x.summary.shape] or self.targets
        self.primal = nearest(self.targets)
        self.has_gradient = bool(self.targets) and (self.node in self.primal or is_derivative(node))
        if not self.has_gradient:
            self.targets, self.primal = results, dict.fromkeys((x for x in nodes if not is_derivative(x)), 0)

    def cure(self) -> Cure:
        """Finds equal functions with which the program is finite; the first is for the op at hand."""
        lines, replacements, n_trials, clock = list[str](), list[Replacement](), 0, self.evaluation.evaluator.clock
        for fault in self._faults:
            for copies, text, (old, new) in self._matches(fault):
                if clock.is_late or n_trials == _MOST_TRIALS:
                    late = ": the time was over" * clock.is_late
                    return Cure(left_out=f"other formulas than the first {n_trials}{late}")
                clock.tick("ops and trials")
                n_trials += 1
                function = eval(f"lambda x: {text}", {"jax": jax, "jnp": jnp, "optax": optax})
                tried = [*replacements, *(Replacement(x.root.key, x.x.key, function) for x in copies)]
                is_cured, seen = self._tried(tried)
                if seen or (is_cured and any(self._contains(x, fault) for x in copies)):
                    replacements = tried
                    lines.append(f"use `{new}` in place of `{old}`")
                    if seen:
                        return Cure("; ".join(lines), seen)
                    break
            else:
                break
        return Cure()

    def _matches(self, fault: Node) -> Iterator[tuple[list[Part], str, tuple[str, str]]]:
        """Yields the parts near a non-finite op that are equal to formulas and that the user can write otherwise."""
        at = span_of(fault)
        start = [fault] if fault in self.primal else [x for x in self.primal if at and span_of(x) == at]
        start = [x for x in nearest(start, lambda x: x.operands, 3) if x in self.primal]  # what was lost before the op
        near = nearest(start, lambda x: [y for y in x.readers if y in self.primal], _DEPTH)
        roots = [x for x in near if x.eqn and x.is_floating and x.uncast is x][:_MOST_ROOTS]  # a cast is not written
        found = [part for root in roots for part in parts(root)]
        inside = [part for part in found if self._contains(part, fault)]
        for part, text in itertools.chain(matches(inside), matches([x for x in found if x not in inside])):
            written = in_users_names(text, part.root, part.x, part.nodes)
            if written and (copies := self._copies(part)):
                yield copies, text, written

    def _copies(self, part: Part) -> list[Part]:
        """Returns what the expression of a part computes, as in other layers; none if one differs, or is in another."""
        ops, root, at = lambda y: [(x.primitive, len(x.summary.shape)) for x in y.nodes], part.root, span_of(part.root)
        same = {x.key: x for x in self.primal if x.primitive == root.primitive and span_of(x) == at}.values()
        found = [[y for y in parts(x) if ops(y) == ops(part)][:1] for x in same]
        is_inner = any(x in self.primal and span_of(x) == at for x in root.readers)
        is_batched = any("vmap" in str(x.source_info.name_stack) for x in root.place.eqns)
        return [] if is_inner or is_batched or not all(found) else [x[0] for x in found]

    def _contains(self, part: Part, fault: Node) -> bool:
        """Whether a part has an op, or the line of its derivative."""
        return any(x is fault or (fault not in self.primal and span_of(x) == span_of(fault)) for x in part.nodes)

    def _values(
        self, moves: Sequence[Any] = _MOVES[:1], wide: Any = None, replacements: Sequence[Replacement] = ()
    ) -> list[list[np.ndarray]]:
        """Returns the targets and their gradients for each of some moves of the arguments.

        The program is compiled as a whole, which is faster than its ops are.
        """
        keeps = [x.key for x in self.targets]
        evaluator = dataclasses.replace(self.evaluation.evaluator, wide=wide, replacements=replacements, keeps=keeps)
        arrays = [*map(jnp.asarray, evaluator.arrays)]
        is_floating, found = [*map(jx.is_floating, arrays)], list[list[Any]]()

        def values(floats: Sequence[Any]) -> tuple[Any, Any]:
            inputs = jx.combine(is_floating, floats, arrays)
            kept = dataclasses.replace(evaluator, arrays=inputs).trace().kept
            outs = [kept[key] for key in keeps]
            return sum(jnp.sum(jnp.real(x).astype(wide or FLOAT32)) for x in outs), outs

        call = jax.value_and_grad(values, has_aux=True) if self.has_gradient else values
        run = jax.jit(call, compiler_options=QUICK)
        for by, most in moves:
            rng, floats = np.random.default_rng(0), list[Any](itertools.compress(arrays, is_floating))
            if by:
                floats = [_moved(np.asarray(x, wide), rng, by, most) for x in floats]
            with precise(wide):
                found.append([np.asarray(x).astype(np.complex128) for x in jax.tree.leaves(run(floats))[1:]])
        return found

    @functools.cached_property
    def _exact(self) -> list[list[np.ndarray]]:
        return self._values(_MOVES, wide=FLOAT64)

    @np.errstate(all="ignore")
    def _tried(self, replacements: Sequence[Replacement]) -> tuple[bool, str]:
        """Returns whether replacements are equal to the program, and finite; and what is seen if the targets are, too.

        In float64, values and gradients are those of the program wherever these are finite: for its arguments, and for
        arguments that are moved.
        """
        try:
            exact = self._values(_MOVES, wide=FLOAT64, replacements=replacements)
            if not all(map(_are_close, exact, self._exact)):
                return False, ""
            (found,), n = self._values(replacements=replacements), len(self.targets)
            # A program that is not differentiated may have an infinite derivative, as x * log(x) has at 0.
            groups = [slice(n), slice(n, None)][: 1 + self._is_differentiated]
            # What depends on rounding errors of the arguments is not known.
            known = [np.where(abs(x - y) <= 0.01 * abs(x), x, z) for x, y, z in zip(*exact[:2], found, strict=True)]
            if (error := max(_error(found[group], known[group]) for group in groups)) < 0.1:
                return True, f"finite, within {error:.0e} of float64"
            variant = dataclasses.replace(self.evaluation.evaluator, replacements=replacements).run()
            roots = {x.root for x in replacements}
            return all(x.summary.is_finite for x in variant.nodes if x.key in roots), ""
        except Exception:  # an op that has no derivative, does not run in float64, or a promotion that is forbidden
            return False, ""


def lines_in_float32(evaluator: Evaluator, exact: Sequence[np.ndarray], lines: Sequence[str]) -> Cure:
    """Finds lines that are enough to compute in float32 for some results: these, and that of the next fault."""
    numbers = {x.partition(" (")[0] for x in lines}  # without the function: a lambda is one of its own
    region = functools.cache(lambda eqns: jx.site_of(eqns).source.partition(" (")[0] in numbers)
    run = dataclasses.replace(evaluator, wide=FLOAT32, region=region).run()
    if (error := _error([x.value for x in run.results if x.node.is_floating], exact)) < 0.1:
        text = "`with amp.full_precision():` if autocast chose the dtype, `.astype(jnp.float32)` if the code did"
        return Cure(f"compute {' and '.join(lines)} in float32: {text}", f"finite, within {error:.0e} of float32")
    others = [x for x in (x.place.site.source for x in run.nonfinite.values()) if x not in lines]
    if len(lines) == 2 or not others or run.is_stopped:
        return Cure(left_out="lines in float32: the time was over" if run.is_stopped else "")
    return lines_in_float32(evaluator, exact, [*lines, others[0]])


@np.errstate(all="ignore")
def _error(arrays: Sequence[np.ndarray], exact: Sequence[np.ndarray]) -> float:
    """Returns the relative error of arrays, by their norms, and at least that of float32; infinite if not finite."""
    flat, exact_flat = (np.concatenate([np.zeros(1), *(np.ravel(x) for x in y)]) for y in (arrays, exact))
    norm = max(float(np.linalg.norm(exact_flat)), float(jnp.finfo(jnp.float32).tiny))  # what is smaller may be 0
    error = float(np.linalg.norm(flat - exact_flat)) / norm
    return max(error, 1e-7) if np.isfinite(flat).all() else math.inf


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
