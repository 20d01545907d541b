"""`first_nonfinite`: finds the op that made the results of a program non-finite."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jmp_amp._float8 import emulated
from jmp_amp._jaxpr import flat_call, open_jaxpr, split_arrays, trace
from jmp_amp.debug._arguments import check_callable, check_concrete
from jmp_amp.debug._cell import cell_of
from jmp_amp.debug._cures import cure_of
from jmp_amp.debug._diagnosis import diagnose
from jmp_amp.debug._evaluation import Evaluation, NonFiniteOp
from jmp_amp.debug._location import location_of
from jmp_amp.debug._nonfinite import NonFinite
from jmp_amp.debug._place import PlaceId, argument_id
from jmp_amp.debug._values import inexact_arrays, nonfinite_array, values_of


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
        flat, arrays = flat_call(fun, args, kwargs)
        with emulated():
            program = trace(flat, arrays)
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


def _find(program: Any, arrays: Sequence[Any], argument_names: Callable[[], list[str]]) -> NonFinite | None:
    evaluation = Evaluation()
    results = evaluation.run_program(program, arrays)
    if all(x.is_finite for x in results):
        return None
    arguments = {argument_id(i): x for i, x in enumerate(arrays)}
    reaches_result = frozenset[PlaceId]().union(*(x.causes for x in results))
    cause: PlaceId | None
    candidates = [cause for cause in (*arguments, *evaluation.nonfinite_ops) if cause in reaches_result]
    if candidates:
        cause = _first_harmful(program, arrays, candidates, evaluation)
    else:
        # All infinities were considered intended, so one of them is the cause.
        cause = next((cause for cause, x in arguments.items() if not cell_of(x).is_finite), None)
    if cause is None:
        result = values_of(nonfinite_array(x.value for x in results))
        cure = "search the code for `jnp.inf` and `jnp.nan`"
        return NonFinite("constant", "", "", "", False, (), (), result, cure)
    if cause in arguments:
        name, result = argument_names()[cause[1]], values_of(arguments[cause])
        return NonFinite("argument", name, "", "", False, (), (), result, _CURE_OF_ARGUMENTS)
    return _report(evaluation.nonfinite_ops[cause])


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


def _report(op: NonFiniteOp) -> NonFinite:
    location = location_of(op.place.eqns)
    diagnosis = diagnose(op, location)
    return NonFinite(
        op.eqn.primitive.name,
        *location,
        op.place.iteration,
        diagnosis.operands,
        diagnosis.result,
        cure_of(diagnosis),
    )


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
