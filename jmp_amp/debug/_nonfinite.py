"""`first_nonfinite`: the op that made the results of a program non-finite, and the lines that need float32."""

import bisect
import dataclasses
import functools
import math
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_amp import _jaxpr as jx
from jmp_amp._autocast import autocast_with
from jmp_amp._calls import check_concrete, transformation
from jmp_amp._modules import unbound
from jmp_amp._products import emulated
from jmp_amp.debug._causes import CONSTANT, Cause, diagnose_op, with_values
from jmp_amp.debug._clock import Clock, check_seconds
from jmp_amp.debug._evaluation import FLOAT32, FLOAT64, Interpretation, applies_loss_scale
from jmp_amp.debug._nodes import Node, Summary, is_low, merge_equal, nearest
from jmp_amp.debug._report import as_jit_takes, check_callable

_MOST = 5  # operands in a report
_GUIDE = "docs/my-loss-is-nan.md#"
_OF_ARGUMENTS = _GUIDE + "an-argument-that-is-not-finite"
_CODE = re.compile(r"`[^`]*`")


@transformation
def first_nonfinite(fun: Callable, *, max_seconds: float = 60.0) -> "Callable[..., NonFinite | None]":
    """Returns a function that evaluates `fun` and reports the op that made its results non-finite.

    Use it on the arguments of a step that failed, not in every step: the host reads the results of each op. Pass the
    function that you train: `amp.autocast(loss_fn)` or, to include the backward pass,
    `amp.value_and_grad(amp.autocast(loss_fn), loss_scale=scale)` with the current scale. The evaluation enters calls,
    branches and `jax.checkpoint`, and loops iteration by iteration; a loop of more than 20,000 ops, and a `while_loop`,
    is entered if its results are non-finite. Kernels count as one op, and so does a `shard_map` or `jax.pmap` over
    several devices; of its operands, five are reported, non-finite ones first.

    The reported op is the first, in program order, that computes non-finite values from finite operands, if these
    values reach a result. Infinities from constants, -inf in arguments (a mask), and infinities that `jnp.where` or an
    exponential removes again are considered intended. If an intended infinity is the only cause, the report names the
    op that turned it into NaN, such as the softmax of a fully masked row. Other non-finite arguments are reported
    like ops that precede all others. To choose among several candidates, it evaluates `fun` again without some of them.

    The program is compiled as a whole, with each op on its own, in about the time in which the step is compiled. What
    is said of float32 takes a second compilation, and so do lines in float32.

    If all results are finite, but an op overflowed and a later op hides that, as a division by the infinity does, the
    program is evaluated in float64, too. If the results differ, or the time is over before that is known, the op is
    reported.

    The cause is what was seen: the element that is 0, outside of the domain or too large, and where it comes from. If
    the program is finite in float32, the cure is a line to compute in float32, or two, with which the program was run.
    Formulas that stay finite are in the section of the documentation that the report names.

    Args:
        fun: any function that JAX can trace. Its arguments are pytrees of arrays and of any other objects. Python
            numbers in them, such as a count of steps, are arrays, as in `jax.jit`. An argument that is a number stays
            one, and so do numbers beside functions and strings, as in an Equinox module under `equinox.filter_jit`.
        max_seconds: after so many seconds, no more ops are evaluated and no more lines tried in float32; the report
            names what was left out. If no op made a value non-finite until then, it says how many of the ops were seen.
            An op or a compiled loop that has begun is finished. Progress is shown on stderr after 5 seconds.

    Returns:
        A function with the signature of `fun`. It returns a `NonFinite`, or None if all results of `fun` are finite.
        The compiled program may overflow elsewhere: where XLA fuses float16 ops, it rounds less often than this
        evaluation, which fuses only in long loops.

    Raises:
        TypeError: `fun` is not callable; or the returned function is called inside `jit` or another transformation.
        ValueError: `max_seconds` is not positive.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> @amp.autocast
        ... def loss_fn(w, x):
        ...     scores = x @ w
        ...     return jnp.mean(scores)
        >>> report = amp.debug.first_nonfinite(loss_fn)(jnp.full((8, 2), 300.0), jnp.full((3, 8), 300.0))
        >>> print(report.primitive, *report.operands, report.result, sep="; ")
        dot_general; float16[3,8] = 300; float16[8,2] = 300; float16[3,2], 6 of 6 inf
        >>> print(report.cause)
        `dot_general` of 300 and 300 at [0, 0] is 7.2e+05, beyond float16, whose largest finite value is 65504; ...
        >>> print(amp.debug.first_nonfinite(loss_fn)(jnp.ones((8, 2)), jnp.ones((3, 8))))
        None
    """
    check_callable(fun, "first_nonfinite")
    check_seconds(max_seconds)

    @functools.wraps(fun, updated=())
    def find(*args: Any, **kwargs: Any) -> NonFinite | None:
        clock = Clock(max_seconds)
        with emulated():
            args, kwargs = as_jit_takes(args, kwargs)
            program, arrays, _ = jx.trace_call(*_with_module(fun, args), kwargs, np.floating)
        _, consts = jx.open_jaxpr(program)
        check_concrete(
            [*arrays, *consts], "first_nonfinite", "call it outside, on the arguments of the step that failed"
        )
        arrays = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in arrays]  # in the dtypes of the trace
        # JAX's own checks would raise at the first op that returns NaN.
        with jax.debug_nans(False), jax.debug_infs(False):
            found = _find(Interpretation(program, arrays, clock=clock))
        clock.finish()
        return found

    return find


