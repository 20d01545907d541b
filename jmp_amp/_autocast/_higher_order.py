"""Plans equations that hold jaxprs: calls, branches and loops."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from jmp_amp import _jaxpr as jx
from jmp_amp._autocast._decide import Context
from jmp_amp._autocast._derivatives import with_rule
from jmp_amp._autocast._plan import Plan, Region, Run, Step, differs, is_loop_invariant
from jmp_amp._autocast._planner import Planner
from jmp_amp._autocast._values import Origin, Reads, Stream, Use, Value, ValueFacts, join
from jmp_amp._formats import AS_TRACED, FLOAT32
from jmp_amp._ops import Demand
from jmp_amp._products import as_products


def plan_higher_order(planner: Planner, op: Context) -> Step:
    """Decides an equation that holds jaxprs."""
    structure = op.info.structure
    if isinstance(structure, jx.Call):
        return _call(planner, structure, op)
    return _loop(planner, structure, op) if isinstance(structure, jx.Loop) else _branches(planner, op)


def _call(planner: Planner, call: jx.Call, op: Context) -> Step:
    """Casts inputs that the body reads only in float32 before the call, so that other readers share the cast.

    A call that keeps its inputs for the backward pass gets them as they are: float32 would take more memory.
    """
    eqn, entry = op.info.eqn, jx.HIGHER_ORDER[op.info.eqn.primitive.name]
    if entry.structure_low is not None and op.region.format.is_low:
        return _as_traced(planner, entry.structure_low(eqn), op, "cast_inputs")
    if entry.run is None:
        return _as_traced(planner, call, op, "decomposition")
    # A rule may write to a reference, or return the gradient of what it holds; only JAX knows how.
    if call.rule is not None and any(map(jx.is_reference, eqn.invars)):
        return _as_traced(planner, call, op, "reference")
    ((jaxpr, facts, demands),) = op.inside
    values = _with_facts(op.values, facts)
    uses = tuple(use._replace(demand=each) for use, each in zip(op.neighbours.uses, demands, strict=True))
    is_checkpoint = jx.versions.is_checkpoint(eqn.primitive, **eqn.params)
    region = op.region._replace(is_checkpointed=op.region.is_checkpointed or is_checkpoint)
    first = planner.plan(jaxpr, values, uses, region)
    reads = _stored(first.reads) if entry.keeps_inputs else list(first.reads)
    triples = zip(values, reads, map(jx.dtype_of, eqn.invars), strict=True)
    cast = tuple([v.as_float32() if each == Reads.FUSED and dtype == FLOAT32 else v for v, each, dtype in triples])
    plan = planner.plan(jaxpr, cast, uses, region)
    op = op._replace(info=op.info._replace(eqn=jx.versions.with_policy(eqn, as_products)))
    step = _step(op, cast, reads, plan.outs, [plan], [plan.body()])
    if is_checkpoint and not planner.options.keeps_checkpoints:
        return step._replace(run=functools.partial(jx.run_inline, eqn, [plan.body()]), changed=True)
    return step._replace(run=with_rule(planner, call.rule, eqn, plan)) if call.rule and plan.changed else step


def _as_traced(planner: Planner, call: jx.Call, op: Context, why: str) -> Step:
    """Runs an equation in the dtypes that its jaxpr was traced in; this is planned only for `explain`."""
    opened, _ = jx.open_jaxpr(call.jaxpr)
    inner = dict(zip(call.operands, opened.invars, strict=True))
    dtypes = [jx.dtype_of(inner.get(i, atom)) for i, atom in enumerate(op.info.eqn.invars)]
    cast = tuple([value._replace(dtype=dtype) for value, dtype in zip(op.values, dtypes, strict=True)])
    inputs, uses = tuple(cast[i] for i in call.operands), (Use(),) * len(opened.outvars)
    plan = planner.plan(call.jaxpr, inputs, uses, op.region._replace(format=AS_TRACED, why=why))
    outs = [Value(jx.dtype_of(atom)) for atom in opened.outvars]
    return _step(op, cast, [Reads.FUSED] * len(cast), outs, [plan], [])


def _branches(planner: Planner, op: Context) -> Step:
    """Gives each result of `cond` or `switch` the widest of its dtypes in the branches."""
    uses = op.neighbours.uses
    reads, streams = _stored([use.reads for use in uses]), [use.stream for use in uses]
    plans = [
        planner.plan(branch, _with_facts(op.values[1:], facts), tuple(map(Use, demands, streams, reads)), op.region)
        for branch, facts, demands in op.inside
    ]
    outs = tuple(functools.reduce(join, each) for each in zip(*[plan.outs for plan in plans], strict=True))
    reads = _stored([Reads.LOW, *map(min, zip(*[plan.reads for plan in plans], strict=True))])
    return _step(op, op.values, reads, outs, plans, [plan.body(outs) for plan in plans])


def _loop(planner: Planner, loop: jx.Loop, op: Context) -> Step:
    """Gives each carry of a loop the dtype that the body returns for it."""
    values, atoms = op.values, op.info.eqn.invars[loop.carry]
    *of_cond, (body, facts, demands) = op.inside
    consts = tuple(value._replace(save_cast=True) for value in values[loop.consts])
    inputs = list(_with_facts((*consts, *values[loop.carry], *map(_sliced, values[loop.xs])), facts))
    streams = [use.stream & Stream.RETURNED and use.stream for use in op.neighbours.uses]
    if planner.options.has_low_stream and op.region.format.is_low:
        streams = planner.streams.of_body(loop, op.is_input[loop.xs], streams)
    reads = [Reads.LOW] * loop.n_carry + _stored([use.reads for use in op.neighbours.uses[loop.n_carry :]])
    uses = tuple(map(Use, demands, streams, reads))

    def plan_of(carries: list[Carry]) -> Plan:
        inputs[loop.body_carry] = [carry.value for carry in carries]
        return planner.plan(body, tuple(inputs), uses, op.region)

    starts, are_streams = map(_first_value, values[loop.carry], atoms), [each == Stream.NORM for each in streams]
    starting = list(map(Carry, starts, facts[loop.body_carry], map(jx.dtype_of, atoms), are_streams))
    carries, plan = _plan_carries(plan_of, starting, op.region.format.dtype)
    carry = tuple(each.value for each in carries)
    conds = [
        planner.plan(cond, _with_facts((*values[loop.cond_consts], *carry), facts), tuple(map(Use, demands)), op.region)
        for cond, facts, demands in of_cond
    ]
    # A stacked result that is also carried has the dtype of the carry.
    stored = dict(zip(map(id, plan.signature.outvars), carry, strict=False))
    stacked = list(zip(plan.signature.outvars, plan.outs, strict=True))[loop.n_carry :]
    outs = (*carry, *[Value(stored.get(id(var), out).dtype) for var, out in stacked])
    if loop.cond is None:  # JAX adds up the cotangents of a constant over the iterations in its dtype: float32
        consts = tuple(value.as_float32() if value.is_half else value for value in consts)
    cast = (*values[loop.cond_consts], *consts, *carry, *values[loop.xs])
    of_inputs = list(plan.reads)
    of_inputs[loop.body_carry] = [Reads.FUSED if value.dtype == FLOAT32 else Reads.LOW for value in carry]
    reads = _stored([each for cond in conds for each in cond.reads[loop.cond_consts]] + of_inputs)
    keeper = _keeper(planner, plan, body, op.region) if loop.cond is None else None
    policy = planner.is_saved if keeper == "autocast" else None
    bodies = [*[cond.body() for cond in conds], plan.body(outs, policy, (*consts, *plan.inputs[loop.n_consts :]))]
    return _step(op, cast, reads, outs, [*conds, plan], bodies)._replace(keeper=keeper)


def _sliced(value: Value) -> Value:
    """Describes the slices of a value along its first axis."""
    axes = tuple(frozenset(axis - 1 for axis in each if axis) for each in value.axes)
    is_scalar = value.origin is Origin.INPUT and axes == (frozenset(),)
    return value._replace(axes=axes, origin=Origin.SCALAR if is_scalar else value.origin)


class Carry(NamedTuple):
    """A carry of a loop, as it enters the body.

    Attributes:
        value: what is known of it.
        facts: the facts that hold in every iteration; those of an accumulator or a recurrence have a `carry`.
        traced: the dtype that it was traced in.
        is_stream: whether it may be a residual stream.
        keeps: the dtype that it keeps, to which the values that replace it are cast if they fit; None if these may
            widen it.
    """

    value: Value
    facts: ValueFacts
    traced: Any
    is_stream: bool
    keeps: Any = None

    def keeping(self, dtype: Any) -> "Carry":
        """Returns the carry with a dtype that it keeps, or with None."""
        known = self.facts if dtype is self.traced else self.facts._replace(carry=Demand.NONE)
        value = self.value if dtype is None else self.value._replace(dtype=dtype, data_dtype=None)
        return self._replace(value=value._replace(known=known), keeps=dtype)

    def replaced(self, out: Value) -> "Carry":
        """Returns the carry that the body may replace by `out`."""
        is_cast = self.keeps is not None and self.keeps != out.dtype
        if is_cast and (self.keeps == FLOAT32 or not out.overflows(self.keeps)):
            out = out._replace(dtype=self.keeps)
        return self._replace(value=join(self.value, out)._replace(known=self.value.known))


def _plan_carries(plan_of: Callable[[list[Carry]], Plan], carries: list[Carry], low: Any) -> tuple[list[Carry], Plan]:
    """Returns the carries of a loop in the dtypes that its body returns for them, and the plan of the body.

    An array that the caller passes in is state, not a bias, and keeps its dtype. A constant takes the dtype of the
    values that replace it, as `jnp.zeros(n)` in front of `h = jnp.tanh(x + h @ w)`. Accumulators (`c + x`) and
    recurrences (`a @ c`) keep the dtypes that they were traced in.

    Args:
        plan_of: plans the body for the carries that enter it.
        carries: as they enter the first iteration.
        low: the compute dtype, which residual streams have if the body makes them of such data.
    """
    while any(carry.is_stream for carry in carries):
        started = [c.keeping(low if c.is_stream else c.traced if c.facts.carry else None) for c in carries]
        settled, plan = _settled(plan_of, started)
        is_low = [out.as_data().dtype == low for out in plan.outs]
        before, carries = carries, [c._replace(is_stream=c.is_stream and is_low[i]) for i, c in enumerate(carries)]
        if carries == before:
            return settled, plan
    others = [c for c in carries if c.traced == FLOAT32 and not c.facts.carry]
    if any(c.value.dtype != FLOAT32 or c.value.origin is Origin.SCALAR for c in others):
        # In an LSTM, `c = f * c + i * g; h = o * jnp.tanh(c)`: the cell `c` is an accumulator, and `h` is low
        # precision. A carry computed from an accumulator has the dtype that it would have if that were rounded.
        carries, _ = _settled(plan_of, [carry.keeping(None) for carry in carries])
    return _settled(plan_of, [c.keeping(c.traced if c.facts.carry else c.value.dtype) for c in carries])


def _settled(plan_of: Callable[[list[Carry]], Plan], carries: list[Carry]) -> tuple[list[Carry], Plan]:
    """Plans the body until it returns the carries that it gets. This ends because `join` only widens."""
    before = None
    while before != carries:
        before, plan = carries, plan_of(carries)
        carries = list(map(Carry.replaced, carries, plan.outs))
    return carries, plan


def _first_value(value: Value, atom: Any) -> Value:
    """Describes a carry before the first iteration; low-precision values may replace a constant."""
    if jx.dtype_of(atom) != FLOAT32 or not jx.shape_of(atom):
        return value
    # One constant number, or a carry of the loop around this one that starts as such a constant.
    is_number = value.origin is Origin.SCALAR and (value.known.is_constant or not value.filled)
    if is_number or (value.origin is Origin.INPUT and value.known.size == 0):
        return value._replace(origin=Origin.SCALAR, axes=(), filled=False)
    return Value(value.dtype)


def _keeper(planner: Planner, plan: Plan, body: Any, region: Region) -> str:
    """Returns who decides what the backward pass of a `scan` keeps.

    Of nested policies of `jax.checkpoint`, JAX follows the outermost. One around the body would override the user's.
    """
    if region.is_checkpointed or jx.holds(body, jx.versions.is_checkpoint):
        return "jax.checkpoint"
    # `checkify` cannot rewrite a `jax.checkpoint` whose checks need constants.
    is_fixed = jx.versions.has_effects(plan.signature) or any(jx.versions.are_running("checkify"))
    return "autocast" if planner.options.saves_products and not is_fixed else "JAX"


def _with_facts(values: Sequence[Value], facts: Sequence[ValueFacts]) -> tuple[Value, ...]:
    return tuple(value._replace(known=each) for value, each in zip(values, facts, strict=True))


def _stored(reads: Iterable[int]) -> list[int]:
    """Returns in which dtype values are read that are stored in memory."""
    return [Reads.STORED if each == Reads.FUSED else each for each in reads]


def _step(
    op: Context, new: Sequence[Value], reads: list[int], outs: Sequence[Value], plans: list[Plan], bodies: list[jx.Body]
) -> Step:
    """Returns the decision for an equation: casts to its `new` operands, and other bodies if a plan changes one."""
    eqn, entry = op.info.eqn, jx.HIGHER_ORDER[op.info.eqn.primitive.name]
    casts = tuple(n.dtype if n.dtype != v.dtype else None for v, n in zip(op.values, new, strict=True))
    changed = any(plan.changed for plan in plans) or differs(zip(eqn.invars, new, strict=True))
    run: Run = functools.partial(jx.bind, eqn)
    if changed and bodies and entry.run is not None:
        run = functools.partial(entry.run, eqn, bodies)
        if isinstance(op.info.structure, jx.Loop):  # arrays that it does not change are cast once, before it
            run = functools.partial(jx.run_loop, is_loop_invariant, eqn, bodies)
    return Step(eqn, op.region, casts, tuple(outs), run, changed, tuple(reads), inner=tuple(plans))
