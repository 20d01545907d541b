"""The engine that passes facts through jaxprs: each body is read once for the same facts, and lattices are lattices."""

import collections
import math

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.extend.core import JaxprEqn
from jaxprs import dtypes

import jmp_amp as amp
from jmp_amp._autocast._analyses import Demands, Knowledge
from jmp_amp._autocast._paths import Paths
from jmp_amp._autocast._planner import _PlanBuilder
from jmp_amp._autocast._values import NOTHING, Moment, Squares, ValueFacts
from jmp_amp._jaxpr import Forward, structure_of
from jmp_amp._ops import ORIGINAL, RULES, Demand, EqnInfo

X = jnp.ones((4, 4))
W = jnp.eye(4) / 2

KNOWN = st.builds(
    ValueFacts,
    st.sampled_from([None, 1.0, 2.0]),
    st.sampled_from([math.inf, 1.0, 2.0**-20]),
    *[st.sampled_from([1.0, 4.0, 2.0**20])] * 2,
    st.booleans(),
    st.sampled_from(Squares),
    st.sampled_from(Moment),
    *[st.booleans()] * 3,
    st.sampled_from([Demand.NONE, Demand.TERM, Demand.RECURRENCE, Demand.TERM | Demand.RECURRENCE]),
    st.booleans(),
)
PATHS = st.frozensets(st.tuples(st.integers(0, 3), st.integers(0, 255)), max_size=4)
LATTICES = {
    "known": (Knowledge.join, KNOWN, NOTHING),
    "paths": (Paths.join, PATHS, Paths.bottom),
    "demands": (Demands.join, st.integers(0, 2**18 - 1), Demands.bottom),
}


@pytest.mark.parametrize("name", LATTICES)
@given(data=st.data())
def test_a_join_is_that_of_a_lattice(name, data):
    join, values, bottom = LATTICES[name]
    a, b, c = (data.draw(values) for _ in range(3))
    assert join(None, a, b) == join(None, b, a)
    assert join(None, a, join(None, b, c)) == join(None, join(None, a, b), c)
    assert join(None, a, a) == a
    assert name == "known" or join(None, a, bottom) == a  # data are neither constant nor whole numbers


def infos_of(jaxpr):
    """What is known of equations, each an op of its own."""
    rules = [RULES.get(eqn.primitive.name, ORIGINAL) for eqn in jaxpr.eqns]
    pairs = zip(jaxpr.eqns, rules, strict=True)
    found = [r if not callable(r) else r(e.params, [a.aval for a in e.invars]) for e, r in pairs]
    return [
        EqnInfo(e, r, structure_of(e), (), tuple(e.invars), None, Demand.NONE, False, id(e))
        for e, r in zip(jaxpr.eqns, found, strict=True)
    ]


class Depth(Forward):
    """How many sines a value went through, at most three; counts the equations that it reads."""

    bottom = 0

    def __init__(self):
        super().__init__(infos_of)
        self.read = collections.Counter()

    def join(self, a, b):
        return max(a, b)

    def transfer(self, equation, operands):
        self.read[equation.eqn.primitive.name] += 1
        depth = max(operands, default=0) + (equation.eqn.primitive.name == "sin")
        return [min(depth, 3)] * len(equation.eqn.outvars)


def twice(fun):
    return jax.jit(lambda x: fun(fun(x)))


def nested_calls(depth):
    fun = jnp.sin
    for _ in range(depth):
        fun = twice(fun)
    return fun


def nested_loops(depth, loop):
    """Loops in one another, each of which permutes its carries."""

    def fun(carry):
        a, b, c = carry
        return jnp.tanh(b @ W), c + jnp.tanh(a @ W), jnp.tanh(c @ W)

    def around(inner):
        def body(carry):
            a, b, c = inner(carry)
            return b, c, a

        return {
            "scan": lambda carry: lax.scan(lambda carry, _: (body(carry), None), carry, length=2)[0],
            "fori_loop": lambda carry: lax.fori_loop(0, 2, lambda _, carry: body(carry), carry),
            "while_loop": lambda carry: lax.while_loop(lambda carry: jnp.sum(carry[0]) < 1, body, carry),
        }[loop]

    for _ in range(depth):
        fun = around(fun)
    return fun


def test_calls_in_calls_are_read_once_for_the_same_facts():
    analysis, jaxpr = Depth(), jax.make_jaxpr(nested_calls(14))(X)
    assert analysis.outs(jaxpr, [0]) == (3,)
    assert analysis.read["sin"] <= 8  # two, at each depth at which the innermost function is entered


@pytest.mark.parametrize("fun", [lambda c: jnp.sin(c), lambda c: c + 1, lambda c: jnp.sin(jnp.sin(c))])
def test_what_is_found_in_a_loop_is_found_in_its_iterations_one_after_the_other(fun):
    def loop(c):
        return lax.scan(lambda c, _: (fun(c), c), c, length=9)

    def unrolled(c):
        return fun(fun(fun(c)))

    found = Depth().outs(jax.make_jaxpr(loop)(X), [0])
    assert found[0] == Depth().outs(jax.make_jaxpr(unrolled)(X), [0])[0]