def _with_module(fun: Any, args: Sequence[Any]) -> tuple[Callable, Sequence[Any]]:
    """Returns a function and its arguments; the module that it is of is one of them, since its state may change."""
    inner, settings = getattr(fun, "autocast_of", (fun, None))
    function, all_args = unbound(inner, args)
    if function is inner:
        return fun, args
    return autocast_with(function, settings) if settings else function, all_args


@dataclasses.dataclass(frozen=True, kw_only=True)
class NonFinite(jx.Site):
    """The op that made the results of a program non-finite; `first_nonfinite` returns it. `print` shows a paragraph.

    Attributes:
        primitive: the name of the op in the jaxpr; `"argument"` if an argument is non-finite, `"constant"` if the
            results contain an infinity or NaN that no op produced, and empty if the time was over before one was found.
        direction: `"forward"`, `"backward"`, or `"recomputed"` for the backward pass.
        module: the named scopes around the op, such as Flax and Haiku modules: `"decoder/attention"`.
        source: the line of the user's code, `"model.py:12 (attention)"`, or the path of the argument, `"params['w']"`;
            in a backward pass, the corresponding forward line.
        runs: how often the op runs.
        library: the innermost line of library code that the user's line calls; empty if the user's line is innermost.
        iteration: the index of the iteration of each loop around the op, outermost first; for a `scan`, the index along
            the scanned axis.
        operands: the floating-point operands.
        result: the first non-finite result.
        cause: what was seen: an element that is 0, outside of the domain or too large, and where it comes from.
        guide: the section of the documentation on this kind of cause.
        cure: the lines to compute in float32; empty if float32 is not enough.
        tried: what was seen when the program ran with these lines in float32.
        leaf: the nearest leaf of an argument that the op was computed from, such as `"params['layers'][2]['w']"`, which
            tells apart layers that share a line; empty if there is none.
        hidden_by: the line of the op that hides the infinity, if all results are finite.
        finite_in_float32: whether all results are finite if the program runs in float32, so that low precision is the
            cause; None if that is not known.
        in_float32: the same as a sentence, which names the op that is not finite in float32 if it is another one.
        left_out: what was not done, for lack of time.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> report = amp.debug.first_nonfinite(lambda x: jnp.exp(x) - 1)(jnp.full(2, 100.0))
        >>> report.primitive, report.result.infs, report.operands[0].max, report.finite_in_float32
        ('exp', 2, 100.0, False)
        >>> print(report.cause)
        `exp` of 100 at [0] is 2.688e+43, beyond float32, whose largest finite value is 3.4028e+38; `x[0]` is 100
    """

    library: str = ""
    iteration: tuple[int, ...] = ()
    operands: tuple[Summary, ...] = ()
    result: Summary = dataclasses.field(default_factory=Summary)
    cause: str
    guide: str
    cure: str = ""
    tried: str = ""
    leaf: str = ""
    hidden_by: str = ""
    finite_in_float32: bool | None = None
    in_float32: str = ""
    left_out: str = ""

    def __str__(self) -> str:
        result = str(self.result) if self.result.dtype and self.primitive != "argument" else ""
        leaf = f"`{self.leaf}`" if self.leaf and not self.module else ""
        texts = result, leaf, self.cause, self.in_float32, self.cure, self.tried, self.left_out, self.guide
        names = "result", "leaf", "cause", "float32", "cure", "tried", "left out", "guide"
        lines = [*(("operand", str(x)) for x in self.operands), *zip(names, texts, strict=True)]
        return "\n".join([self._head(), *(_wrapped(f"  {name:<9}{text}") for name, text in lines if text)])

    def _head(self) -> str:
        """Returns the first line of a print."""
        what = "a NaN" if self.result.nans else "an infinite constant"
        heads = {
            "": "no non-finite value was found in the time",
            "argument": f"`{self.source}` is not finite: {self.result}",
            "constant": f"the results contain {what} that no op produced",
        }
        if self.primitive in heads:
            return heads[self.primitive]
        head = f"`{self.primitive}` produced {'NaN' if self.result.nans else 'inf'} {self.where}"
        texts = self.library, self.module, ", ".join(map(str, self.iteration)), self.hidden_by
        named = zip(("in", "scope", "iteration", "hidden by"), texts, strict=True)
        return ", ".join([head, *(f"{name} {text}" for name, text in named if text)])


