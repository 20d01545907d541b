"""`first_nonfinite`: the op that made the results of a program non-finite, and its cure."""

import bisect
import dataclasses
import functools
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_amp import _jaxpr as jx
from jmp_amp._calls import check_concrete, transformation
from jmp_amp._float8 import emulated
from jmp_amp.debug._evaluation import FLOAT32, Evaluation
from jmp_amp.debug._evidence import diagnose
from jmp_amp.debug._nodes import Id, Values, argument_id, is_low, values_of
from jmp_amp.debug._report import Location, check_callable, location_of
from jmp_amp.debug._trials import Trials, nearest

_CURE_OF_ARGUMENTS = (
    "check the data, or the step that returned these parameters; `amp.check_health` names non-finite parameters"
)
_CURE_OF_CONSTANTS = "search the code for `jnp.inf` and `jnp.nan`"


@transformation
def first_nonfinite(fun: Callable) -> "Callable[..., NonFinite | None]":
    """Returns a function that evaluates `fun` op by op and reports the op that made its results non-finite.

    Use it on the arguments of a step that failed, not in every step: it runs on the host, one op at a time. Pass the
    function that you train: `amp.autocast(loss_fn)` or, to include the backward pass,
    `amp.value_and_grad(amp.autocast(loss_fn), loss_scale=scale)` with the current scale. The evaluation enters calls,
    branches and `jax.checkpoint`. It enters loops with non-finite results, iteration by iteration. It
    evaluates `shard_map` for all devices at once, so that arrays in there have the axes of the mesh in front. Kernels
    count as one op.

    The reported op is the first, in program order, that computes non-finite values from finite operands, if these
    values reach a result. Infinities from constants, -inf in arguments (a mask), and infinities that `jnp.where` or an
    exponential removes again are considered intended. If an intended infinity is the only cause, the report names the
    op that turned it into NaN, such as the softmax of a fully masked row. Other non-finite arguments are reported
    like ops that precede all others. To choose among several candidates, it evaluates `fun` again without some of them.

    It then evaluates `fun` in float32, without any casts to low precision, and reports whether precision is the cause.
    A cure is tried before it is reported: `fun` runs with `jax.nn.softplus(x)` in place of `log(1 + exp(x))`, with a
    line in float32, or with a smaller loss scale, and its value and gradient are finite and close to those in float64.
    The cure is written for the user's line if its source can be read. Causes that no change of the program cures, such
    as bad data, are decided by the values.

    Args:
        fun: any function that JAX can trace. Its arguments are pytrees of arrays and of any other objects, as for
            `autocast`.

    Returns:
        A function with the signature of `fun`. It returns a `NonFinite`, or None if all results of `fun` are finite.
        The compiled program may overflow elsewhere: where XLA fuses float16 ops, it rounds less often than this
        evaluation, which fuses only in loops with finite results.

    Raises:
        TypeError: `fun` is not callable; or the returned function is called inside `jit` or another transformation.

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
        >>> print(report.cure)
        the result is 11 times too large for float16, whose largest finite value is 65504. To run this op in ...
        >>> print(amp.debug.first_nonfinite(loss_fn)(jnp.ones((8, 2)), jnp.ones((3, 8))))
        None
    """
    check_callable(fun, "first_nonfinite")

    @functools.wraps(fun, updated=())
    def find(*args: Any, **kwargs: Any) -> NonFinite | None:
        with emulated():
            program, arrays, _ = jx.trace_call(fun, args, kwargs, np.floating)
        _, consts = jx.open_jaxpr(program)
        check_concrete(
            [*arrays, *consts], "first_nonfinite", "call it outside, on the arguments of the step that failed"
        )
        arrays = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in arrays]  # in the dtypes of the trace
        # JAX's own checks would raise at the first op that returns NaN.
        with jax.debug_nans(False), jax.debug_infs(False):
            return _find(program, arrays)

    return find


