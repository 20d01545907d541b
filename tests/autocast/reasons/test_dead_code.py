"""Code whose results nothing reads changes no decision: XLA drops it, so it must not cost precision or speed."""

import functools

import jax
import jax.numpy as jnp
import pytest
from exact_programs import LOW_LOOPS, W, X
from exact_programs import PROGRAMS as PROGRAMS_OF_FACTS
from jax import lax
from jax.interpreters import partial_eval
from jaxprs import row, scoped_equations_of
from programs import PROGRAMS

import jmp_amp as amp
from jmp_amp import _jaxpr as jx

pytestmark = pytest.mark.usefixtures("users_code")

CASES = {name: each.make for name, each in PROGRAMS.items() if each.group != "frameworks"}
CASES |= {name: lambda each=each: (each[0], each[1:]) for name, each in PROGRAMS_OF_FACTS.items()}
CASES |= {name: lambda fun=fun: (fun, (X,)) for name, fun in LOW_LOOPS.items()}


def low(x):
    """Reads an array in ops that may be low precision, also in calls and branches."""
    x.reshape(1, -1) @ jnp.tanh(x).reshape(-1, 1)
    jax.jit(dead(lambda x: (2 * x, x.T)))(x)
    lax.cond(True, dead(lambda x: x + 1), dead(lambda x: 2 * x), x)


def full(x):
    """Reads an array in ops that are float32 and that ask products for it, also in loops that add it up."""
    y = x.reshape(1, -1) @ jnp.sin(x).reshape(-1, 1)
    lax.top_k(jnp.log(y[0]), 1)
    jnp.round(y).astype(int)
    lax.scan(dead(lambda c, _: (0.5 * c + x, c)), x, length=2)
    lax.while_loop(dead(lambda c: jnp.sum(c) < 3), dead(lambda c: c + x), x)


def dead(fun):
    """Returns `fun` in a scope that names its ops, in the jaxprs that hold them too."""

    def named(*args):
        with jax.named_scope("dead"):
            return fun(*args)

    return named


def with_dead_code(fun, *readers):
    """Returns `fun` where readers, whose results nothing reads, follow each op, in the bodies of loops too."""

    def apply(eqn, operands):
        entry, structure = jx.HIGHER_ORDER.get(eqn.primitive.name), jx.structure_of(eqn)
        if structure is None or entry.run is None or getattr(structure, "rule", None) is not None:
            outs = jx.apply_as_traced(eqn, operands)
        else:
            outs = entry.run(eqn, [body(jaxpr) for jaxpr, _ in jx.entries(structure)], operands)
        for out in outs:
            read(out)
        return list(outs)

    def read(out):
        if getattr(out, "dtype", None) == jnp.float32 and 0 < out.size < 5000:
            for reader in readers:
                dead(reader)(out)

    def body(jaxpr):
        return jx.Body(functools.partial(run, jaxpr), [var.aval for var in jx.open_jaxpr(jaxpr)[0].invars])

    def run(jaxpr, *args):
        for arg in args:
            read(arg)
        return jx.evaluate(jaxpr, args, apply)

    def with_readers(*args):
        closed, out = jax.make_jaxpr(fun, return_shape=True)(*args)
        return jax.tree.unflatten(jax.tree.structure(out), run(closed, *jax.tree.leaves(args)))

    return with_readers


def plan(fun, args):
    """Returns the dtypes of each live op but casts, which another reader may have made before."""
    jaxpr = jax.make_jaxpr(fun)(*args).jaxpr
    live, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    found = [eqn for scope, eqn in scoped_equations_of(live) if "dead" not in scope and not jx.inner_jaxprs(eqn)]
    return [f"{eqn.primitive.name}: {row(eqn)}" for eqn in found if eqn.primitive.name != "convert_element_type"]


@pytest.mark.sweep(90)
@pytest.mark.parametrize("name", CASES)
def test_code_that_nothing_reads_changes_no_decision(name):
    fun, args = CASES[name]()
    for dtype in ("float16", "bfloat16"):
        want = plan(amp.autocast(with_dead_code(fun), dtype), args)
        for reader in (low, full):
            assert plan(amp.autocast(with_dead_code(fun, reader), dtype), args) == want, (dtype, reader)


EXTRA_CARRIES = {
    "an accumulator": lambda c, y: c + y.T @ y,
    "a recurrence": lambda c, y: W @ c + y.T @ y,
    "a gated sum": lambda c, y: jax.nn.sigmoid(y.T @ y) * c + y.T @ y,
    "another product": lambda c, y: y.T @ jnp.tanh(y),
}


@pytest.mark.parametrize("extra", EXTRA_CARRIES)
def test_a_carry_that_nothing_reads_changes_no_decision(extra):
    def body(carry, x):
        h, c = carry
        y = 30 * (h + x) @ W
        return (jnp.sin(y), EXTRA_CARRIES[extra](c, y)), None

    start = jnp.zeros((6, 8)), jnp.zeros((8, 8))
    for fun in (
        lambda xs: lax.scan(body, start, xs)[0],
        lambda xs: lax.fori_loop(0, 4, lambda i, carry: body(carry, xs[i])[0], start),
    ):
        first = plan(amp.autocast(lambda xs, fun=fun: fun(xs)[0]), (X,))
        both = plan(amp.autocast(fun), (X,))
        assert "dot_general: float32 float32 -> float32" in first  # only sines read it
        assert "dot_general: float16 float16 -> float16" in both