def _wrapped(text: str) -> str:
    """Breaks lines, but not in code."""
    text = _CODE.sub(lambda x: x[0].replace(" ", "\0"), text)
    text = textwrap.fill(text, 110, subsequent_indent=" " * 11, break_long_words=False, break_on_hyphens=False)
    return text.replace("\0", " ")


def _find(evaluation: Interpretation) -> NonFinite | None:
    """Reports what makes the results of a program non-finite; None if they are finite."""
    evaluation = evaluation.run()
    if evaluation.is_stopped:
        node = next(iter(evaluation.nonfinite), None)
        return _report(evaluation, node, rest="the ops that follow") if node else _unseen(evaluation)
    if evaluation.is_finite:
        return _hidden(evaluation)
    cause = _cause(evaluation)
    if cause is None:
        return _constant(evaluation)
    return _report(evaluation, cause) if cause.eqn else _argument(evaluation, cause)


def _unseen(evaluation: Interpretation) -> NonFinite:
    """Reports that the time was over before an op made a value non-finite."""
    n, seconds = len(evaluation.seen), evaluation.clock.max_seconds
    n_ops = sum(not jx.inner_jaxprs(eqn) for *_, eqn in jx.equations_in(evaluation.program))
    text = f"nothing became non-finite in the {n:,} of {n_ops:,} ops that were evaluated in {seconds:g} s"
    rest = f"the other {n_ops - n:,} ops: pass a larger `max_seconds`"
    return NonFinite(cause=text, guide=_GUIDE + "how-to-read-the-report", left_out=rest)


def _constant(evaluation: Interpretation) -> NonFinite:
    """Reports that a constant made the results non-finite."""
    result = next(x.summary for x in evaluation.results if not x.is_finite)
    text = "search the code for `jnp.inf` and `jnp.nan`"
    return NonFinite(primitive="constant", result=result, cause=text, guide=_OF_ARGUMENTS)


def _argument(evaluation: Interpretation, node: Node) -> NonFinite:
    """Reports an argument that is not finite."""
    array = np.asarray(evaluation.arrays[node.index[-1]])
    index = tuple(np.argwhere(~np.isfinite(array))[0].tolist())
    text = f"`{node.name}{[*index] if index else ''}` is {array[index]}"
    return NonFinite(primitive="argument", source=node.name, result=node.summary, cause=text, guide=_OF_ARGUMENTS)


def _hidden(evaluation: Interpretation) -> NonFinite | None:
    """Reports an overflow that a later op hides, if the results in float64 are others."""
    for node in evaluation.nonfinite:
        hider = _hider(evaluation, node)
        if hider is None or not node.summary.infs or not all(x.is_finite for x in node.operands):
            continue
        holds = {node.id, hider.id}
        exact = evaluation.again(wide=FLOAT64, holds=holds)
        traced = evaluation.again(holds=holds)
        if exact.is_stopped or traced.is_stopped:
            return _report(evaluation, node, hider, "the program in float64")
        if not any(_differ(x.value, y.value) for x, y in zip(traced.results, exact.results, strict=True)):
            return None
        # In float64, another branch may run.
        held = ([run.held.get(x.id, np.array(np.nan)) for x in (node, hider)] for run in (traced, exact))
        (result, kept), (exact_result, exact_kept) = held
        if (np.isinf(result) & np.isfinite(exact_result)).any() and _differ(kept, exact_kept):
            return _report(evaluation, node, hider)
    return None


def _hider(evaluation: Interpretation, node: Node) -> Node | None:
    """Returns the first op that computes finite values from the non-finite ones of a node."""
    found = nearest([node], lambda x: [] if x.is_finite else x.readers)
    return next((x for x in evaluation.nodes if x in found and x.is_finite and x.eqn), None)


