"""`first_nonfinite`: finds the op that made the results of a program non-finite."""

import bisect
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jmp_amp._calls import transformation
from jmp_amp._float8 import emulated
from jmp_amp._jaxpr import open_jaxpr, split_arrays, trace_call
from jmp_amp.debug._arguments import check_callable, check_concrete
from jmp_amp.debug._cell import Cell, cell_of
from jmp_amp.debug._cures import cure_of
from jmp_amp.debug._diagnosis import diagnose
from jmp_amp.debug._evaluation import Evaluation, NonFiniteOp, applies_loss_scale
from jmp_amp.debug._location import Location, location_of
from jmp_amp.debug._node import Dataflow, upstream
from jmp_amp.debug._nonfinite import NonFinite
from jmp_amp.debug._place import PlaceId, argument_id
from jmp_amp.debug._program_in_float32 import has_low_precision, program_in_float32
from jmp_amp.debug._values import inexact_arrays, nonfinite_array, values_of


@transformation
def first_nonfinite(fun: Callable) -> Callable[..., NonFinite | None]:
    """Returns a function that evaluates `fun` op by op and reports the op that made its results non-finite.

    Use it on the arguments of a step that failed, not in every step: it runs on the host, one op at a time. Pass the
    function that you train: `amp.autocast(loss_fn)` or, to include the backward pass,
    `amp.value_and_grad(amp.autocast(loss_fn), loss_scale=scale)` with the current scale. The evaluation enters calls,
    branches and `jax.checkpoint`. It enters loops with non-finite results, iteration by iteration. `shard_map` and
    kernels count as one op.

    The reported op is the first, in program order, that computes non-finite values from finite operands, if these
    values reach a result. Infinities from constants, -inf in arguments (a mask), and infinities that `jnp.where` or an
    exponential removes again are considered intended. If an intended infinity is the only cause, the report names the
    op that turned it into NaN, such as the softmax of a fully masked row. Other non-finite arguments are reported
    like ops that precede all others. To choose among several candidates, it evaluates `fun` again without some of them.

    It then evaluates `fun` in float32, without any casts to low precision, and reports whether precision is the cause.
    The cure depends on the ops around the reported op, such as `log(1 + exp(x))`. If the loss scale of
    `amp.value_and_grad` is the cause, it evaluates `fun` again to find a scale that fits.

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
        >>> report = amp.debug.first_nonfinite(loss_fn)(jnp.full((4, 2), 300.0), jnp.full((3, 4), 300.0))
        >>> print(report.primitive, *report.operands, report.result, sep="; ")
        dot_general; float16[3,4] = 300; float16[4,2] = 300; float16[3,2], 6 of 6 inf
        >>> print(report.cure)
        the result is 5.5 times too large for float16, whose largest finite value is 65504. To run this op in ...
        >>> print(amp.debug.first_nonfinite(loss_fn)(jnp.ones((4, 2)), jnp.ones((3, 4))))
        None
    """
    check_callable(fun, "first_nonfinite")

    @functools.wraps(fun, updated=())
    def find(*args: Any, **kwargs: Any) -> NonFinite | None:
        with emulated():
            program, arrays, _ = trace_call(fun, args, kwargs)
        _, consts = open_jaxpr(program)
        check_concrete(
            [*arrays, *consts], "first_nonfinite", "call it outside, on the arguments of the step that failed"
        )
        # JAX's own checks would raise at the first op that returns NaN.
        with jax.debug_nans(False), jax.debug_infs(False):
            return _find(program, arrays, lambda: _argument_names(fun, args, kwargs))

    return find


_CURE_OF_ARGUMENTS = (
    "check the data, or the step that returned these parameters; `amp.check_health` names non-finite parameters"
)
_CURE_OF_CONSTANTS = "search the code for `jnp.inf` and `jnp.nan`"


def _find(program: Any, arrays: Sequence[Any], argument_names: Callable[[], list[str]]) -> NonFinite | None:
    evaluation = Evaluation()
    results = evaluation.run_program(program, arrays)
    if all(x.is_finite for x in results):
        return None
    cause = _cause(program, arrays, evaluation, results)
    if cause is None:
        result = values_of(nonfinite_array(x.value for x in results))
        return NonFinite("constant", "", "", "", False, (), (), result, "constant", _CURE_OF_CONSTANTS)
    if cause not in evaluation.nonfinite_ops:
        name, result = argument_names()[cause[1]], values_of(arrays[cause[1]])
        return NonFinite("argument", name, "", "", False, (), (), result, "argument", _CURE_OF_ARGUMENTS)
    op = evaluation.nonfinite_ops[cause]
    location = location_of(op.place.eqns)
    find_scale = functools.partial(_fitting_scale, program, arrays, evaluation, op)
    diagnosis = diagnose(op, location, Dataflow(evaluation.nodes), find_scale)
    cure = cure_of(diagnosis)
    finite, sentence = None, ""
    if not diagnosis.has_lost_constant and not diagnosis.is_opaque:
        finite, sentence = _in_float32(program, arrays, op, location)
    return NonFinite(
        op.eqn.primitive.name,
        *location,
        op.place.iteration,
        diagnosis.operands,
        diagnosis.result,
        cure.cause,
        cure.text_for(diagnosis),
        finite,
        sentence,
    )


