"""A gradient under autocast, emulated in float32: each rounding is an op, with a switch that is set at run time.

One compiled program computes the gradient of float32 (all switches off), that of low precision (all on), and what each
rounding adds to it, from one reverse pass through the emulation.
"""

import functools
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Literal

from jmp_amp import _jaxpr as jx
from jmp_amp._autocast import OpClass, ResultKind, autocast_with, flops_of, parse_settings, rule_of
from jmp_amp._float8 import PRIMITIVE, RAGGED_PRIMITIVE, emulated, in_base
from jmp_amp._formats import FLOAT32, FORMATS
from jmp_amp._loss_scale import value_and_grad
from jmp_amp.debug._compare import NO_GRADIENTS
from jmp_amp.debug._evaluation import QUICK, Evaluator, Tape, keeps_dtypes
from jmp_amp.debug._nodes import Id, Place, is_low
from jmp_amp.debug._report import location_of

_LOW = [form.dtype for form in FORMATS.values() if form.is_low]
# A run takes longer than to compile without any optimization saves.
_COMPILER_OPTIONS: dict[str, Any] = QUICK | {"xla_backend_optimization_level": 1} | jx.versions.WITHOUT_FUSION_EMITTERS
_EXACT = {"name", "copy", "optimization_barrier"}  # besides the ops that `RULES` says to move values
_EXACT |= {"sort", "top_k", "cummax", "cummin", "reduce_window_max", "reduce_window_min"}
_MOVES = {ResultKind.MOVED, ResultKind.TAKEN, ResultKind.CHOSEN, ResultKind.SELECTED}
_FLOAT8 = {PRIMITIVE, RAGGED_PRIMITIVE}
_STEPS = {"sign", "floor", "ceil", "round"}  # their results are decisions
_POOLING = {"select_and_scatter_add", "select_and_gather_add"}  # they compare what they read second
_SMALL = 2**12  # elements; a program of smaller arrays runs with several random vectors at once


