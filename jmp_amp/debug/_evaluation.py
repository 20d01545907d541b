"""Evaluates a program: as it was traced, in a wider dtype, or with each op as a function evaluates it.

`Evaluation` does so as a part of a program that JAX traces. `Interpretation` runs one, and follows its values.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jmp_amp import _jaxpr as jx
from jmp_amp._loss_scale import LOSS_SCALE
from jmp_amp._ops import rule_of
from jmp_amp.debug._clock import Clock
from jmp_amp.debug._nodes import ARGUMENT, Id, Node, Place, Summary, summary_of

FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)

# They read the bits of a value, or call code that was written for its dtype.
_KEEP_DTYPES = {"bitcast_convert_type", "pure_callback", "io_callback", "debug_callback", "ffi_call"}
_LONG = 20_000  # ops; a loop that runs more of them is observed if its results are not finite
_TOGETHER, _LARGE = 32, 2**24  # values and bytes that the host is told of at once
# A variant runs once, so it is compiled as fast as it can be; low precision is rounded as the program says.
QUICK = {"xla_allow_excess_precision": False, "xla_backend_optimization_level": 0}
# As in the step, each op rounded as it is alone: at another level, `x - jnp.mean(x)` of equal numbers may be no 0.
_OP_BY_OP = {"xla_allow_excess_precision": False, "xla_disable_hlo_passes": "fusion"}


@dataclasses.dataclass(eq=False)
class Evaluation:
    """An evaluation of a program, as a part of one that JAX traces.

    Attributes:
        program: the program, a closed jaxpr.
        arrays: its arguments.
        wide: the dtype that narrower values are computed in; None for the traced dtypes.
        around: evaluates an op, given its place, its operands, and a function that evaluates it in the wide dtype.
        as_one: names of primitives that are evaluated as one op, although they hold ops.
        replayed: pytrees that another evaluation recorded, by keys that start with that of the place.
        recorded: those that `around` records in this one. Those in a loop are stacked; those in a branch that did not
            run are 0.
        region: whether an equation, the last of those that contain it, is computed in the wide dtype. None means all.
            Outside of the region, casts remain, and an op reads the widest of its operands.
        observe: is told on the host of the keys, indices and dtypes of values, the key of the body that ends with them,
            the iteration, and the values. None observes nothing.
        entered: the keys of the long loops that are entered; others count as one op. None enters all.
        results: the results of the program.
    """

    program: Any
    arrays: Sequence[Any]
    wide: Any = None
    around: Callable[[Place, Sequence[Any], Callable[..., Sequence[Any]]], Sequence[Any]] | None = None
    as_one: Collection[str] = ()
    replayed: Mapping[Any, Any] = dataclasses.field(default_factory=dict)
    region: Callable[[tuple[JaxprEqn, ...]], bool] | None = None
    observe: Callable[..., None] | None = None
    entered: Collection[Id] | None = None
    recorded: dict[Any, Any] = dataclasses.field(init=False, default_factory=dict)
    results: list[Any] = dataclasses.field(init=False, default_factory=list)
    _waiting: dict[Any, Any] = dataclasses.field(init=False, default_factory=dict)

    def run(self) -> Self:
        """Evaluates the whole program."""
        with precise(self.wide):
            args = self._noted([self._in_dtype(x) for x in self.arrays], Place(), ARGUMENT)
            self.results = self._run(self.program, args, Place())
            self._hand_over(Place())
        return self

    def _run(self, jaxpr: Any, args: Sequence[Any], place: Place) -> list[Any]:
        """Evaluates the jaxpr at `place`."""
        return _evaluate(jaxpr, args, place, self._visit, lambda x, is_literal=False: self._in_dtype(x))

    def _visit(self, operands: list[Any], place: Place) -> Sequence[Any]:
        """Evaluates an equation: enters it, or applies it as one op."""
        structure, changes_ops = structure_of(place.eqn), self.wide is not None or self.around is not None
        is_one = place.eqn.primitive.name in self.as_one or self._counts_as_one(structure, place)
        is_changed = changes_ops and not is_one
        with jx.versions.origin_of(place.eqn) if structure else contextlib.nullcontext():
            match structure:
                # A derivative rule is kept unless ops are evaluated otherwise.
                case jx.Call(jaxpr, inputs, is_inline=True, rule=rule) if (not rule or changes_ops) and not is_one:
                    return self._run(jaxpr, [operands[i] for i in inputs], place)
                case jx.Branches(jaxprs, inputs) if is_changed:
                    return self._trace_branches(jaxprs, [operands[i] for i in inputs], operands[0], place)
                case jx.Loop() if is_changed:
                    trace = self._trace_while if structure.cond else self._trace_scan
                    return self._noted(trace(structure, operands, place), place)
            compute = functools.partial(self._apply, place)
            outs = compute(operands) if self.around is None else self.around(place, operands, compute)
            return self._noted(outs, place)

    def _counts_as_one(self, structure: Any, place: Place) -> bool:
        """Whether a loop runs so many ops that it is not entered unless its results are known to be non-finite."""
        if self.entered is None or place.key in self.entered or not isinstance(structure, jx.Loop):
            return False
        if any(eqn.primitive.name == "shard_map" for eqn in place.eqns):  # its collectives run where it is entered
            return False
        n_ops = sum(map(jx.runs_of, jx.equations_in(structure.body)))
        return structure.length is None or structure.length * n_ops > _LONG

    def _run_body(self, jaxpr: Any, place: Place, replayed: Any, *args: Any) -> tuple[list[Any], dict[Any, Any]]:
        """Evaluates the jaxpr of a body, and returns what is recorded in it, too."""
        outer = self.recorded, self.replayed, self._waiting
        self.recorded, self.replayed, self._waiting = {}, replayed, {}
        try:
            self._noted(args, place, ARGUMENT)
            results = self._run(jaxpr, args, place)
            self._hand_over(place, place.key)
            return results, self.recorded
        finally:
            self.recorded, self.replayed, self._waiting = outer

    def _trace_branches(self, jaxprs: Sequence[Any], args: Sequence[Any], index: Any, place: Place) -> Sequence[Any]:
        """Traces each branch once, also one that is in others. Of several platforms, that of the device is lowered."""

        def completed(jaxpr: Any, out: Any, *args: Any) -> tuple[Any, dict[Any, Any]]:
            arrays = jax.core.eval_jaxpr(*jx.open_jaxpr(jaxpr), *args)
            outs, recorded = jax.tree.unflatten(jax.tree.structure(out), arrays)
            outs = [widened(x, self.wide) if is_wide else x for x, is_wide in zip(outs, are_wide, strict=True)]
            return outs, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes) | recorded

        bodies = [functools.partial(self._run_body, x, place.body(k), self.replayed) for k, x in enumerate(jaxprs)]
        programs = [jax.make_jaxpr(body, return_shape=True)(*args) for body in bodies]
        shapes = {key: x for _, (_, recorded) in programs for key, x in recorded.items()}
        results = zip(*[outs for _, (outs, _) in programs], strict=True)
        are_wide = [len({x.dtype for x in each}) > 1 for each in results]  # a region may hold one branch
        branches = [functools.partial(completed, *each) for each in programs]
        if platforms := place.eqn.params.get("branches_platforms"):  # of `lax.platform_dependent`; None for all others
            named = zip(platforms, branches, strict=True)
            by_name = {name: branch for names, branch in named for name in names or ("default",)}
            outs, recorded = lax.platform_dependent(*args, **by_name)
        else:
            outs, recorded = lax.switch(index, branches, *args)
        self.recorded.update(recorded)
        return outs

    def _trace_scan(self, loop: jx.Loop, values: list[Any], place: Place) -> Sequence[Any]:
        """Traces a `scan`, whose derivative keeps carries only."""

        def run(carry: list[Any], i: Any, xs: list[Any], replayed: Any) -> tuple[list[Any], dict[Any, Any]]:
            return self._run_body(loop.body, place.body(0, i), replayed, *values[loop.consts], *carry, *xs)

        @functools.partial(jax.checkpoint, prevent_cse=False)
        def step(carry: list[Any], xs: Any) -> tuple[Any, Any]:
            outs, recorded = run(carry, *xs)
            new = [x.astype(old.dtype) for x, old in zip(outs, carry, strict=False)]
            return new, (outs[loop.n_carry :], recorded)

        replayed = {key: x for key, x in self.replayed.items() if key[: len(place.key)] == place.key}
        options = {name: place.eqn.params[name] for name in ("length", "reverse")}
        first = [lax.index_in_dim(x, 0, keepdims=False) for x in values[loop.xs]] if loop.length else []
        start = self._in_stable_dtypes(values[loop.carry], lambda carry: run(carry, np.int32(0), first, {})[0])
        xs = np.arange(loop.length, dtype=np.int32), values[loop.xs], replayed
        carry, (ys, recorded) = lax.scan(step, start, xs, **options)
        self.recorded.update(recorded)
        return [*carry, *ys]

    def _trace_while(self, loop: jx.Loop, values: list[Any], place: Place) -> Sequence[Any]:
        """Traces a `while` loop, in which nothing is recorded. Under `vmap`, elements that are done stay."""

        def goes_on(i: Any, carry: list[Any]) -> Any:
            return self._run_body(loop.cond, place.body(0, i), {}, *values[loop.cond_consts], *carry)[0][0]

        def step(i: Any, carry: list[Any]) -> list[Any]:
            new, _ = self._run_body(loop.body, place.body(1, i), {}, *values[loop.consts], *carry)
            if jx.shape_of(jx.open_jaxpr(loop.cond)[0].outvars[0]):
                return [_where(goes_on(i, carry), x, y) for x, y in zip(new, carry, strict=True)]
            return [x.astype(y.dtype) for x, y in zip(new, carry, strict=True)]

        start = self._in_stable_dtypes(values[loop.carry], lambda carry: step(np.int32(0), carry))
        state = jnp.int32(0), start
        return lax.while_loop(lambda x: jnp.any(goes_on(*x)), lambda x: (x[0] + 1, step(*x)), state)[1]

    def _in_stable_dtypes(self, carry: list[Any], step: Callable[[list[Any]], Sequence[Any]]) -> list[Any]:
        """Returns the carry of a loop in the dtypes that its region returns it in; without one, these are the same."""
        if self.region is None:
            return carry
        pairs = zip(carry, jax.eval_shape(step, carry), strict=False)
        return [x if x.dtype == out.dtype else widened(x, self.wide) for x, out in pairs]

    def _apply(self, place: Place, operands: Sequence[Any]) -> Sequence[Any]:
        """Returns the results of an op, in the dtype of this evaluation."""
        eqn = place.eqn
        if _communicates(eqn):
            zeros = [jnp.zeros(jx.shape_of(x), jx.dtype_of(x)) for x in eqn.outvars]
            return [lax.reshape(x, zero.shape) for x, zero in zip(operands, zeros, strict=True)] if operands else zeros
        if self.wide is None:
            return jx.apply_as_traced(eqn, operands)
        is_wide = self.region is None or self.region(place.eqns)
        if not is_wide and not (rule_of(eqn).is_product or rule_of(eqn).is_cast):
            pairs = zip(operands, eqn.invars, strict=True)
            is_wide = any(jx.is_inexact(x) and x.dtype != jx.dtype_of(atom) for x, atom in pairs)
        if is_wide and (outs := evaluate_in(self.wide, eqn, operands)) is not None:
            return outs
        return [self._in_dtype(x) for x in jx.apply_as_traced(eqn, as_traced(eqn, operands))]

    def _in_dtype(self, x: Any) -> Any:
        return x if self.wide is None or self.region else widened(x, self.wide)

    def _noted(self, values: Sequence[Any], place: Place, kind: Id = ()) -> Sequence[Any]:
        """Returns values, which wait to be handed over to the host; `kind` is `ARGUMENT` for those of a body."""
        if self.observe is None:
            return values
        for k, x in enumerate(values):
            if isinstance(dtype := jx.dtype_of(x), np.dtype) and not isinstance(x, jax.Ref):
                # JAX hands over float64 as float32.
                array = lax.bitcast_convert_type(x, np.uint32) if dtype == FLOAT64 else x
                self._waiting[place.key, (*kind, k), dtype] = array
        if len(self._waiting) >= _TOGETHER or sum(map(jx.nbytes_of, values)) > _LARGE:
            self._hand_over(place)
        return values

    def _hand_over(self, place: Place, body: Id | None = None) -> None:
        """Hands the values that wait over to the host, which may be the last ones of a body."""
        if self.observe is not None:
            waiting, self._waiting = self._waiting, {}
            jax.debug.callback(functools.partial(self.observe, [*waiting], body), place.iteration, *waiting.values())


@dataclasses.dataclass(eq=False)
class Interpretation:
    """A run of a program that is compiled as a whole. Which of its values are finite is known.

    Attributes:
        program: as of an `Evaluation`, and so are `arrays`, `wide`, `region` and `entered`.
        loss_factor: multiplies the loss scale of `amp.value_and_grad`.
        clock: is told of each op, and says when to stop.
        holds: the ids of the values to keep as `Node.value`.
        suspects: results of ops, and arguments, zeros in place of whose non-finite values may let others be finite.
        allowed: how many of them, the first ones, are left as they are.
        is_observed: whether its values are known, or its results alone.
        results: those of the program, with their values; none if it was not evaluated to its end.
        is_stopped: whether the evaluation ended because the time was over.
        seen: the keys of the ops that were evaluated.
        nodes: all values, in program order.
        nonfinite: the first non-finite result of each op that computed non-finite values from finite operands, or NaN
            from infinite constants, in program order.
        held: the arrays of the values in `holds`, by id.
    """

    program: Any
    arrays: Sequence[Any]
    wide: Any = None
    region: Callable[[tuple[JaxprEqn, ...]], bool] | None = None
    entered: frozenset[Id] = frozenset()
    loss_factor: float = 1.0
    clock: Clock = dataclasses.field(default_factory=Clock)
    holds: Collection[Id] = ()
    suspects: tuple[Node, ...] = ()
    allowed: int = 0
    is_observed: bool = True
    results: list[Node] = dataclasses.field(init=False, default_factory=list)
    is_stopped: bool = dataclasses.field(init=False, default=False)
    seen: set[Id] = dataclasses.field(init=False, default_factory=set)
    nodes: list[Node] = dataclasses.field(init=False, default_factory=list)
    nonfinite: list[Node] = dataclasses.field(init=False, default_factory=list)
    held: dict[Id, np.ndarray] = dataclasses.field(init=False, default_factory=dict)
    _compiled: dict[Any, Any] = dataclasses.field(default_factory=dict)
    _summaries: dict[Id, Summary] = dataclasses.field(init=False, default_factory=dict)
    _ran: dict[Id, list[Id]] = dataclasses.field(init=False, default_factory=lambda: defaultdict(list))  # iterations

    def run(self) -> Self:
        """Runs the program, and follows its values."""
        results = self._execute()
        if not self.is_observed or self.loss_factor != 1:
            self.results = [Node(summary_of(x), value=x) for x in results]
            return self
        names = jx.open_jaxpr(self.program)[0].debug_info.arg_names or ()
        args = [self._argument(i, *each) for i, each in enumerate(zip(names, self.arrays, strict=True))]
        ends = self._follow(self.program, args, Place())
        for node, x in zip(ends, results, strict=False):
            node.value = x
        self.results = ends[: len(results)]
        loops = {x.place.key for x in self.nonfinite if isinstance(structure_of(x.eqn), jx.Loop)}
        return self if self.is_stopped or loops <= self.entered else self.again(entered=self.entered | loops)

    def again(self, **changes: Any) -> Self:
        """Runs the program otherwise."""
        return dataclasses.replace(self, **changes).run()

    @property
    def is_finite(self) -> bool:
        """Whether all results are finite."""
        return not self.is_stopped and all(x.is_finite for x in self.results)

    def _execute(self) -> list[Any]:
        """Compiles the program, unless another run has done so, and runs it; returns nothing if the time is over."""
        key, compiled = (self.wide, self.region, self.suspects, self.entered, self.is_observed), self._compiled
        blocked = {x.id for x in self.suspects[self.allowed :]}
        arrays = [_zero_nonfinite(x) if (*ARGUMENT, i) in blocked else x for i, x in enumerate(self.arrays)]
        compiled["observe"] = self._observe

        def ends() -> list[Any]:
            program = compiled[key]()
            results = jax.block_until_ready(program(arrays, np.float32(self.loss_factor), np.int32(self.allowed)))
            jax.effects_barrier()
            return results

        try:
            if key not in compiled:
                compiled[key] = functools.cache(self._lowered().compile)
            results = self.clock.wait_for(ends, "the program is compiled as a whole", self.clock.max_seconds)
        except Exception as error:  # the time is over, or what runs in the dtypes of the program does not in others
            self.is_stopped = isinstance(error, TimeoutError) or self.wide is not None
            if not self.is_stopped:
                raise
        return [] if self.is_stopped else results

    def _lowered(self) -> Any:
        """Traces the program."""

        def run(arrays: Any, loss_factor: Any, allowed: Any) -> list[Any]:
            options: dict[str, Any] = {"region": self.region, "entered": None if self.wide else self.entered}
            if self.is_observed:
                options["observe"] = lambda *args: self._compiled["observe"](*args)  # of the run that is next
            around = functools.partial(self._changed, loss_factor, allowed)
            return Evaluation(self.program, arrays, self.wide, around, **options).run().results

        with precise(self.wide), np.errstate(over="ignore"):  # of constants
            compiler_options = _OP_BY_OP if self.wide is None else QUICK
            return jax.jit(run, compiler_options=compiler_options).lower(self.arrays, np.float32(1), np.int32(0))

    def _changed(self, loss_factor: Any, allowed: Any, place: Place, operands: Any, compute: Callable) -> Any:
        """Traces an op, with another loss scale, and zeros in place of the non-finite values of a suspect."""
        self.clock.show("the program is traced as a whole")
        if self.clock.is_late:
            raise TimeoutError
        outs = compute(operands)
        for k, suspect in enumerate(self.suspects):
            if suspect.place.key == place.key:
                here = jnp.all(jnp.array(suspect.place.iteration) == jnp.array(place.iteration)) & (k >= allowed)
                outs = [jnp.where(here, _zero_nonfinite(x), x) if jx.is_inexact(x) else x for x in outs]
        return [x * loss_factor.astype(x.dtype) for x in outs] if applies_loss_scale(place.eqn) else outs

    def _observe(self, names: Sequence[Any], body: Id | None, iteration: Sequence[Any], *values: Any) -> None:
        """Is told of values, on the host."""
        iteration = tuple(map(int, iteration))
        if body is not None:
            self._ran[body].append(iteration)
        for (key, index, dtype), value in zip(names, values, strict=True):
            if self.is_stopped or self.clock.is_late:
                self.is_stopped = True
                return
            x, at = np.asarray(value), (*key, *iteration, *index)
            x = x.view(dtype)[..., 0] if dtype == FLOAT64 else x
            if at in self.holds:
                self.held[at] = np.array(x)
            is_plain = jx.is_inexact(x) and at not in self.holds and x.size > 1 and bool(np.isfinite(x).all())
            self._summaries[at] = Summary(dtype.name, x.shape) if is_plain else summary_of(x)
            if index == (0,):
                self.seen.add(key)
                self.clock.tick("ops evaluated")

    def _follow(self, jaxpr: Any, args: Sequence[Node], place: Place) -> list[Node]:
        """Follows the values through the jaxpr at `place`."""

        def constant(x: Any, is_literal: bool = False) -> Node:
            return self._add(Node(summary_of(x), value=x, is_constant=is_literal))

        return _evaluate(jaxpr, args, place, self._visit, constant)

    def _argument(self, i: int, name: str, x: Any) -> Node:
        node = self._add(Node(summary_of(x), Place(), (*ARGUMENT, i), name=name))
        # -inf is often intended, as in a mask.
        if not node.is_finite and not np.all(np.isfinite(x) | (np.asarray(x) == -np.inf)):
            node.causes = frozenset({node})
        return node

    def _add(self, node: Node) -> Node:
        """Adds a value, with what the run knows of it, and what follows from those that it was computed from."""
        node.summary, node.value = self._summaries.get(node.id, node.summary), self.held.get(node.id, node.value)
        eqns, reads = node.place.eqns if node.place else (), node.parents
        if node.operands or (eqns and not eqns[-1].invars):  # such as an `iota`
            node.is_constant = all(x.is_constant for x in node.operands)
        is_of_backward = node.source is None and jx.direction_of(eqns) == "backward"
        node.is_backward = is_of_backward or any(x.is_backward for x in reads)
        for x in reads:
            x.readers.append(node)
        if not node.is_finite:
            node.causes = frozenset[Node]().union(*(x.causes for x in reads))
        self.nodes.append(node)
        return node

    def _visit(self, operands: list[Node], place: Place) -> Sequence[Node]:
        """Follows the values into an equation, or through an op."""
        match structure_of(place.eqn):
            case jx.Call(jaxpr, inputs, is_inline=True):
                return self._follow(jaxpr, [operands[i] for i in inputs], place)
            case jx.Branches(jaxprs, inputs):
                for k, jaxpr in enumerate(jaxprs):
                    if place.iteration in self._ran[place.body(k).key]:
                        return self._enter(jaxpr, [operands[i] for i in inputs], place.body(k))
            case jx.Loop() as loop:
                n, body = len(place.iteration), place.body(int(loop.length is None))
                if ran := dict.fromkeys(x[n] for x in self._ran[body.key] if x[:n] == place.iteration):
                    return self._follow_loop(loop, operands, place, ran)
        return self._check(operands, place)

    def _enter(self, jaxpr: Any, args: Sequence[Node], place: Place) -> list[Node]:
        """Follows the values through the jaxpr of a loop or a branch."""
        inner = [self._add(Node(x.summary, place, (*ARGUMENT, j), source=x)) for j, x in enumerate(args)]
        return self._follow(jaxpr, inner, place)

    def _follow_loop(self, loop: jx.Loop, operands: list[Node], place: Place, ran: Iterable[int]) -> Sequence[Node]:
        """Follows the values through the iterations of a loop, in the order in which they ran."""
        carry, ys = operands[loop.carry], dict[int, list[Node]]()
        for i in ran:
            args = [*operands[loop.consts], *carry, *operands[loop.xs]]
            outs = self._enter(loop.body, args, place.body(int(loop.length is None), i))
            carry, ys[i] = outs[: loop.n_carry], outs[loop.n_carry :]
        columns = enumerate(zip(*(ys[i] for i in sorted(ys)), strict=True), loop.n_carry)
        stacked = [self._add(Node(self._summaries.get((*place.id, j), Summary()), operands=x)) for j, x in columns]
        return [self._add(Node(x.summary, place, (j,), source=x)) for j, x in enumerate([*carry, *stacked])]

    def _check(self, operands: list[Node], place: Place) -> list[Node]:
        """Follows the values through an op, and notes whether it made its results non-finite."""
        outs = [self._add(Node(summary_of(x.aval), place, (k,), operands)) for k, x in enumerate(place.eqn.outvars)]
        is_new = all(x.is_finite for x in operands) or any(x.summary.nans for x in outs)
        found = [x for x in outs if not x.is_finite]
        if found and is_new and not any(x.causes or x.summary.nans for x in operands):
            self.nonfinite.append(found[0])
            for x in found:
                x.causes = frozenset(found[:1])
        return outs


def _evaluate(jaxpr: Any, args: Sequence[Any], place: Place, visit: Callable, constant: Callable) -> list[Any]:
    """Evaluates the jaxpr at `place` by `visit`, which is given the operands and the place of each equation."""
    indices = itertools.count()
    apply = lambda eqn, operands: visit(operands, place.of(next(indices), eqn))  # noqa: E731
    literal = lambda atom: constant(np.asarray(atom.val, jx.dtype_of(atom)), is_literal=True)  # noqa: E731
    return jx.evaluate(jaxpr, args, apply, constant, literal)


def _where(predicate: Any, new: Any, old: Any) -> Any:
    """Returns the next carry of a `while` loop under `vmap`, where the elements that are done keep their values."""
    return lax.select(lax.broadcast_in_dim(predicate, new.shape, range(predicate.ndim)), new, old.astype(new.dtype))


def structure_of(eqn: JaxprEqn) -> jx.Structure | None:
    """Returns how an equation holds jaxprs. That of a `shard_map` over one device can be evaluated in its place."""
    structure = jx.structure_of(eqn)
    is_on_one = eqn.primitive.name == "shard_map" and eqn.params["mesh"].size == 1
    return structure._replace(is_inline=True) if is_on_one and isinstance(structure, jx.Call) else structure


def _communicates(eqn: JaxprEqn) -> bool:
    """Whether an op is a collective, or tells the index of a device: of one device, since others are not entered."""
    axes = eqn.params.get("axes", eqn.params.get("axis_name"))
    return any(isinstance(x, str) for x in (axes if isinstance(axes, tuple) else (axes,)))


def applies_loss_scale(eqn: JaxprEqn) -> bool:
    """Whether an equation multiplies the loss, or the cotangent of the loss, by the scale of `amp.value_and_grad`."""
    return eqn.primitive.name == "mul" and LOSS_SCALE in jx.marks_in(eqn.source_info.name_stack)


def _zero_nonfinite(x: Any) -> jax.Array:
    return jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x))


@contextlib.contextmanager
def precise(wide: Any) -> Any:
    """A context in which JAX computes in a wide dtype."""
    products = contextlib.nullcontext() if wide is None else jax.default_matmul_precision("highest")
    with products, jax.enable_x64(True) if wide == FLOAT64 else contextlib.nullcontext():
        yield


def _wider(dtype: Any, wide: Any) -> Any:
    """Returns `wide`, or the complex dtype of its precision, for a narrower floating dtype; else `dtype`."""
    is_inexact = isinstance(dtype, np.dtype) and jnp.issubdtype(dtype, jnp.inexact)
    return np.promote_types(dtype, wide) if is_inexact else dtype


def widened(x: Any, wide: Any) -> Any:
    """Returns an array in a wide dtype."""
    return lax.convert_element_type(x, _wider(x.dtype, wide)) if jx.is_inexact(x) else x


def as_traced(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Returns operands in the dtypes that an equation was traced in."""
    pairs = zip(operands, eqn.invars, strict=True)
    return [x.astype(jx.dtype_of(atom)) if jx.is_inexact(x) else x for x, atom in pairs]


