"""A gradient under autocast, emulated in float32: each rounding is an op, with a switch that is set at run time.

One compiled program computes the gradient of float32 (all switches off), that of low precision (all on), and what each
rounding adds to it, from one reverse pass through the emulation.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Literal

from jmp_amp import _jaxpr as jx
from jmp_amp._autocast import Makes, OpClass, autocast_with, parse_settings, rule_of
from jmp_amp._float8 import PRIMITIVE, RAGGED_PRIMITIVE, emulated, in_base
from jmp_amp._formats import FLOAT32, FORMATS
from jmp_amp._loss_scale import value_and_grad
from jmp_amp._modules import with_modules

LOW = {form.dtype for form in FORMATS.values() if form.is_low}
# It runs a few times, so it is compiled quickly.
_QUICK: dict[str, str | bool] = {"xla_backend_optimization_level": "1", **jx.versions.WITHOUT_FUSION_EMITTERS}
Casts = dict[tuple[int, Any], tuple[Any, Any]]
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
        self._literals: dict[tuple[Any, float], float] = {}
        self._trips: dict[Any, int] = {}  # of each `while`, the most iterations
        self._counts = True  # whether an evaluation counts them
        self.opaque = dict[str, None]()
        self._lowered = parse_settings(**options).format.dtype if rounds_float32 else None
        self._arrays, rebuild = jx.split_arrays((args, kwargs))
        settings = parse_settings(**{**options, "save": "all"})
        low = without_checkpoints(autocast_with(fun, settings, self._read_literals))

        def gradient(arrays: Sequence[Any], scale: jax.Array) -> list[Any]:
            args, kwargs = rebuild(arrays)
            value, grads = value_and_grad(low, loss_scale=scale, **grad_options)(*args, **kwargs)
            loss = value[0] if grad_options["has_aux"] else value
            return [loss, *(g for g in jax.tree.leaves(grads) if jx.is_floating(g))]

        with emulated():
            self._program = jax.make_jaxpr(gradient)(self._arrays, jnp.float32(1))
        self._shapes = [var.shape for var in self._program.out_avals[1:]]
        if not self._shapes:
            raise TypeError(
                "there are no floating arrays to differentiate with respect to; "
                "set `argnums` to the arguments that hold the parameters"
            )
        equations = jx.equations_in(self._program, jx.Provenance())
        self._most = sum(len(eqn.invars) + len(eqn.outvars) for eqn, _ in equations)
        self._example = jax.ShapeDtypeStruct((self._most,), FLOAT32), self._arrays, jnp.float32(1)

    def _gradient(self, on: Sequence[Any], arrays: Sequence[Any], scale: jax.Array) -> tuple[Any, list[Any]]:
        """Returns the loss and its gradients, given both kinds of switches."""
        self._switches = [lax.split(each, (1,) * self._most) for each in on]
        inputs = [_up(x) for x in (*arrays, scale)]
        loss, *grads = self._evaluate(self._program, inputs, jx.Provenance(), (), {})
        del self._switches
        return loss, [g / scale for g in grads]

    @functools.cached_property
    def _run(self) -> Callable[..., Any]:
        """The compiled program."""

        def run(on: jax.Array, arrays: Sequence[Any], scale: jax.Array, signs: Sequence[Any]) -> Any:
            (loss, grads), pull = jax.vjp(lambda *on: self._gradient(on, arrays, scale), on, on)
            # So that no square overflows or underflows:
            largest = functools.reduce(jnp.maximum, [jnp.max(jnp.abs(g), initial=0) for g in grads])
            size = lax.select(largest > 0, largest, jnp.ones_like(largest))
            return loss, grads, size, pull((jnp.zeros_like(loss), [x / size for x in signs]))

        if jx.holds(self._program, lambda primitive, *_, **params: primitive.name == "while"):
            count = jax.jit(lambda on: self._gradient((on, on), *self._example[1:]), compiler_options=_QUICK)
            jax.block_until_ready([count(jnp.full(self._most, on)) for on in (0.0, 1.0)])
            jax.effects_barrier()
        self._counts = False
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
        flat = np.concatenate([np.empty(0), *(np.ravel(g).astype(np.float64) for g in grads)])
        signed, squares = (np.asarray(x, np.float64)[: len(self.sites)] for x in stats)
        with np.errstate(invalid="ignore"):  # NaN if the gradient is not finite
            return Run(float(loss), flat, signed * size, squares * float(size) ** 2)

    def _read_literals(self, plan: Any) -> None:
        """Notes the numbers in the program by what they are rounded to; autocast rounds them as it traces."""
        for step in plan.steps:
            for atom in step.eqn.invars:
                if isinstance(atom, Literal) and jx.dtype_of(atom) == FLOAT32:
                    with np.errstate(over="ignore"):
                        lows = [(dtype, float(np.asarray(atom.val).astype(dtype))) for dtype in LOW]
                    self._literals |= dict.fromkeys(lows, float(atom.val))
            for inner, _ in step.inner:
                self._read_literals(inner)

    def _round(
        self,
        x: Any,
        to: Any,
        place: "_Place",
        primitive: str,
        low: Any = None,
        args: Sequence[Any] = (),
        is_float32: bool = False,
    ) -> Any:
        """Returns `x`, rounded to a dtype if the switch of this place is on; `low(x, *args)` if no cast rounds it."""
        at, key = place
        direction = "backward" if jx.is_backward(at.stack) else "forward"
        size = at.times * math.prod(jnp.shape(x))
        site = Site(at.source, at.module, primitive, direction, jnp.dtype(to).name, at.times, size, is_float32)
        number, _ = self._found.setdefault(key, (len(self._found), site))
        on, squares = (lax.squeeze(switches[number], (0,)) for switches in self._switches)
        return _rounded(low or functools.partial(_cast, dtype=to), x, on, squares, *args)

    def _evaluate(self, jaxpr: Any, args: Sequence[Any], outer: jx.Provenance, path: Any, shared: Casts) -> list[Any]:
        """Evaluates a jaxpr in float32; its arguments and results of 16 bits are float32.

        Args:
            jaxpr: the jaxpr.
            args: its arguments.
            outer: the provenance of the equation that holds it.
            path: the equations around it.
            shared: what was cast so far: casts of one array are one rounding.
        """

        def apply(eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
            place = at, key = outer.of(eqn), (*path, id(eqn))
            match jx.structure_of(eqn):
                case jx.Call(inner, inputs, is_inline=True):
                    return self._evaluate(inner, [operands[i] for i in inputs], at, key, shared)
                case jx.Branches(bodies, inputs):
                    read = [operands[i] for i in inputs]
                    branches = [
                        functools.partial(self._evaluate, body, read, at, (*key, i), dict(shared))
                        for i, body in enumerate(bodies)
                    ]
                    return lax.switch(operands[0], branches)
                case jx.Loop() as loop:
                    run = self._scan if loop.cond is None else self._while
                    return run(eqn, loop, operands, *place, shared)
            return self._op(eqn, self._with_literals(eqn, operands, *place), place, shared)

        return jx.evaluate(jaxpr, args, apply, _up, lambda literal: _up(literal.val))

    def _op(self, eqn: JaxprEqn, operands: list[Any], place: "_Place", shared: Casts) -> list[Any]:
        """Applies an op in float32 and rounds its results."""
        name, rule, (at, key) = eqn.primitive.name, rule_of(eqn), place
        if _is_cast(eqn):
            return [self._cast(eqn, operands[0], place, shared)]
        if name == "reduce_precision" and _is_low(eqn.invars[0]):  # `jax.checkpoint` rounds what is low already
            return operands
        if name in (PRIMITIVE, RAGGED_PRIMITIVE):
            low = lambda _, *args: _up(jx.bind(eqn, _as_traced(eqn, args))[0])  # noqa: E731
            exact = in_base(*operands, **eqn.params | {"base": FLOAT32, "preferred_element_type": FLOAT32})
            return [self._round(exact, eqn.params["operands"][0], place, name, low, operands)]
        if (
            eqn.effects
            or rule.is_kernel
            or name == "bitcast_convert_type"
            or (jx.holds_jaxprs(eqn) and not rule.jaxpr_params)
        ):
            return self._opaque(eqn, _as_traced(eqn, operands), at)
        outs = _in_float32(eqn, operands)
        # A sum by scatter is `CHOSEN` and in float32.
        if name in _EXACT or (
            rule.makes in (Makes.MOVED, Makes.CHOSEN, Makes.SELECTED) and rule.op_class is not OpClass.FULL
        ):
            return outs
        for i, var in enumerate(eqn.outvars):
            if _is_low(var):
                outs[i] = self._round(outs[i], jx.dtype_of(var), (at, (*key, i)), name)
            elif (
                self._lowered
                and jx.dtype_of(var) == FLOAT32
                and math.prod(jx.shape_of(var) or ()) > 1
                and not jx.is_backward(at.stack)
            ):
                outs[i] = self._round(outs[i], self._lowered, (at, (*key, i)), name, is_float32=True)
        return outs

    def _cast(self, eqn: JaxprEqn, x: Any, place: "_Place", shared: Casts) -> Any:
        before, after = jx.dtype_of(eqn.invars[0]), jx.dtype_of(eqn.outvars[0])
        if before == after or not _is_low(eqn.outvars[0]):
            return x if before == after else x.astype(after)
        if (id(x), after) not in shared:  # with the array, so that its id stays its own
            shared[id(x), after] = x, self._round(x.astype(FLOAT32), after, place, eqn.primitive.name)
        return shared[id(x), after][1]

    def _with_literals(self, eqn: JaxprEqn, operands: list[Any], at: jx.Provenance, key: Any) -> list[Any]:
        """Returns the operands with the numbers of the program in float32, each with a rounding."""
        values = list(operands)
        for i, atom in enumerate(eqn.invars):
            if isinstance(atom, Literal) and _is_low(atom):
                exact = self._literals.get((jx.dtype_of(atom), float(atom.val)), float(atom.val))
                if exact != float(atom.val):
                    place = at, (*key, "literal", i)
                    values[i] = self._round(jnp.float32(exact), jx.dtype_of(atom), place, "constant")
        return values

    def _opaque(self, eqn: JaxprEqn, args: list[Any], at: jx.Provenance) -> list[Any]:
        """Runs an op in its own dtypes; an error of its operands passes through if JAX can differentiate it."""
        if any(map(_is_low, (*eqn.invars, *eqn.outvars))):
            self.opaque[f"{eqn.primitive.name} at {at.source}"] = None
        try:
            outs, _ = jax.vjp(lambda *args: jx.bind(eqn, args), *args)
        except Exception:  # what has no derivative raises any error
            stopped = zip(args, eqn.invars, strict=True)
            outs = jx.bind(eqn, [lax.stop_gradient(x) if jx.is_floating(v) else x for x, v in stopped])
        return [_up(x) for x in outs]

    def _scan(
        self, eqn: JaxprEqn, loop: jx.Loop, operands: Sequence[Any], at: jx.Provenance, key: Any, shared: Casts
    ) -> list[Any]:
        """Runs a scan. Its switches are constants of the loop, so the contributions of its iterations are added."""
        body, consts, at = jx.open_jaxpr(loop.body)[0], operands[loop.consts], at._replace(times=at.times * loop.length)
        for cast in filter(_is_cast, body.eqns):  # what the loop casts in each iteration is one rounding
            for var, x in zip(body.invars, consts, strict=False):
                if cast.invars[0] is var:
                    once = at.of(cast)._replace(times=at.times // max(loop.length, 1))
                    self._cast(cast, x, (once, (*key, id(cast))), shared)

        @functools.partial(jax.checkpoint, prevent_cse=False)  # so that only carries are stacked
        def step(carry: Any, xs: Any) -> Any:
            outs = self._evaluate(loop.body, [*consts, *carry, *xs], at, key, dict(shared))
            return outs[: loop.n_carry], outs[loop.n_carry :]

        options = {name: eqn.params[name] for name in ("reverse", "unroll")}
        carry, ys = lax.scan(step, list(operands[loop.carry]), list(operands[loop.xs]), loop.length, **options)
        return [*carry, *ys]

    def _while(
        self, eqn: JaxprEqn, loop: jx.Loop, operands: Sequence[Any], at: jx.Provenance, key: Any, shared: Casts
    ) -> list[Any]:
        """Runs a `while` as a scan, which has a derivative: an iteration after its end passes the carry on.

        The first evaluation counts the iterations.
        """

        def goes_on(carry: Any) -> Any:
            return self._evaluate(loop.cond, [*operands[loop.cond_consts], *carry], at, (*key, "cond"), dict(shared))[0]

        def step(carry: Any) -> list[Any]:
            return self._evaluate(loop.body, [*operands[loop.consts], *carry], inside, key, dict(shared))

        def count(n: Any) -> None:
            self._trips[key] = max(int(n), self._trips.get(key, 0))

        carry, inside = list(operands[loop.carry]), at._replace(times=at.times * self._trips.get(key, 1))
        if self._counts:
            n, carry = lax.while_loop(lambda x: goes_on(x[1]), lambda x: (x[0] + 1, step(x[1])), (jnp.int32(0), carry))
            jax.debug.callback(count, n)
            return carry
        step_if = lambda carry, _: (lax.cond(goes_on(carry), step, lambda x: x, carry), None)  # noqa: E731
        return lax.scan(step_if, carry, None, self._trips.get(key, 0))[0]


_Place = tuple[jx.Provenance, Any]  # and the equations that lead to it


def _up(x: Any) -> Any:
    return x.astype(FLOAT32) if jx.dtype_of(x) in LOW else x


def _is_low(x: Any) -> bool:
    return jx.dtype_of(x) in LOW


def _is_cast(eqn: JaxprEqn) -> bool:
    return (
        eqn.primitive.name == "convert_element_type"
        and jx.is_floating(eqn.invars[0])
        and jx.is_floating(eqn.outvars[0])
    )


def _as_traced(eqn: JaxprEqn, operands: Iterable[Any]) -> list[Any]:
    """Returns operands in the dtypes that an equation was traced in."""
    return [x.astype(jx.dtype_of(v)) if _is_low(v) else x for x, v in zip(operands, eqn.invars, strict=True)]


def _in_float32(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Applies a first-order op in float32 where it was traced in 16 bits."""
    if not any(map(_is_low, (*eqn.invars, *eqn.outvars))):
        return jx.bind(eqn, operands)

    def convert(param: Any) -> Any:
        if isinstance(param, np.dtype | type) and param in LOW:
            return FLOAT32
        return jx.retyped(param, FLOAT32) if hasattr(param, "eqns") and any(map(_is_low, param.invars)) else param

    params = {name: convert(param) for name, param in eqn.params.items()}
    if "precision" in params and rule_of(eqn).is_product:
        params["precision"] = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
    return jx.bind(eqn, operands, **params)


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


