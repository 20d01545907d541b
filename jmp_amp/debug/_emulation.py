"""A gradient under autocast, emulated in float32: each rounding is an op, with a switch that is set at run time.

One compiled program computes the gradient of float32 (all switches off), that of low precision (all on), and what each
rounding adds to it, from one reverse pass through the emulation.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Literal

from jmp_amp import _jaxpr as jx
from jmp_amp._autocast import OpClass, ResultKind, autocast_with, parse_settings, rule_of
from jmp_amp._float8 import PRIMITIVE, RAGGED_PRIMITIVE, emulated, in_base
from jmp_amp._formats import FLOAT32, FORMATS
from jmp_amp._loss_scale import value_and_grad
from jmp_amp.debug._compare import NO_GRADIENTS
from jmp_amp.debug._evaluation import Evaluator, keeps_dtypes
from jmp_amp.debug._nodes import Place

LOW = [form.dtype for form in FORMATS.values() if form.is_low]
# It runs a few times, so it is compiled quickly.
_QUICK: dict[str, str | bool] = {"xla_backend_optimization_level": "1", **jx.versions.WITHOUT_FUSION_EMITTERS}
_EXACT = {"name", "copy", "optimization_barrier", "stop_gradient"}  # besides the ops that `RULES` says to move values


class Site(NamedTuple):
    """An op whose result is rounded.

    Attributes:
        source: the line of the user's code.
        module: the named scopes around it.
        primitive: the op; `"constant"` for a constant of the program.
        direction: `"forward"` or `"backward"`.
        dtype: the dtype that the result is rounded to.
        runs: how often it runs.
        size: the number of elements of all runs.
        is_float32: whether autocast keeps the result in float32, so that its switch is off.
    """

    source: str
    module: str
    primitive: str
    direction: str
    dtype: str
    runs: int
    size: int
    is_float32: bool = False


def _cast(x: jax.Array, dtype: Any) -> jax.Array:
    """Rounds float32 to a dtype and returns float32: in one loop with other ops, as two casts would not be."""
    info = jnp.finfo(dtype)
    y = lax.reduce_precision(x, info.nexp, info.nmant)
    if info.nexp == 8:
        return y
    step = float(info.smallest_subnormal)  # `reduce_precision` returns 0 for subnormal numbers
    small = lax.round(x * (1 / step), lax.RoundingMethod.TO_NEAREST_EVEN) * step
    return lax.select(lax.abs(x) < float(info.tiny), small, y)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rounded(low: Callable[..., jax.Array], x: jax.Array, on: jax.Array, squares: jax.Array, *args: Any) -> jax.Array:
    """Returns `low(x, *args)`, the rounded value of `x`, if the switch is on; at 2, it keeps what would overflow."""
    y = low(x, *args)
    return lax.select((on == 0) | ((on == 2) & ~jnp.isfinite(y)), x, y)


def _rounded_forward(low: Callable[..., jax.Array], x: jax.Array, on: Any, squares: Any, *args: Any) -> tuple[Any, Any]:
    return _rounded(low, x, on, squares, *args), (x, on, args)


def _rounded_backward(low: Callable[..., jax.Array], kept: Any, adjoint: jax.Array) -> tuple[Any, ...]:
    # Not derivatives in the switches: the sum of what the elements add, and the sum of its squares. They are not finite
    # if an element overflows; unless the switch is 2, one that the gradient depends on. Without the barrier, XLA would
    # compute the adjoint once more for each sum.
    x, on, args = kept
    adjoint = lax.optimization_barrier(adjoint)
    is_zero = ~jnp.isfinite(x) | ((adjoint == 0) & (on != 2))
    parts = lax.select(is_zero, lax.full_like(x, 0), adjoint * (low(x, *args) - x))
    zero = jnp.float32(0)
    add = lambda a, b: (a[0] + b[0], a[1] + b[1])  # noqa: E731
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
        self._found: dict[Any, tuple[int, Site]] = {}
        self._trips: dict[Any, int] = {}  # of each `while`, the most iterations
        self.opaque = dict[str, None]()
        self._arrays, rebuild = jx.split_arrays((args, kwargs))
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
                jax.make_jaxpr(functools.partial(gradient, f))(self._arrays, jnp.float32(1))
                for f in (fun, autocast_with(fun, settings))
            )
        self._shapes = [var.shape for var in self._program.out_avals[1:]]
        if not self._shapes:
            raise TypeError(NO_GRADIENTS)
        # Autocast rounds the numbers in a program as it traces. What they were is known from what they became.
        atoms = [atom for eqn, _ in jx.equations_in(exact, jx.Provenance()) for atom in eqn.invars]
        numbers = [np.asarray(x.val) for x in atoms if isinstance(x, Literal) and jx.dtype_of(x) == FLOAT32]
        with np.errstate(over="ignore"):
            self._numbers = {(dtype, float(x.astype(dtype))): float(x) for x in numbers for dtype in LOW}
        equations = jx.equations_in(self._program, jx.Provenance())
        self._most = sum(len(eqn.invars) + len(eqn.outvars) for eqn, _ in equations)
        self._example = jax.ShapeDtypeStruct((self._most,), FLOAT32), self._arrays, jnp.float32(1)

    def _gradient(self, on: Sequence[Any], arrays: Sequence[Any], scale: jax.Array, **counts: Any) -> Any:
        """Returns the loss and its gradients, given both kinds of switches."""
        self._switches = [lax.split(each, (1,) * self._most) for each in on]
        options = {"wide": FLOAT32, "around": self._around, **counts}
        results = Evaluator(self._program, [*arrays, scale], **options).run().results
        del self._switches
        loss, *grads = [x.value for x in results]
        return loss, [g / scale for g in grads]

    @functools.cached_property
    def _run(self) -> Callable[..., Any]:
        """The compiled program."""

        def run(on: jax.Array, arrays: Sequence[Any], scale: jax.Array, signs: Sequence[Any]) -> Any:
            gradient = lambda *on: self._gradient(on, arrays, scale, trip_counts=self._trips)  # noqa: E731
            (loss, grads), pull = jax.vjp(gradient, on, on)
            # So that no square overflows or underflows:
            largest = functools.reduce(jnp.maximum, [jnp.max(jnp.abs(g), initial=0) for g in grads])
            size = lax.select(largest > 0, largest, jnp.ones_like(largest))
            return loss, grads, size, pull((jnp.zeros_like(loss), [x / size for x in signs]))

        if jx.holds(self._program, lambda primitive, *_, **params: primitive.name == "while"):
            count = lambda on, *args: self._gradient((on, on), *args, counted=self._trips)  # noqa: E731
            count = jax.jit(count, compiler_options=_QUICK)
            jax.block_until_ready([count(jnp.full(self._most, on), *self._example[1:]) for on in (0.0, 1.0)])
            jax.effects_barrier()
        self._found.clear()
        signs = [jax.ShapeDtypeStruct(shape, FLOAT32) for shape in self._shapes]
        return jax.jit(run).lower(*self._example, signs).compile(_QUICK)

    def trace(self) -> list[Site]:
        """Returns the roundings without compiling; a `while` counts as one iteration."""
        jax.eval_shape(lambda on, *args: self._gradient((on, on), *args), *self._example)
        return [site for _, site in self._found.values()]

    @functools.cached_property
    def sites(self) -> list[Site]:
        """The roundings, in program order."""
        _ = self._run
        return [site for _, site in self._found.values()]

    @functools.cached_property
    def default(self) -> np.ndarray:
        """float32[n], the switches of autocast: 1 for each value that it rounds."""
        return np.array([not site.is_float32 for site in self.sites], np.float32)

    def __call__(self, on: np.ndarray, scale: float, seed: int = 0) -> "Run":
        """Runs the program with switches: 0 rounds nothing, 1 rounds, and 2 rounds what does not overflow."""
        rng = np.random.default_rng(seed)
        signs = [rng.integers(0, 2, shape).astype(np.float32) * 2 - 1 for shape in self._shapes]
        switches = np.zeros(self._most, np.float32)
        switches[: len(on)] = on
        loss, grads, size, stats = jax.device_get(self._run(switches, self._arrays, jnp.float32(scale), signs))
        flat = np.concatenate([np.ravel(g).astype(np.float64) for g in grads])
        signed, squares = (np.asarray(x, np.float64)[: len(self.sites)] for x in stats)
        with np.errstate(invalid="ignore"):  # NaN if the gradient is not finite
            return Run(float(loss), flat, signed * size, squares * float(size) ** 2)

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
        at = _provenance(place)
        name = "constant" if index < 0 else place.eqn.primitive.name
        direction = "backward" if jx.is_backward(at.stack) else "forward"
        is_low = index < 0 or low is not None or _is_low(place.eqn.outvars[index])
        size = place.times * math.prod(jnp.shape(x))
        site = Site(at.source, at.module, name, direction, jnp.dtype(to).name, place.times, size, not is_low)
        number, _ = self._found.setdefault((*place.key, index), (len(self._found), site))
        on, squares = (lax.squeeze(switches[number], (0,)) for switches in self._switches)
        return _rounded(low or functools.partial(_cast, dtype=to), x, on, squares, *args)

    def _around(self, place: Place, operands: Sequence[Any], compute: Callable[..., Sequence[Any]]) -> Sequence[Any]:
        """Evaluates an op in float32, and rounds its results."""
        eqn, rule, name = place.eqn, rule_of(place.eqn), place.eqn.primitive.name
        if name == "reduce_precision":  # `jax.checkpoint` rounds what is low already
            return operands if _is_low(eqn.invars[0]) else jx.bind(eqn, operands)
        operands = [self._exact(place, i, x) for i, x in enumerate(operands)]
        if name in (PRIMITIVE, RAGGED_PRIMITIVE):
            low = lambda _, *args: jx.bind(eqn, _as_traced(eqn, args))[0].astype(FLOAT32)  # noqa: E731
            exact = in_base(*operands, **eqn.params | {"base": FLOAT32, "preferred_element_type": FLOAT32})
            return [self._round(exact, eqn.params["operands"][0], place, 0, low, operands)]
        if keeps_dtypes(eqn):
            return self._opaque(place, operands, compute)
        outs = list(compute(operands))
        moves = (
            rule.kind in (ResultKind.MOVED, ResultKind.CHOSEN, ResultKind.SELECTED)
            and rule.op_class is not OpClass.FULL
        )
        # A sum by scatter is `CHOSEN` and in float32; what reads nothing is a placeholder.
        if name in _EXACT or (moves and not rule.is_cast) or not operands:
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
        if any(map(_is_low, (*place.eqn.invars, *place.eqn.outvars))):
            self.opaque[f"{place.eqn.primitive.name} at {_provenance(place).source}"] = None
        try:
            return jax.vjp(lambda *args: compute(args), *args)[0]
        except Exception:  # what has no derivative raises any error
            return compute([lax.stop_gradient(x) if jx.is_floating(x) else x for x in args])


def _provenance(place: Place) -> jx.Provenance:
    return functools.reduce(jx.Provenance.of, place.eqns, jx.Provenance())


def _is_low(x: Any) -> bool:
    return jx.dtype_of(x) in LOW


def _as_traced(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Returns operands in the dtypes that an equation was traced in."""
    return [x.astype(jx.dtype_of(v)) if _is_low(v) else x for x, v in zip(operands, eqn.invars, strict=True)]


class Run(NamedTuple):
    """A run of an `Emulation`.

    Attributes:
        loss: the loss.
        grads: float64[size], all gradients.
        signed: float64[n], what each rounding adds to the product of the gradient and random signs.
        squares: float64[n], the same as the sum of the squares of what its elements add; not finite if one overflows.
    """

    loss: float
    grads: np.ndarray
    signed: np.ndarray
    squares: np.ndarray

    @property
    def is_finite(self) -> bool:
        """Whether the loss and the gradient are finite."""
        return bool(np.isfinite(self.loss) and np.isfinite(self.grads).all())
