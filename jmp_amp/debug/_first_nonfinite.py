"""`first_nonfinite`: which op of a program made its results non-finite."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jmp_amp._jaxpr import flat_call, open_jaxpr, split_arrays, trace
from jmp_amp.debug._cells import Path, look
from jmp_amp.debug._cures import cure, first_bad
from jmp_amp.debug._evaluate import Evaluation, Event, argument_path
from jmp_amp.debug._location import location_of
from jmp_amp.debug._nonfinite_report import NonFinite, floating, values_of


def first_nonfinite(fun: Callable) -> Callable[..., NonFinite | None]:
    """Returns a function that evaluates `fun` op by op, and tells which op made its results non-finite.

    `fun` is taken as it is trained: `amp.autocast(loss_fn)`, or, for the backward pass too,
    `amp.value_and_grad(amp.autocast(loss_fn), loss_scale=scale)` with the scale that is in use. Calls, branches and
    `jax.checkpoint` are entered, and so are loops whose results are not finite, iteration by iteration; `shard_map` and
    kernels are one op. It runs on the host, one op at a time: for a step that failed, not for each step.

    The op that counts is the first, in the order of the program, that made non-finite values out of finite ones which
    reach a result. Infinities that are meant are not blamed: those of constants and arguments (a mask of -inf), and
    those that `jnp.where` or an exponential removes again. If nothing but such an infinity is the cause, the op counts
    that made NaN of it, as the softmax of a row that is masked whole does. Other arguments that are not finite count as
    made by an op in front of the program. Several suspects are told apart by evaluating the program again without some
    of them.

    Args:
        fun: any function that JAX can trace: of pytrees of arrays and of anything else, as for `autocast`.

    Returns:
        A function with the arguments of `fun`, which returns a `NonFinite`, or None if all results of `fun` are finite.
        XLA may round less often than op by op where it fuses float16 ops, in loops that are finite as a whole too.

    Raises:
        TypeError: `fun` is not callable; or the returned function is called inside `jit` or another transformation.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> @amp.autocast
        ... def loss_fn(w, x):
        ...     scores = x @ w
        ...     return jnp.mean(scores)
        >>> found = amp.debug.first_nonfinite(loss_fn)(jnp.full((4, 2), 300.0), jnp.full((3, 4), 300.0))
        >>> print(found.primitive, *found.operands, found.result, sep="; ")
        dot_general; float16[3,4] = 300; float16[4,2] = 300; float16[3,2], 6 of 6 inf
        >>> print(found.cure)
        the result is 5.5 times too large for float16, which ends at 65504. Run this op in full: ...
        >>> print(amp.debug.first_nonfinite(loss_fn)(jnp.ones((4, 2)), jnp.ones((3, 4))))
        None
    """
    if not callable(fun):
        raise TypeError(f"`first_nonfinite` takes a function, got {type(fun).__name__}")

    @functools.wraps(fun, updated=())
    def find(*args: Any, **kwargs: Any) -> NonFinite | None:
        flat, arrays = flat_call(fun, args, kwargs)
        program = trace(flat, arrays)
        _, consts = open_jaxpr(program)
        if any(isinstance(x, jax.core.Tracer) for x in (*arrays, *consts)):
            raise TypeError(
                "`first_nonfinite` reads values, so it cannot run inside `jit` or another transformation; "
                "call it outside, on the arguments of the step that failed"
            )
        # Op by op, JAX's own checks would raise before the op is found.
        with jax.debug_nans(False), jax.debug_infs(False):
            return _find(program, arrays, lambda: _names(fun, args, kwargs))

    return find


def _find(program: Any, arrays: Sequence[Any], names: Callable[[], list[str]]) -> NonFinite | None:
    evaluation = Evaluation()
    results = evaluation.run_program(program, arrays)
    if not any(x.bad for x in results):
        return None
    arguments = {argument_path(i): x for i, x in enumerate(arrays)}
    reaching = frozenset[Path]().union(*(x.events for x in results))
    suspects = [path for path in (*arguments, *evaluation.events) if path in reaching]
    # Without a suspect, an infinity that was taken to be meant is all that there is.
    infinite = [path for path, x in arguments.items() if look(x).bad]
    path = _first_harmful(program, arrays, suspects, evaluation) if suspects else infinite[0] if infinite else None
    if path is None:
        bad = values_of(first_bad([x.value for x in results]))
        return NonFinite("constant", "", "", "", False, (), (), bad, "look for `jnp.inf` or `jnp.nan` in the code")
    if path in arguments:
        return NonFinite(
            "argument", names()[path[1]], "", "", False, (), (), values_of(arguments[path]), _CURE_OF_ARGUMENTS
        )
    return _report(evaluation.events[path])


_CURE_OF_ARGUMENTS = "look at the data, or at the step that returned these parameters: `amp.check_health` names them"


def _first_harmful(program: Any, arrays: Sequence[Any], suspects: Sequence[Path], evaluation: Evaluation) -> Path:
    """Returns the first of the suspects without which the results would be better, by bisection."""

    def bad(n: int) -> list[np.ndarray]:
        """Which results are not finite if nothing but the first `n` suspects may make them so."""
        cells = Evaluation(set(suspects[:n]), evaluation.lengths).run_program(program, arrays)
        return [~np.isfinite(np.asarray(x)) for x in floating(cell.value for cell in cells)]

    if len(suspects) == 1:
        return suspects[0]
    without = bad(0)
    low, high = 0, len(suspects)  # harmless, and taken to be harmful
    while high - low > 1:
        middle = (low + high) // 2
        harmful = any((more & ~less).any() for more, less in zip(bad(middle), without, strict=True))
        low, high = (low, middle) if harmful else (middle, high)
    return suspects[high - 1]


def _report(event: Event) -> NonFinite:
    location = location_of(event.place.eqns)
    return NonFinite(
        event.eqn.primitive.name,
        *location,
        event.place.iteration,
        tuple(map(values_of, floating([x.value for x in event.operands]))),
        values_of(first_bad(event.outs)),
        cure(event, location),
    )


def _names(fun: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Names the arrays among the arguments as the code of `fun` does."""
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):  # a function written in C may have no signature
        parameters = []
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named = [*positional[: len(args)], *(f"args[{i}]" for i in range(len(positional), len(args)))]
    trees = [*zip(named, args, strict=True), *kwargs.items()]
    return [
        name + jax.tree_util.keystr(path)
        for name, tree in trees
        for path, x in jax.tree.leaves_with_path(tree)
        if split_arrays(x)[0]
    ]
