"""Times every kernel beside XLA on the GPU of this machine, and finds for which arguments one is faster."""

import concurrent.futures
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels._measured import KERNELS, Measured, Measurements
from pallas_kernels.finite_check.api import check_finite, unscale_check
from pallas_kernels.quantize.api import quantize

CALLS = 20  # of an op in one program
DTYPES = {16: jnp.bfloat16, 32: jnp.float32}  # by the bits for which they stand
SCALAR = jax.ShapeDtypeStruct((), jnp.float32)


class Case(NamedTuple):
    """Arguments of an op.

    Attributes:
        label: what the table calls them.
        size: the number of leaves, or of elements for an op on one array.
        args: the arguments, with shapes in place of arrays.
    """

    label: str
    size: int
    args: tuple[Any, ...]


class Op(NamedTuple):
    """An op, `call(*args, implementation=)`, and the cases on which it is timed, for a dtype."""

    call: Callable[..., Any]
    cases: Callable[[Any], Iterable[Case]]


def gpt2_small(dtype: Any) -> list[jax.ShapeDtypeStruct]:
    """Returns the shapes of the 148 parameters of GPT-2 small, 124 million values."""
    dim, layers, length, vocab = 768, 12, 1024, 50257
    layer = [shape for n, m in ((1, 3), (1, 1), (1, 4), (4, 1)) for shape in ((n * dim, m * dim), (m * dim,))]
    shapes = [(vocab, dim), (length, dim), *layers * [*layer, *4 * [(dim,)]], (dim,), (dim,)]
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def one_leaf(dtype: Any, nbytes: int) -> list[jax.ShapeDtypeStruct]:
    """Returns the shape of one leaf."""
    return [jax.ShapeDtypeStruct((nbytes // jnp.dtype(dtype).itemsize,), dtype)]


def _trees(dtype: Any) -> Iterable[Case]:
    for label, leaves in (("GPT-2 small", gpt2_small(dtype)), ("256 MiB", one_leaf(dtype, 2**28))):
        yield Case(label, len(leaves), (leaves, SCALAR))


def _matrices(dtype: Any) -> Iterable[Case]:
    """Yields small and large weights, and the activations of a large layer."""
    for rows, columns in ((512, 512), (2048, 2048), (8192, 4096)):
        yield Case(f"{rows} x {columns}", rows * columns, (jax.ShapeDtypeStruct((rows, columns), dtype),))


OPS = {
    "check_finite": Op(check_finite, _trees),
    "unscale_check": Op(unscale_check, _trees),
    "quantize": Op(quantize, _matrices),
    "quantize_blocks": Op(partial(quantize, block=32), _matrices),
}


def tune(
    ops: Mapping[str, Op] = OPS, timer: Callable[[], float] = time.perf_counter, report: Callable[[str], Any] = print
) -> Measurements:
    """Times the ops, and returns which kernel is faster than XLA from which size on.

    A kernel must give XLA's result, and win by more than two timings of XLA differ.

    Args:
        ops: the ops by name.
        timer: the clock, in seconds.
        report: is called with each line of the table.
    """
    report("| op | bits | arguments | by | µs | x as fast as XLA |\n|---|---|---|---|---|---|")
    fastest: dict[str, dict[int, Measured]] = {}
    for (name, op), (bits, dtype) in itertools.product(ops.items(), DTYPES.items()):
        cases = list(op.cases(dtype))
        gains = [_gains(op.call, case, timer, report, f"| {name} | {bits}") for case in cases]
        if measured := choose([case.size for case in cases], gains):
            fastest.setdefault(name, {})[bits] = measured
    return fastest


def choose(sizes: Sequence[int], gains: Sequence[Mapping[str, float]]) -> Measured | None:
    """Returns the kernel that won on the largest arguments, and the least size from which on it always did.

    Args:
        sizes: those of the cases.
        gains: by kernel, how many times as fast as XLA it was in each case, beyond the noise; only those that won.
    """
    order = sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)
    largest = gains[order[0]]
    if not largest:
        return None
    kernel = max(largest, key=largest.__getitem__)
    won = itertools.takewhile(lambda k: kernel in gains[k], order)
    return Measured(kernel, min(sizes[k] for k in won))


LAYER = 8192, 4096, 4096  # tokens, and the features that a layer reads and returns


def in_bfloat16(x: jax.Array, w: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, ...]:
    """Computes a layer and both of its gradients."""
    w = w.astype(x.dtype)
    return x @ w, cotangent @ w.T, jnp.matmul(x.T, cotangent, preferred_element_type=jnp.float32)


def in_mxfp8(x: Any, w: Any, cotangent: Any) -> tuple[jax.Array, ...]:
    """Computes them in blocks of float8, cast by the implementation that was fastest."""

    def product(a: jax.Array, a_scales: jax.Array, b: jax.Array, b_scales: jax.Array, dtype: Any) -> jax.Array:
        return jax.nn.scaled_matmul(a[None], b[None], a_scales[None], b_scales[None], preferred_element_type=dtype)[0]

    dtype, (x, w, cotangent) = x.dtype, (quantize(a, block=32) for a in (x, w, cotangent))
    return (
        product(x.rows, x.row_scales, w.columns, w.column_scales, dtype),
        product(cotangent.rows, cotangent.row_scales, w.rows, w.row_scales, dtype),
        product(x.columns, x.column_scales, cotangent.columns, cotangent.column_scales, jnp.float32),
    )


def mxfp8_pays(timer: Callable[[], float] = time.perf_counter, ways: Sequence[Any] = (in_bfloat16, in_mxfp8)) -> str:
    """Times a layer in bfloat16 and in mxfp8, and returns a sentence that says which dtype to use on this GPU."""
    (tokens, features, results), low = LAYER, jnp.bfloat16
    shapes = ((tokens, features), low), ((features, results), jnp.float32), ((tokens, results), low)
    args = [jax.device_put(_random(jax.ShapeDtypeStruct(*each))) for each in shapes]
    try:
        seconds = [median_seconds(partial(jax.jit(way), *args), timer) for way in ways]
    except Exception as error:  # as in `_gains`
        return f"mxfp8 does not run on this GPU ({_line(error)}): use bfloat16 or float8."
    gain = seconds[0] / seconds[1]
    verdict = "it pays." if gain > 1 else "it does not pay: use bfloat16 or float8."
    return f"A layer of {tokens} x {features} x {results} in mxfp8 is {gain:.2f} x as fast as in bfloat16; {verdict}"


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _gains(call: Callable[..., Any], case: Case, timer: Callable[[], float], report: Any, op: str) -> dict[str, float]:
    """Times the implementations of an op in one case. Returns the gains of the kernels that win."""
    programs = _compile(call, case.args)
    args = jax.device_put(jax.tree.map(_random, case.args))
    expected = jax.tree.map(jnp.copy, programs["xla"].result()(*args))
    seconds = {}
    for by in ("xla", *KERNELS, "xla again"):
        try:
            program = programs[by.removesuffix(" again")].result()
            if not _agree(program(*args), expected):
                raise ValueError("another result than XLA's")
            seconds[by] = median_seconds(partial(program, *args), timer, calls=1) / CALLS
        except Exception as error:  # whatever a compiler or a device says: this kernel is not used
            figures = f"{_line(error)} |"
        else:
            figures = f"{seconds[by] * 1e6:.1f} | {seconds['xla'] / seconds[by]:.2f}"
        report(f"{op} | {case.label} | {by} | {figures} |")
    xla = seconds["xla"], seconds["xla again"]
    enough = min(xla) - (max(xla) - min(xla))
    return {by: min(xla) / seconds[by] for by in KERNELS if seconds.get(by, enough) < enough}


def _compile(call: Callable[..., Any], args: tuple[Any, ...]) -> dict[str, concurrent.futures.Future[Any]]:
    """Compiles an op by each implementation, side by side."""

    def program(by: str) -> Any:
        program, results = repeated(partial(call, implementation=by), args)
        return keep_results(program.lower(results, args).compile(), results)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        return {by: pool.submit(program, by) for by in ("xla", *KERNELS)}


def _random(x: jax.ShapeDtypeStruct) -> np.ndarray:
    """Returns fresh numbers between -0.5 and 0.5."""
    return np.asarray(np.random.default_rng().random(x.shape, np.float32) - np.float32(0.5)).astype(x.dtype)


def _agree(result: Any, expected: Any) -> bool:
    pairs = zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True)
    return all(jnp.allclose(x.astype(jnp.float32), y.astype(jnp.float32), rtol=1e-4, equal_nan=True) for x, y in pairs)


def repeated(call: Callable[..., Any], args: tuple[Any, ...], calls: int = CALLS) -> tuple[Any, Any]:
    """Returns a program that evaluates a call many times, as train steps do: without the host, into the same buffers.

    Called by itself, an op with hundreds of results takes the time that the host needs to create their buffers.

    Args:
        call: an op.
        args: its arguments, arrays or their shapes.
        calls: the number of calls.

    Returns:
        The program, a function of results, which it overwrites, and `args`; and the shapes of the results.
    """

    def program(results: Any, args: Any) -> Any:
        def again(_: Any, results: Any) -> Any:
            now, _ = lax.optimization_barrier((args, results))  # else the compiler moves the call out of the loop
            return call(*now)

        return lax.fori_loop(0, calls, again, results)

    return jax.jit(program, donate_argnums=0), jax.eval_shape(call, *args)


def keep_results(program: Callable[..., Any], shapes: Any) -> Callable[..., Any]:
    """Returns a function of `args` that calls a `repeated` program. Its next call overwrites the results."""
    results = None

    def run(*args: Any) -> Any:
        nonlocal results
        if results is None:
            results = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        results = program(results, args)
        return results

    return run


def median_seconds(
    call: Callable[[], Any],
    timer: Callable[[], float] = time.perf_counter,
    calls: int = 20,
    batches: int = 11,
    wait: Callable[[Any], Any] = jax.block_until_ready,
) -> float:
    """Returns the seconds of a call: the median of batches of calls that are queued back to back.

    One more batch comes first, to warm up.
    """
    times = []
    for _ in range(batches + 1):
        start = timer()
        for _ in range(calls):
            out = call()
        wait(out)
        times.append((timer() - start) / calls)
    return statistics.median(times[1:])