def keeps_dtypes(eqn: JaxprEqn) -> bool:
    """Whether an op runs in the dtypes that it was traced in, whatever those of the evaluation."""
    rule = rule_of(eqn)
    has_program = bool(jx.inner_jaxprs(eqn)) and not rule.jaxpr_params
    return eqn.primitive.name in _KEEP_DTYPES or rule.is_kernel or has_program


def evaluate_in(wide: Any, eqn: JaxprEqn, operands: Sequence[Any], narrow: Any = None) -> list[Any] | None:
    """Evaluates an op in a wide dtype, also in place of the dtype `narrow`; None if the op does not run in it."""
    if eqn.primitive.name == "reduce_precision":
        return [widened(operands[0], wide)]
    if keeps_dtypes(eqn):
        return None
    if narrow is None and not any(map(jx.is_inexact, (*eqn.invars, *eqn.outvars))):
        return jx.apply_as_traced(eqn, operands)
    rule = rule_of(eqn)
    # A dtype of no operand and no result, such as that of a scale for float8, is no dtype to compute in.
    dtypes = [*map(jx.dtype_of, (*eqn.invars, *eqn.outvars)), narrow]
    wider = {x: wide if x == narrow else _wider(x, wide) for x in dtypes if isinstance(x, np.dtype)}
    params = {k: wider.get(x, x) if isinstance(x, np.dtype) else x for k, x in eqn.params.items()}
    try:
        params |= {name: jx.retyped(params[name], wide) for name in rule.jaxpr_params if params[name] is not None}
        if rule.is_product and "precision" in params:
            params["precision"] = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
        with jx.versions.origin_of(eqn):
            return jx.bind(eqn, [widened(x, wide) for x in operands], **params)
    except Exception:  # a custom primitive may reject other dtypes, and a reference a cast, with any error
        return None