def without_checkpoints(fun: Callable) -> Callable:
    """Returns a function without `jax.checkpoint`, so that what the backward pass reads is computed once."""

    def traced(fun: Callable) -> Callable:
        @functools.wraps(fun, updated=())
        def call(*args: Any, **kwargs: Any) -> Any:
            closed, arrays, rebuild = jx.trace_call(fun, args, kwargs)
            return rebuild(_without_checkpoints(closed, arrays))

        return call

    return with_modules(fun, traced)


def _without_checkpoints(jaxpr: Any, args: Sequence[Any]) -> list[Any]:
    opened, consts = jx.open_jaxpr(jaxpr)
    if not jx.holds(jaxpr, jx.versions.is_checkpoint):
        return jax.core.eval_jaxpr(opened, consts, *args)

    def apply(eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        structure, entry = jx.structure_of(eqn), jx.HIGHER_ORDER.get(eqn.primitive.name)
        with jx.versions.context_of(eqn):
            if structure is None or entry is None or entry.run is None or getattr(structure, "rule", None):
                return jx.bind(eqn, operands)
            if isinstance(structure, jx.Call) and jx.versions.is_checkpoint(eqn.primitive, **eqn.params):
                return _without_checkpoints(structure.jaxpr, operands)
            inner = [jaxpr for jaxpr, _ in jx.inner_jaxprs(eqn)]
            bodies = [jx.Body(functools.partial(_call, x), jx.open_jaxpr(x)[0].in_avals) for x in inner]
            return entry.run(eqn, bodies, operands)

    return jx.evaluate(jaxpr, args, apply)


def _call(jaxpr: Any, *args: Any) -> list[Any]:
    return _without_checkpoints(jaxpr, args)