@dataclasses.dataclass(frozen=True)
class NonFinite:
    """The op that made the results of a program non-finite; `first_nonfinite` returns it. `print` shows a paragraph.

    Attributes:
        primitive: the name of the op in the jaxpr; `"argument"` if an argument is non-finite, and `"constant"` if the
            results contain an infinity that no op produced.
        source: the line of the user's code, `"model.py:12 (attention)"`, or the path of the argument, `"params['w']"`.
        library: the innermost line of library code that the user's line calls; empty if the user's line is innermost.
        scope: the named scopes around the op, such as Flax and Haiku modules: `"decoder/attention"`.
        backward: whether the op belongs to a backward pass; `source` is then the corresponding forward line.
        iteration: the index of the iteration of each loop around the op, outermost first; for a `scan`, the index along
            the scanned axis.
        operands: the floating-point operands.
        result: the first non-finite result.
        cause: the formula in the program that has a cure, such as `"log(1 + exp(x))"`, or the name of the cause, such
            as `"loss scale"`; `"unknown"` if no cure passes.
        cure: what to change, in the names of the user if their source can be read; or, if the cause is not known, the
            values on the way to the op.
        tried: what was seen when the program ran with the cure; empty if the cause is not in the program.
        leaf: the nearest leaf of an argument that the op was computed from, such as `"params['layers'][2]['w']"`, which
            tells apart layers that share a line; empty if there is none.
        finite_in_float32: whether all results are finite if the program runs in float32, so that low precision is the
            cause; None if that is not known.
        in_float32: the same as a sentence, which names the op that is not finite in float32 if it is another one.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> report = amp.debug.first_nonfinite(lambda x: jnp.log(1 + jnp.exp(x)))(jnp.full(2, 100.0))
        >>> report.primitive, report.result.infs, report.operands[0].max, report.finite_in_float32
        ('exp', 2, 100.0, False)
        >>> print(report.cure)
        `log(1 + exp(x))` overflows or underflows half-way: use `jax.nn.softplus(x)` in place of ...
        >>> report.tried
        'value and gradient are finite, within 1e-07 of float64'
    """

    primitive: str
    source: str
    library: str
    scope: str
    backward: bool
    iteration: tuple[int, ...]
    operands: tuple[Values, ...]
    result: Values
    cause: str
    cure: str
    tried: str = ""
    leaf: str = ""
    finite_in_float32: bool | None = None
    in_float32: str = ""

    def __str__(self) -> str:
        lines = [f"  operand  {x}" for x in self.operands]
        if self.primitive == "argument":
            head = f"`{self.source}` is not finite: {self.result}"
        else:
            lines.append(f"  result   {self.result}")
            head = f"`{self.primitive}` produced {'NaN' if self.result.nans else 'inf'} {self._where()}"
        if self.primitive == "constant":
            head = "the results contain an infinite constant that no op produced"
        if self.leaf and not self.scope:
            lines.append(f"  after    `{self.leaf}` was read")
        if self.in_float32:
            lines.append(f"  float32  {self.in_float32}")
        lines.append(_wrapped(f"  cure     {self.cure}"))
        if self.tried:
            lines.append(f"  tried    {self.tried}")
        return "\n".join([head, *lines])

    def _where(self) -> str:
        where = Location(self.source, self.library, self.scope, self.backward).where
        where += f", in {self.library}" if self.library else ""
        where += f", scope {self.scope}" if self.scope else ""
        return where + (f", iteration {', '.join(map(str, self.iteration))}" if self.iteration else "")


def _wrapped(text: str) -> str:
    """Breaks lines, but not in code."""
    code = re.compile(r"`[^`]*`")
    text = code.sub(lambda x: x[0].replace(" ", "\0"), text)
    text = textwrap.fill(text, 110, subsequent_indent=" " * 11, break_long_words=False, break_on_hyphens=False)
    return text.replace("\0", " ")


