"""`fastest`: the time, the memory and the error of a gradient under several settings of `autocast`."""

import dataclasses
import functools
import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent import futures
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive

from jmp_amp import _jaxpr as jx
from jmp_amp._autocast import autocast, parse_settings
from jmp_amp._calls import check_concrete, quote, transformation
from jmp_amp._policy import Policy
from jmp_amp.debug import _compare
from jmp_amp.debug._clock import Clock, check_seconds
from jmp_amp.debug._evaluation import FLOAT32, precise
from jmp_amp.debug._report import Content, Report, Table, as_jit_takes, check_without_autocast

_OPTIONS: list[dict[str, str]] = [{}, {"attention": "cudnn"}, {"residual_stream": "low"}]
_OPTIONS.append(_OPTIONS[1] | _OPTIONS[2])  # the plainest are compiled first
SETTINGS = tuple({"dtype": x, **options} for options in _OPTIONS for x in ("bfloat16", "float16", "float8"))
_RUNS, _SECONDS = 20, 2.0  # of one setting, at most


@transformation
def fastest(
    fun: Callable,
    settings: Any = SETTINGS,
    *,
    tolerance: float | None = None,
    max_seconds: float = 600.0,
    **options: Unpack[_compare.GradOptions],
) -> "Callable[..., Timings]":
    """Returns a function that measures a gradient of `fun` under several settings of `autocast`, on your device.

    Use it outside of training, on a batch of the size that you train with, to see what to switch on. Each setting is
    compiled, side by side with the others, and then timed alone: the median of up to 20 runs, each waited for. Memory
    is what the compiler plans. The error is that of the gradient of this batch. A setting with the program of an
    earlier one is left out, and options that change no program are named below the table: float8 on a device without
    such units or in a model without large products, a kernel that is not there.

    Without an accelerator, times would mean nothing: 16 bits are emulated on a CPU. There the table has memory, of the
    program of the CPU, and errors, and is sorted by memory.

    Args:
        fun: the loss function without any mixed precision. It returns a scalar, or `(loss, aux)` with `has_aux`.
        settings: what is measured beside float32: dicts of arguments of `autocast`, or dtypes, or a single one. By
            default bfloat16, float16 and float8, each as it is, with `attention="cudnn"`, with `residual_stream="low"`
            and with both.
        tolerance: the largest error of the gradient that is acceptable, such as 1e-2. The table marks the first,
            which is the fastest, with at most that, and says what to write.
        max_seconds: after so many seconds nothing more is compiled, and what was compiled is timed by one run.
        **options: `loss_scale`, `argnums`, `has_aux` and `transform` of the gradient, as in `amp.debug.compare`.

    Returns:
        A function with the signature of `fun` that returns `Timings`; `print` it.

    Raises:
        TypeError: `fun` is not callable or is already under `autocast`; `autocast` has no such option; there are no
            floating arrays to differentiate with respect to; or the returned function is called inside `jit`.
        ValueError: `tolerance` or `max_seconds` is not positive; `autocast` does not take the value of an option; or
            the loss or the gradients are not finite in float32.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> loss_fn = lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)
        >>> settings = ["float16", {"dtype": "bfloat16", "save": "all"}]
        >>> report = amp.debug.fastest(loss_fn, settings)(jnp.linspace(0, 1, 64).reshape(8, 8), jnp.ones((4, 8)))
        >>> errors = {row.setting: row.error for row in report.rows}
        >>> errors['"float32"'] < errors['"float16"'] < errors['"bfloat16", save="all"'] < 0.05
        True
    """
    check_without_autocast(fun, "fastest", ", and the options of `autocast` as `settings`")
    if isinstance(settings, str | Mapping) or not isinstance(settings, Iterable):
        settings = [settings]
    compared = [dict(x) if isinstance(x, Mapping) else {"dtype": x} for x in ("float32", *settings)]
    programs = [(each, autocast(fun, **each)) for each in compared]
    if tolerance is not None and not tolerance > 0:
        raise ValueError(f"`tolerance` must be positive, got {quote(tolerance)}; 1e-2 allows an error of 1 percent")
    check_seconds(max_seconds)
    loss_scale, grad_options = _compare.parse_grad_options(**options)

    @functools.wraps(fun, updated=())
    def measured(*args: Any, **kwargs: Any) -> Timings:
        check_concrete((args, kwargs), "fastest")
        args, kwargs = as_jit_takes(args, kwargs)
        clock, pool, runs = Clock(max_seconds), futures.ThreadPoolExecutor(), _RUNS * (jax.default_backend() != "cpu")
        texts, same, compiling = set[str](), list[Any](), list[Any]()
        arrays, rebuild = jx.split_arrays((args, kwargs))

        def lower(program: Callable) -> Any:
            run = functools.partial(_compare.loss_and_grads, program, rebuild, **grad_options)
            return jax.jit(run).lower(arrays, jnp.float32(1))

        with precise(FLOAT32):
            reference = pool.submit(lower(fun).compile)  # raises what `fun` raises
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for each, program in programs:
                try:
                    if clock.is_late:
                        raise TimeoutError
                    lowered = lower(program)
                    if (text := lowered.as_text()) in texts:
                        same.append(each)
                        continue
                    texts.add(text)
                    future = pool.submit(lowered.compile)
                except Exception as error:  # a kernel that this device does not have, say
                    future = futures.Future()
                    future.set_exception(error)
                compiling.append((each, future))
            futures.wait([reference, *(x for _, x in compiling)], max(0, max_seconds - clock.seconds))
            pool.shutdown(wait=False, cancel_futures=True)
        listed = {part for each, _ in compiling for part in _written(each)}
        idle = dict.fromkeys(part for each in same for part in _written(each) if part not in listed)
        notes = [f"Not listed, since they change no program: {'; '.join(idle)}."] if idle else []
        notes += dict.fromkeys(str(x.message) for x in caught)
        first, results = _timing(arrays, clock, {}, reference, 1.0, np.empty(0), 0)
        if first.reason:
            notes.append(f"No errors, since the gradient in float32 is not known: {first.reason}.")
        _compare.check_finite(results.values(), "float32")
        exact = _compare.all_grads(results)
        rows = [_timing(arrays, clock, each, x, loss_scale, exact, runs)[0] for each, x in compiling]
        rows.sort(key=lambda x: (bool(x.reason), x.seconds if runs else x.peak_bytes))
        return Timings(tuple(rows), jax.devices()[0].device_kind, bool(runs), tolerance, tuple(notes))

    return measured


