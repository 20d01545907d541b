"""`explain`: what autocast decides for a function, and why."""

import functools
from collections.abc import Callable
from typing import Any

from jmp_amp._autocast import explain_call, parse_settings
from jmp_amp._jaxpr import api_boundary
from jmp_amp.debug._precision_report import PrecisionReport, report_of


def explain(fun: Callable, dtype: Any = "float16", **options: Any) -> Callable[..., PrecisionReport]:
    """Returns a function that says what `autocast` makes of `fun`, op by op.

    It takes the arguments of `fun`, traces the forward and the backward pass (of all floating results, with respect to
    all floating arguments), and runs and compiles nothing. Bodies of loops, branches and custom derivatives are
    included.

    Args:
        fun: any function that autocast takes, or one that it returned: then the other arguments are that one's.
        dtype: as for `autocast`.
        **options: `policy`, `rules`, `save` and `weight_grad_dtype`, as for `autocast`.

    Returns:
        A function that returns a `PrecisionReport`. Arrays among its arguments may be `jax.ShapeDtypeStruct`.

    Raises:
        TypeError: `fun` is not callable, or is under autocast already and options are given.

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
        1.0
    """
    if hasattr(fun, "autocast_of"):
        if options or dtype != "float16":
            raise TypeError(
                "this function is under autocast already; explain it without options, or the plain function with them"
            )
        fun, settings = fun.autocast_of
    else:
        if not callable(fun):
            raise TypeError(f"`explain` takes a function, got {type(fun).__name__}")
        settings = parse_settings(dtype, **options)

    @api_boundary
    @functools.wraps(fun, updated=())
    def explained(*args: Any, **kwargs: Any) -> PrecisionReport:
        def again(dtype: Any = "float16", **options: Any) -> PrecisionReport:
            return explain(fun, dtype, **options)(*args, **kwargs)

        return report_of(explain_call(fun, settings, args, kwargs), settings.format.name, again)

    return explained
