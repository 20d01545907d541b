"""A gradient under autocast, emulated in float32: each rounding is an op, with a switch that is set at run time.

One compiled program computes the gradient of float32 (all switches off), that of low precision (all on), and what each
rounding adds to it, from one reverse pass through the emulation.
"""

import contextlib
import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Literal

from jmp_amp import _jaxpr as jx
from jmp_amp._autocast import AutocastOptions, autocast_with, parse_settings
from jmp_amp._formats import FLOAT32, FORMATS
from jmp_amp._ops import OpClass, ResultKind, rule_of
from jmp_amp._products import FLOAT8_DOT, FLOAT8_RAGGED_DOT, emulated, in_base
from jmp_amp.debug._compare import GradOptions, check_finite, loss_and_grads, parse_grad_options
from jmp_amp.debug._evaluation import QUICK, Evaluation, as_traced, keeps_dtypes
from jmp_amp.debug._explain import flops_of
from jmp_amp.debug._nodes import Id, Place, is_low, reads_low
from jmp_amp.debug._report import as_jit_takes

_LOW = [form.dtype for form in FORMATS.values() if form.is_low]
_COMPILER_OPTIONS: dict[str, Any] = QUICK | jx.versions.WITHOUT_FUSION_EMITTERS
_LARGE = 2**22  # rounded elements; the runs of such a program take longer than no optimization saves
# The kinds of ops whose results are elements of their operands.
_EXACT = {ResultKind.MOVED, ResultKind.TAKEN, ResultKind.CHOSEN, ResultKind.SELECTED, ResultKind.ORDERED}
_FLOAT8 = {FLOAT8_DOT, FLOAT8_RAGGED_DOT}
_POOLING = {"select_and_scatter_add", "select_and_gather_add"}  # they compare what they read second
_SMALL = 2**12  # elements; a program of smaller arrays runs with several random vectors at once


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rounding(jx.Site):
    """A rounding, and what it adds to the error of the gradient; or the sum of several.

    It may also be the decisions of a line: results of comparisons, `argmax`, `top_k` or `round`, in the code or in the
    derivative of `relu`, `max`, `abs` or `clip`. Roundings flip some of them, and what reads them jumps.

    Attributes:
        source: the line of code; for a backward pass, that of the forward pass. In a sum, a text that differs is empty.
        module: the named scopes around it, such as the modules of Flax and Haiku.
        primitive: the op whose result is rounded; `"convert_element_type"` for a cast, `"constant"` for a number in the
            code; for decisions, the ops that make them, such as `"gt"`.
        direction: `"forward"` or `"backward"`.
        dtype: the dtype that it rounds to; empty for decisions.
        runs: how often it runs.
        size: the number of elements that it rounds in all runs, or that decisions decide.
        share: its part of the sum of the squared errors of all roundings.
        error: the norm of the error of the gradient with this rounding alone, over the norm of the gradient. It is NaN,
            and the share too, if values overflow.
        overflows: whether values overflow, so that the gradient is not finite.
        flips: how many of the decisions differ from those of float32.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> loss_fn = lambda w, x: jnp.mean(jax.nn.softmax(x @ w) ** 2)
        >>> budget = amp.debug.error_budget(loss_fn)(jnp.ones((8, 8)) / 9, jnp.ones((4, 8)))
        >>> [(row.primitive, row.dtype) for row in budget.rows if row.direction == "forward"]
        [('convert_element_type', 'float16'), ('convert_element_type', 'float16'), ('dot_general', 'float16')]
    """

    dtype: str
    size: int = 0
    share: float = 0.0
    error: float = 0.0
    overflows: bool = False
    flips: int = 0

    @property
    def decides(self) -> bool:
        """Whether it is not a rounding, but the decisions of a line."""
        return not self.dtype


class Decision(NamedTuple):
    """A decision of a run, which another one may take over.

    Attributes:
        values: what was decided.
        ran: bool[], whether it was decided at all, and not in a branch or an iteration that did not run.
        flips: bool[...], which elements differ from those of the run whose decisions are at hand.
    """

    values: jax.Array
    ran: jax.Array
    flips: jax.Array


