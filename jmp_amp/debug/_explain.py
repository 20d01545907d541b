"""`explain`: the dtypes that autocast chooses for each op of a function, and the reasons."""

import functools
from collections.abc import Callable
from typing import Any

from jmp_amp._autocast import explain_call, parse_settings
from jmp_amp._calls import transformation
from jmp_amp._jaxpr import api_boundary
from jmp_amp.debug._arguments import check_callable
from jmp_amp.debug._precision_report import PrecisionReport


@transformation
def explain(fun: Callable, dtype: Any = None, **options: Any) -> Callable[..., PrecisionReport]:
    """Returns a function that reports, for each op of `fun`, the dtypes that `autocast` chooses, and why.

    The returned function takes the arguments of `fun`. It traces the forward and the backward pass (of all floating
    results, with respect to all floating arguments), and compiles and runs nothing. The report includes the ops inside
    loops, branches and custom derivatives.

    Args:
        fun: a function for `autocast`, or a function that `autocast` returned. The latter brings its own settings, so
            pass no other arguments with it.
        dtype: as for `autocast`.
        **options: `policy`, `rules`, `save`, `weight_grad_dtype` and `residual_stream`, as for `autocast`.

    Returns:
        A function that returns a `PrecisionReport`. Its array arguments may be `jax.ShapeDtypeStruct`.

    Raises:
        TypeError: `fun` is not callable, or is already under `autocast` and options are given; `dtype` and `policy` are
            both given; or `explain` got the arguments of `fun`.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> def loss_fn(w, b, x):
        ...     return jnp.mean(jnp.exp(x @ w + b))
        >>> report = amp.explain(loss_fn)(jnp.ones((3, 2)), jnp.zeros(2), jnp.ones((4, 3)))
        >>> for row in report.select(direction="forward").rows[:4]:
        ...     print(row.primitive, row.op_class, row.why, row.inputs, row.compute, row.output)
        dot_general lower rule ('float32', 'float32') float16 float16
        broadcast_in_dim follow rule ('float32',) float32 float32
        add promote readers ('float16', 'float32') float32 float32
        exp full rule ('float32',) float32 float32
        >>> report.summary()["matmul_flops"]
        {'float16': 1.0}
    """
    if hasattr(fun, "autocast_of"):
        if options or dtype is not None:
            raise TypeError(
                "`fun` is already under `autocast`, which fixes its options; "
                "call `explain(fun)` without options, or pass the function without `autocast`"
            )
        fun, settings = fun.autocast_of
    else:
        check_callable(fun, "explain")
        settings = parse_settings(dtype, **options)

    @api_boundary
    @functools.wraps(fun, updated=())
    def explained(*args: Any, **kwargs: Any) -> PrecisionReport:
        def explain_again(dtype: Any = None, **options: Any) -> PrecisionReport:
            return explain(fun, dtype, **options)(*args, **kwargs)

        sites, casts, kept = explain_call(fun, settings, args, kwargs)
        return PrecisionReport(tuple(sites), settings.format.name, casts, kept, explain_again)

    return explained