def _cause(program: Any, arrays: Sequence[Any], evaluation: Evaluation, results: Sequence[Cell]) -> PlaceId | None:
    """Returns the id of the op or the argument that made the results non-finite; None if constants did."""
    arguments = {argument_id(i): x for i, x in enumerate(arrays)}
    reaches_result = frozenset[PlaceId]().union(*(x.causes for x in results))
    candidates = [cause for cause in (*arguments, *evaluation.nonfinite_ops) if cause in reaches_result]
    if candidates:
        return _first_harmful(program, arrays, candidates, evaluation)
    # All infinities were considered intended, so one of them is the cause.
    return next((cause for cause, x in arguments.items() if not cell_of(x).is_finite), None)


def _first_harmful(
    program: Any, arrays: Sequence[Any], candidates: Sequence[PlaceId], evaluation: Evaluation
) -> PlaceId:
    """Returns the first candidate that makes a result non-finite, by bisection."""

    def nonfinite(n: int) -> list[np.ndarray]:
        """Returns which elements of the results are non-finite if only the first `n` candidates are allowed."""
        cells = Evaluation(set(candidates[:n]), evaluation.trip_counts).run_program(program, arrays)
        return [~np.isfinite(np.asarray(x)) for x in inexact_arrays(cell.value for cell in cells)]

    if len(candidates) == 1:
        return candidates[0]
    baseline = nonfinite(0)
    low, high = 0, len(candidates)  # the first `low` candidates do no harm, the first `high` do
    while high - low > 1:
        middle = (low + high) // 2
        is_harmful = any((more & ~less).any() for more, less in zip(nonfinite(middle), baseline, strict=True))
        low, high = (low, middle) if is_harmful else (middle, high)
    return candidates[high - 1]


def _in_float32(program: Any, arrays: Sequence[Any], op: NonFiniteOp, location: Location) -> tuple[bool | None, str]:
    """Returns whether all results are finite in float32, and a sentence; None if the program does not run so."""
    if not has_low_precision(program):
        return False, "the program computes nothing in low precision: precision is not the cause"
    evaluation = Evaluation()
    try:
        wide = program_in_float32(program, arrays)
        results = evaluation.run_program(wide, arrays)
    except Exception:  # a custom primitive may reject other dtypes with any error
        return None, ""
    if all(x.is_finite for x in results):
        return True, "in float32 all results are finite: precision is the cause"
    cause = _cause(wide, arrays, evaluation, results)
    other = evaluation.nonfinite_ops.get(cause) if cause is not None else None
    if other is None:
        return None, ""
    kind = "NaN" if any(x.has_nan for x in other.outs) else "inf"
    place = location_of(other.place.eqns)
    if (other.eqn.primitive, place) == (op.eqn.primitive, location):
        return False, f"in float32 the same op gives {kind}: precision is not the cause"
    return False, f"in float32 `{other.eqn.primitive.name}` {place.where} gives {kind}: precision is not the only cause"


def _fitting_scale(program: Any, arrays: Sequence[Any], evaluation: Evaluation, op: NonFiniteOp) -> int | None:
    """Returns the k for which a loss scale that is 2^k times smaller makes all results finite; see `Diagnosis`."""
    node = next(x for x in op.outs if not x.is_finite).node
    factors = [x.operands[1].high for x in upstream(node) if x.eqn is not None and applies_loss_scale(x.eqn)]
    if not factors:
        return None

    def fits(k: int) -> bool:
        smaller = Evaluation(trip_counts=evaluation.trip_counts, loss_factor=2.0**-k)
        return all(x.is_finite for x in smaller.run_program(program, arrays))

    steps = range(1, math.floor(math.log2(max(*factors, 1.0))) + 1)
    k = bisect.bisect_left(steps, True, key=fits)
    return steps[k] if k < len(steps) else 0


def _argument_names(fun: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Returns the names of the arrays in the arguments, such as `params['w']`."""
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):  # a function written in C may have no signature
        parameters = []
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names = [*positional[: len(args)], *(f"args[{i}]" for i in range(len(positional), len(args)))]
    trees = [*zip(names, args, strict=True), *kwargs.items()]
    return [
        name + jax.tree_util.keystr(path)
        for name, tree in trees
        for path, x in jax.tree.leaves_with_path(tree)
        if split_arrays(x)[0]
    ]
