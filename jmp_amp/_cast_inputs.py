"""The primitive of a function that autocast runs as it is written, on inputs of a dtype that it asks for.

It holds the function, not a jaxpr: a kernel that was traced for float32 does not take other dtypes, so autocast traces
the function again. Without autocast the primitive is the function.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jmp_amp import _jaxpr as jx
from jmp_amp._formats import parse_dtype

F = TypeVar("F", bound=Callable[..., Any])

_cast_inputs_p = Primitive("cast_inputs")
_cast_inputs_p.multiple_results = True


def cast_inputs(dtype: Any) -> Callable[[F], F]:
    """Returns a decorator for a function, such as a kernel, that reads `dtype` inside `autocast`.

    Autocast does not know what is in a kernel, so it calls one in the dtypes that it was traced in, float32 in a
    float32 model. A function with this decorator gets its floating arguments cast to `dtype` and runs as it is written,
    and so does its derivative; other ops follow the dtypes of its results. Outside `autocast`, and in a float32 region,
    the decorator has no effect. It replaces torch's `custom_fwd(cast_inputs=...)` and `custom_bwd`.

    Inside autocast the function is traced a second time. Autocast of a derivative, `autocast(jax.grad(f))`, does not
    find it: write `jax.grad(autocast(f))`.

    Args:
        dtype: a floating dtype or its name. float64 arguments stay float64.

    Raises:
        TypeError, ValueError: `dtype` is not a floating dtype.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> @amp.cast_inputs("bfloat16")
        ... def attention(q, k):
        ...     return q @ k.T
        >>> x = jnp.ones((2, 4))
        >>> attention(x, x).dtype
        dtype('float32')
        >>> report = amp.explain(lambda x: jnp.sum(attention(x, x)), "float16")(x)
        >>> report.select(primitive="dot_general").rows[0].compute
        'bfloat16'
    """
    low = parse_dtype(dtype)

    def decorate(fun: F) -> F:
        @functools.wraps(fun)
        def call(*args: Any, **kwargs: Any) -> Any:
            return _bind(fun, low, args, kwargs)

        return call  # type: ignore[return-value]

    return decorate


def _bind(fun: Callable, low: Any, args: Any, kwargs: Any) -> Any:
    """Calls a function by the primitive. Pickled with `call`, as a part of it, the primitive would lose its rules."""
    arrays, rebuild = jx.split_arrays((args, kwargs))
    rebuild_results: Callable[..., Any]

    def flat(*arrays: Any) -> list[Any]:
        nonlocal rebuild_results
        args, kwargs = rebuild(arrays)
        results, rebuild_results = jx.split_arrays(fun(*args, **kwargs))
        return results

    results = _cast_inputs_p.bind(*arrays, fun=flat, dtype=low)
    return rebuild_results(results)


def _call(avals: Sequence[Any], fun: Callable) -> jx.Call:
    """Returns the structure of a call with arguments of these types."""
    # Only inside `shard_map` do results vary along its axes.
    jaxpr = _traced(fun, (tuple(avals), jax.sharding.get_abstract_mesh()), lambda: jx.trace(fun, avals))
    closed_over = [x for x in jx.open_jaxpr(jaxpr)[1] if isinstance(x, jax.core.Tracer)]
    if closed_over:
        raise ValueError(
            "a function under `cast_inputs` uses a traced array that is not its argument, "
            f"{jax.typeof(closed_over[0])}; pass it as an argument: autocast traces the function a second time, when "
            "that array is gone"
        )
    return jx.Call(jaxpr, range(len(avals)))


_traced = jx.Cache()


def _cast(avals: Sequence[Any], dtype: Any) -> list[Any]:
    """Returns the types of the arguments inside autocast."""
    return [jx.with_dtype(x, dtype) if jx.is_floating(x) and x.dtype != np.float64 else x for x in avals]


def _call_as_traced(avals: Sequence[Any], fun: Callable, dtype: Any) -> jx.Call:
    """Returns the structure of a call in these types, or in those of autocast if the function refuses these.

    JAX's cuDNN attention refuses float32. A program that calls it without autocast gets that error when it runs.
    """
    try:
        return _call(avals, fun)
    except Exception:
        with contextlib.suppress(Exception):
            return _call(_cast(avals, dtype), fun)
        raise


def _batch(args: Sequence[Any], axes: Sequence[Any], *, fun: Callable, dtype: Any) -> tuple[Sequence[Any], list[int]]:
    outs = _cast_inputs_p.bind(*args, fun=jax.vmap(fun, tuple(axes)), dtype=dtype)
    return outs, [0] * len(outs)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, fun: Callable, dtype: Any) -> Any:
    return jax.jvp(fun, list(primals), list(map(ad.instantiate_zeros, tangents)))


def _run(*args: Any, fun: Callable, dtype: Any) -> Any:
    return fun(*args)


_cast_inputs_p.def_impl(_run)
_cast_inputs_p.def_abstract_eval(lambda *avals, **params: _call_as_traced(avals, **params).jaxpr.out_avals)
batching.primitive_batchers[_cast_inputs_p] = _batch
ad.primitive_jvps[_cast_inputs_p] = _jvp
mlir.register_lowering(_cast_inputs_p, mlir.lower_fun(_run, multiple_results=True), cacheable=False)

jx.HIGHER_ORDER[_cast_inputs_p.name] = jx.HigherOrder(
    structure=lambda eqn: _call_as_traced([atom.aval for atom in eqn.invars], **eqn.params),
    structure_low=lambda eqn: _call(_cast([atom.aval for atom in eqn.invars], eqn.params["dtype"]), eqn.params["fun"]),
)


_LOW = re.compile(r"\b(?:bfloat16|bf16|float16|fp16|f16)\b")
_REFUSAL = re.compile(_LOW.pattern + r".*\b(?:got|dtype:) (?:float32|fp32|f32)\b", re.DOTALL)
_OF_SEVERAL = re.compile(r"\b(?:same|equal|identical|match|mismatch|differ|promotion)")  # a program that mixes dtypes


def note_refusal(error: Exception, dtype: Any) -> None:
    """Adds a note that names `cast_inputs` to the error of a kernel that asks for 16 bits and got float32.

    Kernels say so: `Q must be fp16/bf16, got float32`. The text of the error is all that is read: nothing is traced.

    Args:
        error: what tracing a function under autocast raised.
        dtype: the dtype that autocast computes in.
    """
    text = str(error)
    taken = [parse_dtype(found[0]) for found in _LOW.finditer(text)]
    is_noted = "cast_inputs" in " ".join(getattr(error, "__notes__", ()))  # by an autocast inside
    if is_noted or _OF_SEVERAL.search(text) or not _REFUSAL.search(text):
        return
    error.add_note(
        "Inside `autocast` a function is traced in its own dtypes, float32 here; its ops are cast afterwards. For a "
        f'kernel that takes 16 bits only, write `amp.cast_inputs("{dtype if dtype in taken else taken[0]}")(kernel)'
        "(q, k, v)` in place of `kernel(q, k, v)`, or put the decorator over the function that calls it."
    )
