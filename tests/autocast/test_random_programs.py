"""Random programs compute under autocast what they compute without it; see `random_programs.py`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Literal
from random_programs import INPUTS, random_program
from rebuilt import all_plans_changed, rebuilt_identity

import jmp_amp as amp
from jmp_amp._jaxpr import open_jaxpr, structure_of
from jmp_amp._jaxpr._trace import apply

pytestmark = [
    pytest.mark.sweep(753),
    pytest.mark.filterwarnings("ignore:autocast has no rule for `custom_vmap_call`"),
]
SEEDS = range(1000)


# An evaluator of jaxprs that runs op by op, since programs take longer to compile than to run.


def evaluate(jaxpr, args):
    opened, consts = open_jaxpr(jaxpr)
    env = dict(zip((*opened.constvars, *opened.invars), (*consts, *args), strict=True))

    def read(atom):
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in opened.eqns:
        results = RUNS.get(eqn.primitive.name, run_op)(eqn, list(map(read, eqn.invars)))
        env.update(zip(eqn.outvars, results, strict=True))
    return [jnp.asarray(read(atom), atom.aval.dtype) for atom in opened.outvars]


def run_op(eqn, args):
    return apply(eqn.primitive, eqn.params, args)


def run_call(eqn, args):
    return evaluate(eqn.params["jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"], args)


def run_cond(eqn, args):
    index, *operands = args
    branches = eqn.params["branches"]
    return evaluate(branches[np.clip(int(index), 0, len(branches) - 1)], operands)


def run_scan(eqn, args):
    loop = structure_of(eqn)
    consts, carry, xs = args[loop.consts], args[loop.carry], args[loop.xs]
    steps, rows = range(loop.length), {}
    for i in reversed(steps) if eqn.params["reverse"] else steps:
        results = evaluate(loop.body, [*consts, *carry, *(x[i] for x in xs)])
        carry, rows[i] = results[: loop.n_carry], results[loop.n_carry :]
    if not rows:
        return [*carry, *(jnp.zeros(var.aval.shape, var.aval.dtype) for var in eqn.outvars[loop.n_carry :])]
    return [*carry, *map(jnp.stack, zip(*(rows[i] for i in steps), strict=True))]


def run_while(eqn, args):
    loop = structure_of(eqn)
    carry = args[loop.carry]
    while True:
        (go,) = evaluate(loop.cond, [*args[loop.cond_consts], *carry])
        if not jnp.any(go):
            return carry
        new = evaluate(loop.body, [*args[loop.consts], *carry])
        carry = [
            jnp.where(go.reshape(go.shape + (1,) * (x.ndim - go.ndim)), x, y) for x, y in zip(new, carry, strict=True)
        ]


CALLS = ("jit", "closed_call", "eval_jaxpr", "remat2", "custom_jvp_call", "custom_vjp_call")
RUNS = {**dict.fromkeys(CALLS, run_call), "cond": run_cond, "scan": run_scan, "while": run_while}


def types(closed, but=()):
    """Returns what the type of each result says."""
    names = {"shape", "dtype", "weak_type"}.difference(but)
    return [{name: getattr(x, name) for name in names} for x in closed.out_avals]


def data(x):
    """Returns an array that NumPy compares."""
    x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return np.asarray(x, np.float32 if x.dtype == jnp.bfloat16 else x.dtype)


def values(closed):
    return list(map(data, evaluate(closed, INPUTS)))


def loss(fun):
    """Returns the sum of the first result."""
    return lambda *args: jnp.sum(fun(*args)[0])


def batched(fun):
    """Returns the function of batches of two of each input."""
    return lambda *args: jax.vmap(fun)(*[jnp.stack([x, x * x]) for x in map(jnp.asarray, args)])


def scanned(fun):
    return lambda *args: lax.scan(lambda x, _: (fun(x, *args[1:])[0], fun(x, *args[1:])), args[0], None, 2)


def second_derivative(fun):
    return jax.grad(lambda *args: jnp.sum(jnp.sin(jax.grad(loss(fun))(*args))))


# What stands around a program, and what it must have for that.
WAYS = {
    "scan": (scanned, {}),
    "grad": (lambda fun: jax.grad(loss(fun)), {"is_differentiable": True}),
    "vmap": (batched, {"has_effects": False}),
    "second derivative": (second_derivative, {"is_differentiable": True, "has_effects": False}),
    "vmap of grad": (lambda fun: batched(jax.grad(loss(fun))), {"is_differentiable": True, "has_effects": False}),
    "grad of checkpoint": (
        lambda fun: jax.grad(loss(jax.checkpoint(fun))),
        {"is_differentiable": True, "has_effects": False},
    ),
}


class Program:
    """A random program, alone and with one of `WAYS` around it."""

    def __init__(self, seed):
        way, (around, allowed) = list(WAYS.items())[seed % len(WAYS)]
        self.fun, self.around = random_program(seed, **allowed), around
        self.alone = jax.make_jaxpr(self.fun)(*INPUTS)
        # pytest shows this where a test fails
        print(f"{way!r} of random_program({seed}, **{allowed}), which is\n{self.alone}")
        self.within = jax.make_jaxpr(around(self.fun))(*INPUTS)

    def compare(self, autocast, assert_agree):
        """Checks types, and whether values agree, under autocast."""
        fun = autocast(self.fun)
        alone, within = jax.make_jaxpr(fun)(*INPUTS), jax.make_jaxpr(self.around(fun))(*INPUTS)
        assert types(alone) == types(self.alone)
        # Some rules of `vmap` lose a weak type; autocast gives results the weak types that they have without `vmap`.
        assert types(within, but={"weak_type"}) == types(self.within, but={"weak_type"})
        for got, want in ((alone, self.alone), (within, self.within)):
            for x, y in zip(values(got), values(want), strict=True):
                assert_agree(x, y)


@pytest.fixture
def _all_plans_changed():
    with all_plans_changed():
        yield


def assert_equal(x, y):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def assert_as_finite(x, y):
    np.testing.assert_array_equal(np.isfinite(x), np.isfinite(y))


@pytest.mark.usefixtures("_all_plans_changed")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_rebuilt_program_computes_what_the_program_computes(seed):
    Program(seed).compare(rebuilt_identity, assert_equal)


@pytest.mark.parametrize("seed", SEEDS)
def test_in_float16_a_program_runs_and_keeps_its_types(seed):
    Program(seed).compare(amp.autocast, assert_as_finite)


@pytest.mark.usefixtures("_all_plans_changed")
@pytest.mark.parametrize("seed", SEEDS[::19])
def test_a_rebuilt_program_compiles(seed):
    program = Program(seed)
    results = jax.tree.leaves(jax.jit(program.around(rebuilt_identity(program.fun)))(*INPUTS))
    for x, y in zip(map(data, results), values(program.within), strict=True):
        assert_equal(x, y)