def _decisions_of(eqn: JaxprEqn) -> list[int]:
    """Returns the indices of the results of an op that are decisions: those that floating values decide."""
    if keeps_dtypes(eqn) or not any(map(jx.is_inexact, eqn.invars)):
        return []
    is_step = rule_of(eqn).kind is ResultKind.ROUNDED or eqn.primitive.name == "sign"
    outs = enumerate(map(jx.dtype_of, eqn.outvars))
    return [i for i, x in outs if is_step or (isinstance(x, np.dtype) and x.kind in "biu")]


@functools.cache
def _cast_to(dtype: Any) -> Callable[[jax.Array], jax.Array]:
    """Returns a function that rounds float32 to a dtype, and returns float32."""
    if dtype == jnp.bfloat16:
        return lambda x: lax.reduce_precision(x, 8, 7)  # in one loop with other ops, as two casts would not be
    return lambda x: x.astype(dtype).astype(FLOAT32)


_traced_once = functools.partial(jax.jit, static_argnums=0, inline=jx.versions.INLINE)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
@_traced_once
def _rounded(low: Callable[..., jax.Array], x: jax.Array, on: jax.Array, squares: jax.Array, *args: Any) -> jax.Array:
    """Returns `low(x, *args)`, the rounded value of `x`, if the switch is 1."""
    return lax.select(on == 1, low(x, *args), x)


def _rounded_forward(low: Callable[..., jax.Array], x: jax.Array, on: Any, squares: Any, *args: Any) -> tuple[Any, Any]:
    return _rounded(low, x, on, squares, *args), (x, on, args)


@_traced_once
def _rounded_backward(low: Callable[..., jax.Array], kept: Any, adjoint: jax.Array) -> tuple[Any, ...]:
    # Not derivatives in the switches: the sum of what the elements add, and the sum of its squares. They are not finite
    # if an element overflows; unless the switch is 2, one that the gradient depends on.
    x, on, args = kept
    adjoint = lax.optimization_barrier(adjoint)  # so that XLA does not compute it again in each op that reads it
    counts = lax.is_finite(x) & ((adjoint != 0) | (on == 2))
    parts = lax.select(counts, adjoint * (low(x, *args) - x), lax.full_like(x, 0))
    zero = jnp.float32(0)
    add = functools.partial(jax.tree.map, operator.add)
    sums = lax.reduce((parts, parts * parts), (zero, zero), add, range(parts.ndim))  # in one loop
    return adjoint, *sums, *(None for _ in args)


_rounded.defvjp(_rounded_forward, _rounded_backward)


class EmulationOptions(AutocastOptions, GradOptions, total=False):
    """The options of autocast, and of the gradient."""