def test_a_while_loop_may_run_not_at_all():
    def loop(x):
        return lax.while_loop(lambda x: jnp.sum(x) > 0, lambda x: jnp.zeros_like(x), jnp.sin(x))

    assert Depth().outs(jax.make_jaxpr(loop)(X), [0]) == (1,)


def planned(fun, *args):
    """How often each jaxpr is planned, and each equation decided."""
    plans, decisions = collections.Counter(), collections.Counter()
    plan, decide = _PlanBuilder.plan, _PlanBuilder._decide

    def counted_plan(self):
        plans[id(self._jaxpr)] += 1
        return plan(self)

    def counted_decide(self, i):
        decisions[id(self._contexts[i].info.eqn)] += 1
        return decide(self, i)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_PlanBuilder, "plan", counted_plan)
        patch.setattr(_PlanBuilder, "_decide", counted_decide)
        jaxpr = jax.make_jaxpr(amp.autocast(lambda *args: fun(*args)))(*args)
    assert jaxpr is not None
    return max(plans.values()), max(decisions.values())


@pytest.mark.sweep(6)
@pytest.mark.parametrize("loop", ["scan", "fori_loop", "while_loop"])
def test_an_equation_is_decided_a_bounded_number_of_times_whatever_the_nesting(loop):
    jax.clear_caches()
    shallow, deep = (planned(nested_loops(depth, loop), (X, X, X)) for depth in (2, 4))
    assert deep <= (4, 12)
    assert deep[0] <= shallow[0] + 2


def test_calls_in_calls_are_planned_a_bounded_number_of_times():
    def fun(x):
        return lax.while_loop(lambda x: jnp.sum(x) < 1, nested_calls(14), x)

    assert planned(fun, X) <= (4, 12)


def test_loops_that_share_a_body_have_conditions_of_their_own():
    w = jnp.eye(8) / 2

    def body(carry):
        a, b = carry
        return jnp.tanh(a @ w), jnp.tanh(b @ w)

    def fun(x):
        first = lax.while_loop(lambda c: jnp.sum(c[0]) > 1, body, (x, x))
        return lax.while_loop(lambda c: jnp.sum(c[1]) > 1, body, first)

    rows = dtypes(amp.autocast(fun), w, primitive="dot_general")
    assert [row.split()[0] for row in rows] == ["float32", "float16", "float16", "float32"]


def test_no_jaxpr_is_printed_while_it_is_traced(monkeypatch):
    """JAX prints a function that has no code, such as a plan."""

    def fun(x):
        layer = jax.jit(lambda x: jnp.tanh(x @ x))
        return lax.while_loop(lambda carry: carry[0] < 3, lambda carry: (carry[0] + 1, layer(carry[1])), (0, layer(x)))

    printed = collections.Counter()
    monkeypatch.setattr(JaxprEqn, "__repr__", lambda eqn: printed.update([eqn.primitive.name]) or "")
    jax.make_jaxpr(amp.autocast(fun))(jnp.ones((8, 8)))
    assert not printed


@pytest.mark.parametrize("loop", ["scan", "while"])
def test_a_loop_is_traced_once_more_than_its_function(loop, monkeypatch):
    """Although the cast of its weight moves out of it."""
    bound, bind = [], lax.tanh_p.bind
    monkeypatch.setattr(lax.tanh_p, "bind", lambda *args, **params: bound.append(args) or bind(*args, **params))

    def fun(w, x, length):
        return lax.fori_loop(0, length if loop == "while" else 3, lambda _, x: lax.tanh(x @ w), x)

    args = jnp.ones((8, 8)), jnp.ones((4, 8)), 3
    eqns = jax.make_jaxpr(amp.autocast(fun, save="all"))(*args).eqns
    assert [eqns[-1].primitive.name, "convert_element_type" in {eqn.primitive.name for eqn in eqns}] == [loop, True]
    traced, bound[:] = len(bound), []
    jax.make_jaxpr(fun)(*args)
    assert traced == len(bound) + 1


def test_a_body_is_read_a_few_times_in_loops_in_loops(monkeypatch):
    """Although a value that grows in each iteration has another size in each."""
    read, find = collections.Counter(), Knowledge._find
    monkeypatch.setattr(Knowledge, "_find", lambda self, jaxpr, given: read.update([jaxpr]) or find(self, jaxpr, given))

    def grown(x, depth):
        return lax.fori_loop(0, 3, lambda _, x: grown(10 * x, depth - 1), x) if depth else x

    jax.make_jaxpr(amp.autocast(lambda x: grown(x, 3)))(jnp.ones(8))
    assert max(read.values()) < 4**3 / 2  # four times for each loop around it, if each began with other sizes


def test_a_barrier_passes_each_value_by_itself():
    def fun(a, x, w):
        solution, x, w = lax.optimization_barrier((jnp.linalg.solve(a, x), x, w))
        return solution, x @ w  # reads no solution

    report = amp.explain(fun, "bfloat16")(jnp.eye(8), jnp.ones((8, 8)), jnp.eye(8))
    rows = report.select(direction="forward", primitive="dot_general").rows
    assert [(row.compute, row.why) for row in rows] == [("bfloat16", "rule")]