class Rounding(NamedTuple):
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
        flips: how many elements that read decisions differ, since the roundings change these.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> loss_fn = lambda w, x: jnp.mean(jax.nn.softmax(x @ w) ** 2)
        >>> budget = amp.debug.error_budget(loss_fn)(jnp.ones((8, 8)) / 9, jnp.ones((4, 8)))
        >>> [(row.primitive, row.dtype) for row in budget.rows if row.direction == "forward"]
        [('convert_element_type', 'float16'), ('convert_element_type', 'float16'), ('dot_general', 'float16')]
    """

    source: str
    module: str
    primitive: str
    direction: str
    dtype: str
    runs: int
    size: int
    share: float = 0.0
    error: float = 0.0
    overflows: bool = False
    flips: int = 0

    @property
    def decides(self) -> bool:
        """Whether it is not a rounding, but the decisions of a line."""
        return not self.dtype


class _Equation(NamedTuple):
    """An equation, as a dataflow analysis reads it."""

    eqn: JaxprEqn
    enters: Any
    op: None = None


class _Decisions(jx.Forward[_Equation, bool]):
    """Finds the decisions: integers and flags that floating arguments decide.

    Attributes:
        read: the indices of the operands that decide a floating result, by the id of the equation; none of a step.
    """

    bottom = False

    def __init__(self, program: Any) -> None:
        super().__init__(lambda jaxpr: [_Equation(eqn, jx.structure_of(eqn)) for eqn in jaxpr.eqns])
        self.read = defaultdict[int, set[int]](set)
        self.find(program, [jx.is_inexact(var) for var in jx.open_jaxpr(program)[0].invars])

    def join(self, a: bool, b: bool) -> bool:
        return a or b

    def constants(self, jaxpr: Any, consts: Sequence[Any]) -> Sequence[bool]:
        return [jx.is_inexact(x) for x in consts]

    def transfer(self, equation: _Equation, operands: Sequence[bool]) -> Sequence[bool]:
        eqn, name = equation.eqn, equation.eqn.primitive.name
        found = {i for i, x in enumerate(eqn.invars) if operands[i] and not jx.is_inexact(x)}
        found |= {1} if name in _POOLING else set()
        if (found and any(map(jx.is_floating, eqn.outvars))) or (name in _STEPS and operands[0]):
            self.read[id(eqn)] |= found
        return [any(operands)] * len(eqn.outvars)


def _replayed(_: jax.Array, other: jax.Array) -> jax.Array:
    """Returns a result with the decisions of another run, which takes the place of a rounded value."""
    return other


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
    """Returns `low(x, *args)`, the rounded value of `x`, if the switch is on; at 2, it keeps what would overflow."""
    y = low(x, *args)
    return lax.select((on == 0) | ((on == 2) & ~jnp.isfinite(y)), x, y)


def _rounded_forward(low: Callable[..., jax.Array], x: jax.Array, on: Any, squares: Any, *args: Any) -> tuple[Any, Any]:
    return _rounded(low, x, on, squares, *args), (x, on, args)


@_traced_once
def _rounded_backward(low: Callable[..., jax.Array], kept: Any, adjoint: jax.Array) -> tuple[Any, ...]:
    # Not derivatives in the switches: the sum of what the elements add, and the sum of its squares. They are not finite
    # if an element overflows; unless the switch is 2, one that the gradient depends on.
    x, on, args = kept
    is_zero = ~jnp.isfinite(x) | ((adjoint == 0) & (on != 2))
    parts = lax.select(is_zero, lax.full_like(x, 0), adjoint * (low(x, *args) - x))
    zero = jnp.float32(0)
    add = functools.partial(jax.tree.map, operator.add)
    sums = lax.reduce((parts, parts * parts), (zero, zero), add, range(parts.ndim))  # in one loop
    return adjoint, *sums, *(None for _ in args)


_rounded.defvjp(_rounded_forward, _rounded_backward)


class Emulation:
    """The gradient of `fun` under autocast in float32, with its roundings as switches.

    Attributes:
        opaque: the ops that run as they were traced, so that the roundings in them are not seen.
    """

    def __init__(
        self,
        fun: Callable,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        options: Mapping[str, Any],
        grad_options: Mapping[str, Any],
        rounds_float32: bool = False,
    ) -> None:
        """Traces the program; it is compiled when it is first run.

        Args:
            fun: the loss function without autocast.
            args: its positional arguments.
            kwargs: its keyword arguments.
            options: those of `autocast`.
            grad_options: those of `amp.value_and_grad`.
            rounds_float32: whether results that autocast keeps in float32 have switches, too, which are off.
        """
        self._found: dict[Any, _Switch] = {}
        self._trips: dict[Any, int] = {}  # of each `while`, the most iterations
        self._origins: dict[int, tuple[Place, Any]] = {}  # the op that made a decision, and the decision, by its id
        self._flips: dict[Id, int] = {}  # the number of the row that a recorded count belongs to
        self.opaque = dict[str, None]()
        self._arrays, rebuild = jx.split_arrays(jx.as_jit_takes(fun, args, kwargs, if_needed=True))
        settings = parse_settings(**{**options, "save": "all"})
        settings = settings._replace(options=settings.options._replace(keeps_checkpoints=False))
        self._lowered = settings.format.dtype if rounds_float32 else None

        def gradient(fun: Callable, arrays: Sequence[Any], scale: jax.Array) -> list[Any]:
            args, kwargs = rebuild(arrays)
            value, grads = value_and_grad(fun, loss_scale=scale, **grad_options)(*args, **kwargs)
            loss = value[0] if grad_options["has_aux"] else value
            return [loss, *(g for g in jax.tree.leaves(grads) if jx.is_floating(g))]

        with emulated():
            exact, self._program = (
                jx.versions.without_dead_code(
                    jax.make_jaxpr(functools.partial(gradient, f))(self._arrays, jnp.float32(1))
                )
                for f in (fun, autocast_with(fun, settings))
            )
        self._size = sum(x.size for x in self._program.out_avals[1:])
        if not self._program.out_avals[1:]:
            raise TypeError(NO_GRADIENTS)
        # Autocast rounds the numbers in a program as it traces. What they were is known from what they became.
        atoms = [atom for eqn, _ in jx.equations_in(exact, jx.Provenance()) for atom in eqn.invars]
        numbers = [np.asarray(x.val) for x in atoms if isinstance(x, Literal) and jx.dtype_of(x) == FLOAT32]
        with np.errstate(over="ignore"):
            self._numbers = {(dtype, float(x.astype(dtype))): float(x) for x in numbers for dtype in _LOW}
        self._decisions, self._tape = _Decisions(self._program).read, Tape()
        equations = [eqn for eqn, _ in jx.equations_in(self._program, jx.Provenance())]
        largest = max([1, self._size, *(math.prod(jx.shape_of(x) or ()) for eqn in equations for x in eqn.outvars)])
        self._count = min(self._size, max(_SMALL // largest, 1))
        self._most = 1  # switches
        for eqn in equations:
            all_floating = rounds_float32 or eqn.primitive.name in _FLOAT8
            self._most += sum(map(jx.is_floating if all_floating else _is_low, eqn.outvars))
            self._most += len(eqn.outvars) * (id(eqn) in self._decisions)
            self._most += sum(isinstance(x, Literal) and _is_low(x) for x in eqn.invars)
        self._example = jax.ShapeDtypeStruct((self._most,), FLOAT32), self._arrays, jnp.float32(1)

    def _gradient(
        self, on: Sequence[Any], arrays: Sequence[Any], scale: jax.Array, decisions: Any = (), **counts: Any
    ) -> Any:
        """Returns all gradients in one array, the loss and its decisions, given both kinds of switches and others."""
        self._switches = [lax.split(each, (1,) * self._most) for each in on]
        self._tape = Tape(replayed=dict(decisions))
        self._origins.clear()
        self._flips.clear()
        evaluator = Evaluator(
            self._program, [*arrays, scale], wide=FLOAT32, around=self._around, tape=self._tape, **counts
        )
        loss, *grads = [x.value for x in evaluator.run().results]
        del self._switches
        self._origins.clear()
        return lax.concatenate([jnp.ravel(g) for g in grads], 0) / scale, (loss, self._tape.recorded)

    @functools.cached_property
    def _run(self) -> Callable[..., Any]:
        """The compiled program."""

        def run(on: jax.Array, arrays: Sequence[Any], scale: jax.Array, vectors: jax.Array, decisions: Any) -> Any:
            def gradient(*on: jax.Array) -> Any:
                return self._gradient(on, arrays, scale, decisions, trip_counts=self._trips)

            grads, pull, (loss, recorded) = jax.vjp(gradient, on, on, has_aux=True)
            # So that no square overflows or underflows:
            largest = jnp.max(jnp.abs(grads), initial=0)
            largest = lax.select(largest > 0, largest, jnp.ones_like(largest))
            return jnp.where(jnp.isfinite(loss), grads, jnp.nan), largest, jax.vmap(pull)(vectors / largest), recorded

        if jx.holds(self._program, lambda primitive, *_, **params: primitive.name == "while"):

            @functools.partial(jax.jit, compiler_options=_COMPILER_OPTIONS)
            def count(on: jax.Array, *args: Any) -> Any:
                return self._gradient((on, on), *args, counted=self._trips)

            jax.block_until_ready([count(jnp.full(self._most, on), *self._example[1:]) for on in (0.0, 1.0)])
            jax.effects_barrier()
        vectors = jax.ShapeDtypeStruct((self._count, self._size), FLOAT32)
        recorded: dict[Id, Any] = {}
        if self._decisions:
            recorded = jax.eval_shape(lambda on, *args: self._gradient((on, on), *args)[1][1], *self._example)
        self._undecided = {key: jnp.zeros(x.shape, x.dtype) for key, x in recorded.items()}
        self._found.clear()
        return jax.jit(run).lower(*self._example, vectors, recorded).compile(_COMPILER_OPTIONS)

    def trace(self) -> list[Rounding]:
        """Returns the roundings without compiling; a `while` counts as one iteration."""
        jax.eval_shape(lambda on, *args: self._gradient((on, on), *args), *self._example)
        return [x.row for x in self._found.values()]

    @functools.cached_property
    def rows(self) -> list[Rounding]:
        """The roundings, in program order."""
        _ = self._run
        return [x.row for x in self._found.values()]

    @functools.cached_property
    def work(self) -> np.ndarray:
        """int[n,2], the floating-point operations and the elements that an op computes; 0 for casts and numbers."""
        found = [(x, x.row.primitive not in ("convert_element_type", "constant", "")) for x in self._found.values()]
        return np.array([[x.flops * is_op, x.row.size * is_op] for x, is_op in found]).reshape(-1, 2)

    @functools.cached_property
    def lines(self) -> list[frozenset[str]]:
        """The lines of the user's code that compute the rounded values, and those that call them."""
        found = [x.lines for x in self._found.values()]
        return [lines - frozenset.intersection(*found) for lines in found]  # without those that call the program

    @functools.cached_property
    def default(self) -> np.ndarray:
        """float32[n], the switches of autocast: 1 for each value that it rounds."""
        _ = self._run
        return np.array([x.is_on for x in self._found.values()], np.float32)

    def __call__(self, on: np.ndarray, scale: float, seed: int = 0, decisions: Any = None) -> "Probe":
        """Runs the program with switches: 0 rounds nothing, 1 rounds, and 2 rounds what does not overflow.

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
        switches = np.zeros(self._most, np.float32)
        switches[: len(on)] = on
        run, decisions = self._run, decisions or self._undecided
        *results, recorded = run(switches, self._arrays, jnp.float32(scale), vectors, decisions)
        grads, size, signed, squares = (np.asarray(x, np.float64) for x in jax.tree.leaves(jax.device_get(results)))
        flips = np.zeros(len(self._found), int)
        for key, number in self._flips.items():
            flips[number] += int(np.sum(recorded[key]))
        decisions = {key: recorded[key] for key in decisions}
        with np.errstate(invalid="ignore"):  # NaN if the gradient is not finite
            signed, squares = (np.mean(x, 0)[: len(on)] * size**2 for x in (signed**2, squares))
            vectors = self._count * self._size / (self._size + 1 - self._count)
            return Probe(grads, signed, squares, vectors, decisions, flips)

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
        is_low = index < 0 or low is not None or _is_low(place.eqn.outvars[index])
        row = _row(place, name, jnp.dtype(to).name)._replace(size=place.times * math.prod(jnp.shape(x)))
        return self._switched(x, (*place.key, index), place, row, is_low, low or _cast_to(jnp.dtype(to)), args)

    def _switched(
        self, x: Any, key: Any, place: Place, row: Rounding, is_on: bool, low: Any, args: Sequence[Any]
    ) -> Any:
        """Returns `x`, or `low(x, *args)` if the switch of a row is on; rows with one key have one switch."""
        new = _Switch(len(self._found), row, is_on, place.times * flops_of(place.eqn), _lines(place))
        number = self._found.setdefault(key, new).number
        on, squares = (lax.squeeze(switches[number], (0,)) for switches in self._switches)
        return _rounded(low, x, on, squares, *args)

    def _decided(self, place: Place, operands: Sequence[Any], outs: list[Any], compute: Callable[..., Any]) -> None:
        """Replaces the results of an op by those with the decisions of the other run, if the switch is on."""
        read = self._decisions[id(place.eqn)]
        decisions = {(*place.key, i): operands[i] for i in read} or {(*place.key, i): x for i, x in enumerate(outs)}
        self._tape.recorded.update(decisions)
        if not decisions.keys() <= self._tape.replayed.keys():
            return
        other = [self._tape.replayed.get((*place.key, i), x) for i, x in enumerate(operands)]
        others = compute(other) if read else [self._tape.replayed[key] for key in decisions]
        origin, _ = next((self._origins[id(operands[i])] for i in read if id(operands[i]) in self._origins), (place, 0))
        row = _row(origin, origin.eqn.primitive.name, "")
        for i, y in enumerate(map(lax.stop_gradient, others)):
            if jx.is_floating(y):
                key, count = (row.module, row.source), (*place.key, i, 0)
                self._tape.recorded[count] = jnp.sum(y != outs[i], dtype=np.int32)
                outs[i] = self._switched(outs[i], key, origin, row, False, _replayed, [y])
                switch = self._found[key]
                if count not in self._flips:  # a body may be traced twice
                    names = ", ".join(dict.fromkeys([*switch.row.primitive.split(", "), row.primitive]))
                    total = switch.row._replace(primitive=names, size=switch.row.size + place.times * y.size)
                    self._found[key] = switch._replace(row=total)
                self._flips[count] = switch.number

    def _around(self, place: Place, operands: Sequence[Any], compute: Callable[..., Sequence[Any]]) -> Sequence[Any]:
        """Evaluates an op in float32, and rounds its results."""
        eqn, rule, name = place.eqn, rule_of(place.eqn), place.eqn.primitive.name
        if name == "stop_gradient":  # errors pass through it
            return operands
        if name == "reduce_precision":  # `jax.checkpoint` rounds what is low already
            return operands if _is_low(eqn.invars[0]) else jx.bind(eqn, operands)
        operands = [self._exact(place, i, x) for i, x in enumerate(operands)]
        if name in _FLOAT8:

            def low(_: Any, *args: Any) -> jax.Array:
                return jx.bind(eqn, _as_traced(eqn, args))[0].astype(FLOAT32)

            exact = in_base(*operands, **eqn.params | {"base": FLOAT32, "preferred_element_type": FLOAT32})
            return [self._round(exact, eqn.params["operands"][0], place, 0, low, operands)]
        if keeps_dtypes(eqn):
            return self._opaque(place, operands, compute)
        outs = list(compute(operands))
        if id(eqn) in self._decisions:
            self._decided(place, operands, outs, compute)
        origin = next((self._origins[id(x)][0] for x in operands if id(x) in self._origins), place)
        if origin is not place or any(map(jx.is_floating, operands)):
            self._origins.update({id(x): (origin, x) for x in outs if not jx.is_inexact(x)})
        # A sum by scatter is `CHOSEN` and in float32; what reads nothing is a placeholder.
        moves = rule.kind in _MOVES and rule.op_class is not OpClass.FULL and not rule.is_cast
        if name in _EXACT or moves or not operands:
            return outs
        for i, var in enumerate(eqn.outvars):
            lowered = self._lowered is not None and jx.dtype_of(var) == FLOAT32 and outs[i].size > 1
            if _is_low(var) and not (rule.is_cast and jx.dtype_of(eqn.invars[0]) == jx.dtype_of(var)):
                outs[i] = self._round(outs[i], jx.dtype_of(var), place, i)
            elif lowered and not (rule.is_cast or jx.is_backward(_provenance(place).stack)):
                outs[i] = self._round(outs[i], self._lowered, place, i)
        return outs

    def _exact(self, place: Place, i: int, x: Any) -> Any:
        """Returns an operand; a number in the program in float32, with its rounding."""
        atom = place.eqn.invars[i]
        if not (isinstance(atom, Literal) and _is_low(atom)):
            return x
        dtype, low = jx.dtype_of(atom), float(atom.val)
        exact = self._numbers.get((dtype, low), low)
        return x if exact == low else self._round(jnp.float32(exact), dtype, place, -1 - i)

    def _opaque(self, place: Place, args: Sequence[Any], compute: Callable[..., Sequence[Any]]) -> Sequence[Any]:
        """Runs an op in its own dtypes; an error of its operands passes through if JAX can differentiate it."""
        inside = jx.inner_jaxprs(place.eqn)
        is_rounded = any(jx.holds(inner, lambda _, *avals, **params: any(map(_is_low, avals))) for inner in inside)
        if is_rounded or any(map(_is_low, (*place.eqn.invars, *place.eqn.outvars))):
            self.opaque[f"{place.eqn.primitive.name} {location_of(place.eqns).where}"] = None
        try:
            return jax.vjp(lambda *args: compute(args), *args)[0]
        except Exception:  # what has no derivative raises any error
            return compute([lax.stop_gradient(x) if jx.is_floating(x) else x for x in args])


class _Switch(NamedTuple):
    """The switch of a row.

    Attributes:
        number: its number.
        row: the row.
        is_on: whether autocast rounds.
        flops: the floating-point operations of the product that computes the value; 0 for other ops.
        lines: see `Emulation.lines`.
    """

    number: int
    row: Rounding
    is_on: bool
    flops: int
    lines: frozenset[str]


def _lines(place: Place) -> frozenset[str]:
    # What JAX traced once for all its callers has the lines of the first.
    frames = [frame for i, eqn in enumerate(place.eqns) for frame in jx.frames_of(eqn, 1 if i else 100)]
    return frozenset(str(frame) for frame in frames if not frame.is_of_library)


def _row(place: Place, name: str, dtype: str) -> Rounding:
    at = _provenance(place)
    direction = "backward" if jx.is_backward(at.stack) else "forward"
    return Rounding(at.source, at.module, name, direction, dtype, place.times, 0)


def _provenance(place: Place) -> jx.Provenance:
    return functools.reduce(jx.Provenance.of, place.eqns, jx.Provenance())


def _is_low(x: Any) -> bool:
    return is_low(jx.dtype_of(x))


def _as_traced(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Returns operands in the dtypes that an equation was traced in."""
    return [x.astype(jx.dtype_of(v)) if _is_low(v) else x for x, v in zip(operands, eqn.invars, strict=True)]


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