def _differ(x: Any, exact: Any) -> bool:
    """Whether finite arrays differ from those in float64 by more than low precision explains."""
    if not jx.is_inexact(x):
        return jnp.issubdtype(x.dtype, jnp.number) and not np.array_equal(np.asarray(x), np.asarray(exact))
    info = jnp.finfo(x.dtype)
    slack = float(info.smallest_subnormal if is_low(x) else info.tiny)
    x, exact = (np.asarray(y).astype(np.complex128) for y in (x, exact))
    known = np.isfinite(x) & np.isfinite(exact)
    return not np.allclose(x[known], exact[known], 0.1, slack)


def _cause(evaluation: Interpretation) -> Node | None:
    """Returns the result of an op or the argument that made the results non-finite; None if constants did."""
    arguments = evaluation.nodes[: len(evaluation.arrays)]
    reaches_result = frozenset[Node]().union(*(x.causes for x in evaluation.results))
    suspects = tuple(x for x in (*arguments, *evaluation.nonfinite) if x in reaches_result)
    if suspects:
        is_primal = _primal_test(evaluation)  # a derivative is computed in front of what the loss reads
        suspects = tuple(sorted(suspects, key=lambda x: not is_primal(x)))
        is_harmful = lambda n: not evaluation.again(suspects=suspects, allowed=n, is_observed=False).is_finite  # noqa: E731
        return suspects[bisect.bisect_left(range(1, len(suspects)), True, key=is_harmful)]
    # All infinities were considered intended, so one of them is the cause.
    return next((x for x in arguments if not x.is_finite), None)


def _report(evaluation: Interpretation, node: Node, hider: Node | None = None, rest: str = "") -> NonFinite:
    """Reports an op: what is seen there, whether float32 is enough, and for which lines.

    Args:
        evaluation: of the program.
        node: the result of the op.
        hider: the first result that is finite again, if all results of the program are finite.
        rest: what was not evaluated, for lack of time, although it tells whether the infinity is intended.
    """
    evaluation, node = with_values(evaluation, node)
    merged, found = merge_equal(evaluation.nodes), dict[str, Any]()
    cause = diagnose_op(merged[node], _primal_test(evaluation)(node))
    operands = tuple(x.summary for x in node.operands if x.is_floating)
    factor = None if hider else _smaller_loss_scale(evaluation, node)
    if factor:
        text = f"{cause.text}. With a loss scale that is 2^{factor} times smaller, all results are finite"
        cause = Cause("too-large-a-loss-scale", text)
    elif not rest and cause.section != CONSTANT and not evaluation.clock.is_late:
        found = _tried(evaluation, merged[node], cause)
    if not (factor or found) and (rest or evaluation.clock.is_late):
        rest = f"{rest}, so this infinity may be intended; " if rest else ""
        found = {"left_out": f"{rest}the program in float32: the time was over"}
    site = node.place.site
    if not site.source:  # the user's code does not call it, but hands it over: where it starts
        inner = (jx.frames_of(x[-1], 10_000) for each in jx.inner_jaxprs(node.eqn) for x in jx.equations_in(each))
        site = dataclasses.replace(site, source=next((str(x[-1]) for x in inner if x), ""))
    return NonFinite(
        **vars(site),
        library=jx.lines_of(node.place.eqns)[1],
        iteration=node.place.iteration,
        operands=operands if len(operands) <= _MOST else tuple(sorted(operands, key=lambda x: x.is_finite)[:_MOST]),
        result=node.summary,
        cause=cause.text,
        guide=_GUIDE + ("an-overflow-that-a-later-op-hides" if hider else cause.section),
        leaf=_leaf(node),
        hidden_by=f"`{hider.primitive}` {hider.place.site.where}" if hider else "",
        **found,
    )


def _smaller_loss_scale(evaluation: Interpretation, node: Node) -> int | None:
    """Returns the power of two by which the loss scale must be divided so that all results are finite, if one is."""
    scales = [x.operands[1].summary.max or 0.0 for x in nearest([node]) if x.eqn and applies_loss_scale(x.eqn)]
    steps = range(1, math.floor(math.log2(max([1.0, *scales]))) + 1)
    if not node.is_backward or not steps:
        return None
    k = bisect.bisect_left(steps, True, key=lambda k: evaluation.again(loss_factor=2.0**-k).is_finite)
    return None if k == len(steps) else steps[k]