def _find(program: Any, arrays: Sequence[Any]) -> NonFinite | None:
    evaluation = Evaluation(program, arrays)
    if evaluation.is_finite:
        return None
    cause = _cause(evaluation)
    if cause is None:
        result = next(x.node.values for x in evaluation.results if not x.is_finite)
        return NonFinite("constant", "", "", "", False, (), (), result, "constant", _CURE_OF_CONSTANTS)
    if cause not in evaluation.nonfinite:
        names: Any = jx.open_jaxpr(program)[0].debug_info.arg_names
        name, result = names[cause[1]], values_of(arrays[cause[1]])
        return NonFinite("argument", name, "", "", False, (), (), result, "argument", _CURE_OF_ARGUMENTS)
    node = evaluation.nonfinite[cause]
    if node.place.iteration or any(x.primitive in ("scan", "while") for x in nearest([node])):
        evaluation = dataclasses.replace(evaluation, enters_all=True)
        node = evaluation.nonfinite[cause]
    trials, where = Trials(evaluation, node), location_of(node.place.eqns)
    iteration, operands = node.place.iteration, tuple(x.values for x in node.operands if x.is_floating)
    return NonFinite(
        node.primitive, *where, iteration, operands, node.values, *diagnose(trials), trials.leaf, *_in_float32(trials)
    )


def _cause(evaluation: Evaluation) -> Id | None:
    """Returns the id of the op or the argument that made the results non-finite; None if constants did."""
    arguments = {argument_id(i): x for i, x in enumerate(evaluation.arrays)}
    reaches_result = frozenset[Id]().union(*(x.causes for x in evaluation.results))
    candidates = [cause for cause in (*arguments, *evaluation.nonfinite) if cause in reaches_result]
    if candidates:
        return _first_harmful(evaluation, candidates)
    # All infinities were considered intended, so one of them is the cause.
    return next((cause for cause, x in arguments.items() if not values_of(x).is_finite), None)


def _first_harmful(evaluation: Evaluation, candidates: Sequence[Id]) -> Id:
    """Returns the first candidate that makes a result non-finite, by bisection."""

    def nonfinite(n: int) -> list[np.ndarray]:
        """Returns which elements of the results are non-finite if only the first `n` candidates are allowed."""
        results = (x.value for x in dataclasses.replace(evaluation, allowed=set(candidates[:n])).results)
        return [~np.isfinite(np.asarray(x)) for x in results if jx.is_inexact(x)]

    def is_harmful(n: int) -> bool:
        return any((more & ~less).any() for more, less in zip(nonfinite(n), baseline, strict=True))

    if len(candidates) == 1:
        return candidates[0]
    baseline = nonfinite(0)
    return candidates[bisect.bisect_left(range(1, len(candidates)), True, key=is_harmful)]


def _in_float32(trials: Trials) -> tuple[bool | None, str]:
    """Returns whether all results are finite in float32, and a sentence; None if the program does not run so."""
    evaluation, node = trials.evaluation, trials.node
    if not evaluation.has_low_precision:
        return False, "the program computes nothing in low precision: precision is not the cause"
    if any(x.is_constant and x.values.infs and is_low(np.dtype(x.values.dtype)) for x in nearest([node])):
        return None, ""  # the constant of the code is not known
    try:
        if trials.is_finite_in_float32:
            return True, "in float32 all results are finite: precision is the cause"
        wide = Evaluation(evaluation.program, evaluation.arrays, wide=FLOAT32)
    except Exception:  # a custom primitive may reject other dtypes with any error
        return None, ""
    other = wide.nonfinite.get(_cause(wide) or ())
    if other is None or jx.holds_jaxprs(other.eqn):  # one that ran as it was traced
        return None, ""
    kind = "NaN" if other.values.nans else "inf"
    if other.key == node.key:
        return False, f"in float32 the same op gives {kind}: precision is not the cause"
    where = location_of(other.place.eqns).where
    return False, f"in float32 `{other.primitive}` {where} gives {kind}: precision is not the only cause"