def _written(options: Mapping[str, Any]) -> list[str]:
    """Returns options as one writes them in a call: `"float16"` and `attention="cudnn"`."""
    return [f"{name}={_code(x)}".removeprefix("dtype=") for name, x in options.items()]


def _code(x: Any) -> str:
    if isinstance(x, Mapping):
        return f"{{{', '.join(f'{_code(k)}: {_code(value)}' for k, value in x.items())}}}"
    if isinstance(x, Primitive):
        return f"jax.lax.{x.name}_p"
    if isinstance(x, str | Policy | type | np.dtype):
        return f'"{jnp.dtype(x) if isinstance(x, type) else x}"'
    return getattr(x, "__name__", repr(x))


def _timing(
    arrays: list[Any], clock: Clock, options: Any, compiling: Any, scale: float | None, exact: np.ndarray, runs: int
) -> "tuple[Timing, _compare.Arrays]":
    """Runs a program. Returns what it took, and its results; none if there is a reason why it did not run."""
    row, times = Timing(options), list[float]()
    try:
        program = compiling.result(0)
        sizes = program.memory_analysis()
        held = sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
        row = row._replace(peak_bytes=held + sizes.temp_size_in_bytes, temporary_bytes=sizes.temp_size_in_bytes)
        results, scale = _compare.unscaled(program, arrays, scale)
        error = _compare.relative_error(_compare.all_grads(results), exact) if exact.size else math.nan
        while len(times) < runs and (not times or (sum(times) < _SECONDS and not clock.is_late)):
            start = time.perf_counter()
            jax.block_until_ready(program(arrays, jnp.float32(scale)))
            times.append(time.perf_counter() - start)
        return row._replace(seconds=float(np.median(times or [math.nan])), error=error, loss_scale=scale), results
    except (TimeoutError, futures.CancelledError):
        reason = f"not compiled in {clock.max_seconds:g} s"
    except Exception as error:  # whatever a compiler or a device says
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:160]
    return row._replace(reason=reason), {}