def _primal_test(evaluation: Interpretation) -> Callable[[Node], bool]:
    """Returns whether the op of a value is not of a derivative, or is of the function that is differentiated."""
    merged = merge_equal(evaluation.nodes)
    is_forward = lambda x: x.is_floating and not x.is_backward  # noqa: E731
    results = [merged[x] for x in evaluation.results]
    ends = [x for x in results if is_forward(x) and any(map(_is_derivative, nearest([x])))]
    if not ends:  # of a gradient alone, the loss, which nothing reads
        ends = [x for x in merged.values() if x.eqn and is_forward(x) and _is_derivative(x) and not x.readers]
    near = nearest([x for x in ends if not x.summary.shape] or ends)
    return lambda x: not _is_derivative(x) or merged[x] in near


def _is_derivative(node: Node) -> bool:
    """Whether an op belongs to the derivative of a function, its forward pass included."""
    return node.place is not None and any(jx.is_of_derivative(eqn.source_info.name_stack) for eqn in node.place.eqns)


def _tried(evaluation: Interpretation, node: Node, cause: Cause) -> dict[str, Any]:
    """Runs the program in float32, and lines of it; returns what was seen, as fields of a `NonFinite`.

    A line that is not enough is tried together with that of the next fault.
    """
    atoms = (atom for *_, eqn in jx.equations_in(evaluation.program) for atom in (*eqn.invars, *eqn.outvars))
    if not any(map(is_low, atoms)):
        text = "the program computes nothing in low precision: precision is not the cause"
        return {"finite_in_float32": False, "in_float32": text}
    constants = (x.summary for x in nearest(node.operands) if x.is_constant and x.summary.infs)
    if any(x.summary.infs for x in node.operands) and any(jnp.finfo(x.dtype).bits < 32 for x in constants):
        return {}  # the constant of the code is not known
    wide = evaluation.again(wide=FLOAT32, is_observed=False)
    if not wide.is_finite:
        return _not_finite(wide.again(is_observed=True), node)
    text = "in float32 all results are finite: precision is the cause"
    found: dict[str, Any] = {"finite_in_float32": True, "in_float32": text}
    waiting = [[x] for x in dict.fromkeys(place.site.source for place in (cause.place or node.place, node.place))]
    while waiting:
        lines = waiting.pop(0)
        numbers = {x.partition(" (")[0] for x in lines}  # without the function: a lambda is one of its own
        region = functools.cache(lambda eqns, numbers=numbers: jx.site_of(eqns).source.partition(" (")[0] in numbers)
        run = wide.again(region=region)
        if (error := _error(run.results, wide.results)) < 0.1:
            text = "`with amp.full_precision():` if autocast chose the dtype, `.astype(jnp.float32)` if the code did"
            cure = f"compute {' and '.join(lines)} in float32: {text}"
            return found | {"cure": cure, "tried": f"finite, within {error:.0e} of float32"}
        run = run.again(is_observed=not run.is_stopped)
        others = [x for x in (x.place.site.source for x in run.nonfinite) if x not in lines]
        if run.is_stopped:
            found["left_out"] = "lines in float32: the time was over"
        elif len(lines) == 1 and others:
            waiting.insert(0, [*lines, others[0]])
    return found


def _not_finite(wide: Interpretation, node: Node) -> dict[str, Any]:
    """Returns what is to be said of a program that is not finite in float32 either, as fields of a `NonFinite`."""
    other = None if wide.is_stopped else _cause(wide)
    if other is None or not other.eqn or jx.inner_jaxprs(other.eqn):  # one that ran as it was traced
        return {}
    same = (other.place.key, other.index) == (node.place.key, node.index)
    kind = "NaN" if other.summary.nans else "inf"
    op = "the same op" if same else f"`{other.primitive}` {other.place.site.where}"
    text = f"in float32 {op} gives {kind}: precision is not the {'' if same else 'only '}cause"
    return {"finite_in_float32": False, "in_float32": text}


@np.errstate(all="ignore")
def _error(results: Sequence[Node], exact: Sequence[Node]) -> float:
    """Returns the relative error of results, by their norms, and at least that of float32; infinite if not finite."""
    arrays = ([np.ravel(np.asarray(x.value)) for x in nodes if x.is_floating] for nodes in (results, exact))
    flat, exact_flat = (np.concatenate([np.zeros(1), *x]) for x in arrays)
    norm = max(float(np.linalg.norm(exact_flat)), float(jnp.finfo(jnp.float32).tiny))  # what is smaller may be 0
    error = float(np.linalg.norm(flat - exact_flat)) / norm
    return max(error, 1e-7) if np.isfinite(flat).all() else math.inf


def _leaf(node: Node) -> str:
    """Returns the nearest leaf of an argument that a value was computed from; empty if there is none."""
    names = (x.name for x in nearest([node]) if x.is_floating)
    return next((x for x in names if x.endswith("]") or "." in x), "")