def split_options(options: EmulationOptions) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the options of autocast, and those of the gradient."""
    others: dict[str, Any] = {**options}
    of_gradient = {name: others.pop(name) for name in GradOptions.__optional_keys__ & options.keys()}
    return others, of_gradient


class Emulation:
    """The gradient of `fun` under autocast in float32, with its roundings as switches.

    Attributes:
        loss_scale: that of the options.
        opaque: the ops that run as they were traced, so that the roundings in them are not seen.
        rows: the roundings, in program order.
        default: float32[n], the switches of autocast: 1 for each value that it rounds.
        work: int[n,2], the floating-point operations and the elements that an op computes; 0 for casts and numbers.
        lines: the lines of the user's code that compute the rounded values, and those that call them.
    """

    def __init__(
        self, fun: Callable, args: Any, kwargs: Any, options: Mapping[str, Any], grad_options: Mapping[str, Any]
    ) -> None:
        """Traces the program; it is compiled when it is first run.

        Args:
            fun: the loss function without autocast.
            args: its positional arguments.
            kwargs: its keyword arguments.
            options: those of `autocast`.
            grad_options: those of the gradient.
        """
        self.loss_scale, grad_options = parse_grad_options(**grad_options)
        self.rows: list[Rounding] = []
        self._places: list[Place] = []  # of the first op of each row
        self._found: dict[Any, int] = {}  # of the row of each rounding
        self._decided_by: dict[Id, int] = {}  # the number of the row of each decision
        self.opaque = dict[str, None]()
        self._arrays, rebuild = jx.split_arrays(as_jit_takes(args, kwargs))
        settings = parse_settings(**{**options, "save": "all"})
        settings = settings._replace(options=settings.options._replace(keeps_checkpoints=False))

        def gradient(fun: Callable, arrays: Sequence[Any], scale: jax.Array) -> list[Any]:
            loss, grads = loss_and_grads(fun, rebuild, arrays, scale, **grad_options)
            return [loss, *filter(jx.is_floating, jax.tree.leaves(grads))]

        with emulated():
            functions = (functools.partial(gradient, f) for f in (fun, autocast_with(fun, settings)))
            programs = (jax.make_jaxpr(f)(self._arrays, jnp.float32(1)) for f in functions)
            exact, self._program = map(jx.versions.without_dead_code, programs)
        self._size = sum(x.size for x in self._program.out_avals[1:])
        # Autocast rounds the numbers in a program as it traces. What they were is known from what they became.
        atoms = [atom for *_, eqn in jx.equations_in(exact) for atom in eqn.invars]
        numbers = [np.asarray(x.val) for x in atoms if isinstance(x, Literal) and jx.dtype_of(x) == FLOAT32]
        with np.errstate(over="ignore"):
            self._numbers = {(dtype, float(x.astype(dtype))): float(x) for x in numbers for dtype in _LOW}
        equations = [eqn for *_, eqn in jx.equations_in(self._program)]
        largest = max([1, self._size, *(math.prod(jx.shape_of(x) or ()) for eqn in equations for x in eqn.outvars)])
        self._count = min(self._size, max(_SMALL // largest, 1))
        most = sum(len(eqn.invars) + len(eqn.outvars) for eqn in equations)  # switches; the trace tells how many
        on = jax.ShapeDtypeStruct((most,), FLOAT32)
        _, (_, self._decisions) = jax.eval_shape(self._gradient, (on, on), self._arrays, jnp.float32(1))
        self.default = np.array([not row.decides for row in self.rows], np.float32)
        flops = [row.runs * flops_of(place.eqn) for row, place in zip(self.rows, self._places, strict=True)]
        is_op = np.array([row.primitive not in ("convert_element_type", "constant") for row in self.rows], bool)
        self.work = np.array([flops, [row.size for row in self.rows]]).T * is_op[:, None]
        lines = [*map(lines_of, self._places)]
        self.lines = [each - frozenset.intersection(*lines) for each in lines]  # without those that call the program

    def _gradient(self, on: Sequence[Any], arrays: Sequence[Any], scale: jax.Array, decisions: Any = ()) -> Any:
        """Returns all gradients in one array, the loss and its decisions, given both kinds of switches and others."""
        self._switches = [lax.split(each, (1,) * len(each)) for each in on]
        as_one, others = {"while", "shard_map"}, dict(decisions)
        self._evaluation = Evaluation(self._program, [*arrays, scale], FLOAT32, self._around, as_one, others)
        loss, *grads = self._evaluation.run().results
        del self._switches
        return lax.concatenate([jnp.ravel(g) for g in grads], 0) / scale, (loss, self._evaluation.recorded)

    @functools.cached_property
    def _run(self) -> Callable[..., Any]:
        """The compiled program."""

        def run(on: jax.Array, arrays: Sequence[Any], scale: jax.Array, vectors: jax.Array, decisions: Any) -> Any:
            def gradient(*on: jax.Array) -> Any:
                return self._gradient(on, arrays, scale, decisions)

            grads, pull, (loss, recorded) = jax.vjp(gradient, on, on, has_aux=True)
            # So that no square overflows or underflows:
            largest = jnp.max(jnp.abs(grads), initial=0)
            largest = lax.select(largest > 0, largest, jnp.ones_like(largest))
            return jnp.where(jnp.isfinite(loss), grads, jnp.nan), largest, jax.vmap(pull)(vectors / largest), recorded

        on, vectors = (jax.ShapeDtypeStruct(x, FLOAT32) for x in (self.default.shape, (self._count, self._size)))
        inputs = on, self._arrays, jnp.float32(1), vectors, self._decisions
        level = {"xla_backend_optimization_level": int(sum(row.size for row in self.rows) > _LARGE)}
        return jax.jit(run).lower(*inputs).compile(_COMPILER_OPTIONS | level)

    def __call__(self, on: np.ndarray, scale: float, seed: int = 0, decisions: Any = None) -> "Probe":
        """Runs the program with switches: 1 rounds, and 2 rounds nothing, but says where a value would overflow.

        Args:
            on: the switches.
            scale: multiplies the loss.
            seed: of the random vectors.
            decisions: those of another run, `Probe.decisions`, with which the results of this one are compared, and
                which the switches of decisions turn on.
        """
        normal = np.random.default_rng(seed).standard_normal((self._size, self._count), np.float32)
        # Orthogonal: with as many as there are gradients, the mean is exact.
        vectors = np.linalg.qr(normal)[0].T * self._size**0.5
        decisions = decisions or jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self._decisions)
        *results, decided = self._run(on.astype(np.float32), self._arrays, jnp.float32(scale), vectors, decisions)
        grads, size, signed, squares = (np.asarray(x, np.float64) for x in jax.tree.leaves(jax.device_get(results)))
        flips = np.zeros(len(self.rows), int)
        for key, x in decided.items():
            flips[self._decided_by[key]] += int(np.sum(x.flips))
        with np.errstate(invalid="ignore"):  # NaN if the gradient is not finite
            signed, squares = (np.mean(x, 0) * size**2 for x in (signed**2, squares))
            vectors = self._count * self._size / (self._size + 1 - self._count)
            return Probe(grads, signed, squares, vectors, decided, flips)

    def exact(self, scale: float = 1.0, seed: int = 0, decisions: Any = None) -> "Probe":
        """Runs the program without roundings, but for those in `opaque` ops; raises ValueError if it is not finite."""
        run = self(0 * self.default, scale, seed, decisions)
        if self.opaque and not run.is_finite:
            raise ValueError(
                f"the gradient is not finite; {', '.join(self.opaque)} ran in low precision, since it cannot be seen "
                "into; find the cause with "
                "`amp.debug.first_nonfinite(jax.value_and_grad(amp.autocast(fun, dtype)))(*args)`"
            )
        check_finite([run.grads], "float32")
        return run

    def _round(self, x: Any, to: Any, place: Place, index: int, low: Any = None, args: Sequence[Any] = ()) -> Any:
        """Returns `x`, rounded to a dtype if its switch is on: by a cast, or to `low(x, *args)`.

        Args:
            x: the value.
            to: the dtype.
            place: the op that computes or reads the value.
            index: the index of the result; negative for a number that the op reads.
            low: computes the rounded value.
            args: its other arguments.
        """
        name = "constant" if index < 0 else place.eqn.primitive.name
        row = _row(place, name, jnp.dtype(to).name, math.prod(jnp.shape(x)))
        number = self._number_of((*place.key, index), row, place)
        on, squares = (lax.squeeze(switches[number], (0,)) for switches in self._switches)
        return _rounded(low or _cast_to(jnp.dtype(to)), x, on, squares, *args)

    def _number_of(self, key: Any, row: Rounding, place: Place) -> int:
        """Returns the number of the row with a key, which is added if its key is new: each trace finds the same."""
        if key not in self._found:
            self._found[key] = len(self.rows)
            self.rows.append(row)
            self._places.append(place)
        return self._found[key]

    def _decided(self, x: Any, place: Place, index: int, result: Callable = lambda x: x) -> jax.Array:
        """Returns the result of a decision; with that of the other run, if there is one and its switch is on."""
        key, row = (*place.key, index), _row(place, place.eqn.primitive.name, "")
        number, own = self._number_of((row.module, row.source), row, place), result(x)
        none = Decision(x, jnp.bool_(False), jnp.bool_(False))  # in the first trace, there is no other run
        other = self._evaluation.replayed.get(key, none)
        if key not in self._decided_by:  # it is traced several times
            self._decided_by[key], total = number, self.rows[number]
            names = ", ".join(dict.fromkeys([*total.primitive.split(", "), row.primitive]))
            self.rows[number] = dataclasses.replace(total, primitive=names, size=total.size + row.runs * own.size)
        on, others = lax.squeeze(self._switches[0][number], (0,)), lax.stop_gradient(result(other.values))
        self._evaluation.recorded[key] = Decision(x, jnp.bool_(True), (own != others) & other.ran)
        return lax.select((on != 0) & other.ran, others, own)

    def _around(self, place: Place, operands: Sequence[Any], compute: Callable[..., Sequence[Any]]) -> Sequence[Any]:
        """Evaluates an op in float32, and rounds its results."""
        eqn, rule, name = place.eqn, rule_of(place.eqn), place.eqn.primitive.name
        if name == "stop_gradient":  # errors pass through it
            return operands
        if name == "reduce_precision":  # `jax.checkpoint` rounds what is low already
            return operands if is_low(eqn.invars[0]) else jx.bind(eqn, operands)
        operands = [self._operand(place, i, x) for i, x in enumerate(operands)]
        if name in _FLOAT8:

            def low(_: Any, *args: Any) -> jax.Array:
                return jx.bind(eqn, as_traced(eqn, args))[0].astype(FLOAT32)

            exact = in_base(*operands, **eqn.params | {"base": FLOAT32, "preferred_element_type": FLOAT32})
            return [self._round(exact, eqn.params["operands"][0], place, 0, low, operands)]
        if keeps_dtypes(eqn):
            return self._opaque(place, operands, compute)
        if name in _POOLING:
            return [self._decided(operands[1], place, 1, lambda x: compute([operands[0], x])[0])]
        outs = list(compute(operands))
        for i in _decisions_of(eqn):
            outs[i] = self._decided(outs[i], place, i)
        # A sum by scatter is `CHOSEN` and in float32; what reads nothing is a placeholder.
        is_exact = rule.kind in _EXACT and rule.op_class is not OpClass.FULL and not rule.is_cast
        if is_exact or not operands:
            return outs
        for i, var in enumerate(eqn.outvars):
            if is_low(var) and not (rule.is_cast and jx.dtype_of(eqn.invars[0]) == jx.dtype_of(var)):
                outs[i] = self._round(outs[i], jx.dtype_of(var), place, i)
        return outs

    def _operand(self, place: Place, i: int, x: Any) -> Any:
        """Returns an operand; a number in the program in float32, with its rounding."""
        atom = place.eqn.invars[i]
        if not (isinstance(atom, Literal) and is_low(atom)):
            return x
        dtype, low = jx.dtype_of(atom), float(atom.val)
        exact = self._numbers.get((dtype, low), low)
        return x if exact == low else self._round(jnp.float32(exact), dtype, place, -1 - i)

    def _opaque(self, place: Place, args: Sequence[Any], compute: Callable[..., Sequence[Any]]) -> Sequence[Any]:
        """Runs an op in its own dtypes; an error of its operands passes through if JAX can differentiate it."""
        is_rounded = any(map(is_low, (*place.eqn.invars, *place.eqn.outvars)))
        if is_rounded or any(map(reads_low, jx.inner_jaxprs(place.eqn))):
            self.opaque[f"{place.eqn.primitive.name} {place.site.where}"] = None
        if place.eqn.primitive.name != "while":  # has no derivative in reverse, which JAX says too late
            with contextlib.suppress(Exception):  # what has no derivative raises any error
                return jax.vjp(lambda *args: compute(args), *args)[0]
        return compute([lax.stop_gradient(x) if jx.is_floating(x) else x for x in args])


def lines_of(place: Place) -> frozenset[jx.Frame]:
    """Returns the lines of the user's code that compute an op, and those that call them."""
    # What JAX traced once for all its callers has the lines of the first.
    frames = [frame for i, eqn in enumerate(place.eqns) for frame in jx.frames_of(eqn, 1 if i else 100)]
    return frozenset(frame for frame in frames if not frame.is_of_library)


def _row(place: Place, primitive: str, dtype: str, size: int = 0) -> Rounding:
    """Returns the row of an op, each run of which rounds an array of a size."""
    site = dataclasses.replace(jx.Site.at(place.eqns), primitive=primitive)
    return Rounding(**vars(site), dtype=dtype, size=site.runs * size)


class Probe(NamedTuple):
    """A run of an `Emulation`.

    Attributes:
        grads: float64[size], all gradients; NaN if the loss is not finite.
        signed: float64[n], the mean square of what each rounding adds to the gradient times a random vector.
        squares: float64[n], the mean sum of the squares of what its elements add; not finite if one overflows.
        vectors: how many independent vectors have as much noise.
        decisions: the decisions of this run.
        flips: int[n], how many elements of the results of decisions differ with those of the other run.
    """

    grads: np.ndarray
    signed: np.ndarray
    squares: np.ndarray
    vectors: float
    decisions: Any
    flips: np.ndarray

    @property
    def is_finite(self) -> bool:
        """Whether the loss and the gradient are finite."""
        return bool(np.isfinite(self.grads).all())