class Timing(NamedTuple):
    """What a gradient takes and how exact it is, under one setting of `autocast`.

    Attributes:
        options: the arguments of `autocast`.
        seconds: the time of a gradient, of the loss and of all parameters; NaN if it was not measured.
        peak_bytes: what the compiled program holds at once on each device: arguments, results and temporary memory.
        temporary_bytes: the temporary memory alone, of activations for the most part.
        error: the error of the gradient: the norm of its difference to the gradient in float32, whose products are
            exact to float32, over the norm of that. It is infinite if a value overflows.
        loss_scale: the loss scale.
        reason: why the setting was not measured; empty if it was.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> loss_fn = lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)
        >>> report = amp.debug.fastest(loss_fn, ["float16"])(jnp.ones((8, 8)) / 9, jnp.ones((4, 8)))
        >>> row = next(row for row in report.rows if row.options["dtype"] == "float16")
        >>> row.setting, row.reason, row.temporary_bytes < row.peak_bytes
        ('"float16"', '', True)
    """

    options: dict[str, Any]
    seconds: float = math.nan
    peak_bytes: float = math.nan
    temporary_bytes: float = math.nan
    error: float = math.nan
    loss_scale: float = math.nan
    reason: str = ""

    @property
    def setting(self) -> str:
        """The arguments of `autocast`, as one writes them."""
        return ", ".join(_written(self.options))


@dataclasses.dataclass(frozen=True)
class Timings(Report):
    """What a gradient takes under several settings of `autocast`; `fastest` returns it. `print` shows a table.

    Attributes:
        rows: a `Timing` for each setting, the fastest first, or that with the least memory if nothing was timed;
            settings that were not measured come last.
        device: the name of the device.
        is_timed: whether times were measured: not on a CPU.
        tolerance: the largest acceptable error; None marks no row.
        notes: what is said below the table: options without effect, and warnings of `autocast`.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> loss_fn = lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)
        >>> report = amp.debug.fastest(loss_fn, ["float16"], tolerance=1e-9)(jnp.ones((8, 8)) / 9, jnp.ones((4, 8)))
        >>> len(report.rows), report.tolerance
        (2, 1e-09)
    """

    rows: tuple[Timing, ...]
    device: str
    is_timed: bool
    tolerance: float | None
    notes: tuple[str, ...]

    @property
    def best(self) -> Timing | None:
        """The first row whose error is at most `tolerance`; None if there is none, or no tolerance.

        Write `amp.autocast(loss_fn, **report.best.options)`.
        """
        return next((row for row in self.rows if row.error <= (self.tolerance or -1)), None)

    def _content(self) -> Content:
        base = next((row.seconds for row in self.rows if row.options == {"dtype": "float32"}), math.nan)
        head = "setting", "ms", "x float32", "peak GB", "temporary GB", "gradient error"
        rows, notes = list[tuple[str, ...]]([head]), list[str]()
        for row in self.rows:
            memory = (f"{x / 1e9:.3g}" for x in (row.peak_bytes, row.temporary_bytes))
            figures = f"{1e3 * row.seconds:.2f}", f"{row.seconds / base:.2f}", *memory
            error = row.reason or f"{row.error:.1e}{' *' * (row is self.best)}"
            rows.append((row.setting, *("-" if x == "nan" else x for x in figures), error))
        if self.best:
            notes.append(f"* the first with an error of at most {self.tolerance:g}; write")
            notes.append(f"    loss_fn = amp.autocast(loss_fn, {self.best.setting})")
            if parse_settings(**self.best.options).format.needs_loss_scale:
                notes.append("    tx = amp.dynamic_loss_scale(tx)")
        elif self.tolerance:
            notes.append(f"No setting was found to have an error of at most {self.tolerance:g}.")
        if not self.is_timed:
            notes.append("Times mean nothing without an accelerator; run this on the device that you train on.")
        return f"A gradient on {self.device}", [Table(rows)], [*notes, *self.notes]
