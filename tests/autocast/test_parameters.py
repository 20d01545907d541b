"""Every parameter of a primitive that holds jaxprs is carried over when it is built again, or listed here."""

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.layout import Format, Layout
from jax.interpreters import batching
from jax.sharding import AxisType, PartitionSpec
from jaxprs import dtypes, equations

import jmp_amp as amp
from jmp_amp._jaxpr import HIGHER_ORDER
from jmp_amp._jaxpr._trace import apply

X, W = jnp.ones((4, 8)) / 8, jnp.eye(8)
ROWS = PartitionSpec("rows")


def product(x):
    return jnp.tanh(x @ W)


@jax.custom_jvp
def with_jvp(x):
    return product(x)


@jax.custom_vjp
def with_vjp(x):
    return product(x)


with_jvp.defjvp(lambda primals, tangents: (product(primals[0]), tangents[0].zeros_like()), symbolic_zeros=True)
with_vjp.defvjp(lambda x: (product(x.value), None), lambda _, cotangent: (cotangent,), symbolic_zeros=True)


def mesh():
    return jax.make_mesh((2, 2), ("rows", "columns"), axis_types=(AxisType.Auto,) * 2)


def jit(x):
    layout = Format(Layout((1, 0)), jax.sharding.NamedSharding(mesh(), ROWS))
    return jax.jit(product, in_shardings=(layout,), out_shardings=layout, donate_argnums=0, keep_unused=True)(x)


def shard_map(x):
    return jax.shard_map(product, mesh=mesh(), in_specs=ROWS, out_specs=ROWS, axis_names={"rows"}, check_vma=False)(x)


def remat(x):
    policy = jax.checkpoint_policies.everything_saveable
    return jax.checkpoint(lambda x, w: jnp.tanh(x @ w), prevent_cse=(True, False), policy=policy)(x, W)


# A program of each primitive, with as many parameters as can be other than the default.
PROGRAMS = {
    "jit": jit,
    "remat2": remat,
    "custom_jvp_call": with_jvp,
    "custom_vjp_call": with_vjp,
    "shard_map": shard_map,
    "cond": lambda x: lax.platform_dependent(x, cpu=product, tpu=jnp.sin, default=jnp.cos),
    "scan": lambda x: lax.scan(lambda x, y: (product(x), y), x, jnp.ones(6), reverse=True, unroll=3)[0],
    "while": lambda x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, product(c[1])), (0, x))[1],
}
CARRIED = {
    "jit": """in_shardings out_shardings in_layouts out_layouts donated_invars ctx_mesh name keep_unused inline
        compiler_options_kvs""",
    "remat2": "prevent_cse differentiated",
    "custom_jvp_call": "symbolic_zeros",
    "custom_vjp_call": "symbolic_zeros",
    "shard_map": "mesh in_specs out_specs check_vma newly_manual_axes",
    "cond": "branches_platforms",
    "scan": "length reverse unroll",
    "while": "",
}
MADE_ANEW = {  # jaxprs, derivatives, and how many operands are what
    "jit": "jaxpr",
    "remat2": "jaxpr policy",  # the policy saves float8 products where it saves others
    "custom_jvp_call": "call_jaxpr jvp_jaxpr_fun num_consts",
    "custom_vjp_call": "call_jaxpr fwd_jaxpr_thunk bwd out_trees num_consts",
    "shard_map": "jaxpr",
    "cond": "branches",
    "scan": "jaxpr num_consts num_carry ft_in ft_out",  # the last two since JAX 0.11, for the two before
    "while": "cond_jaxpr cond_nconsts body_jaxpr body_nconsts",
}
INLINED = {"call": "call_jaxpr", "closed_call": "call_jaxpr", "eval_jaxpr": "call_jaxpr"}


def equation(fun, name):
    return next(eqn for eqn in jax.make_jaxpr(fun)(X).eqns if eqn.primitive.name == name)


def test_every_primitive_that_holds_a_jaxpr_is_listed():
    others = {"custom_linear_solve", "call_hi_primitive", "cast_inputs"}  # jaxprs, or functions, of their own
    assert set(HIGHER_ORDER) == set(PROGRAMS) | set(INLINED) | others
    assert {name for name, entry in HIGHER_ORDER.items() if entry.run is None} == {"custom_linear_solve", "cast_inputs"}
    assert set(PROGRAMS) == set(CARRIED) == set(MADE_ANEW)


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_parameter_is_carried_over_or_made_anew(name):
    params = equation(PROGRAMS[name], name).params
    carried, anew = CARRIED[name].split(), MADE_ANEW[name].split()
    unknown = set(params) - set(carried) - set(anew)
    assert not unknown, f"carry these parameters of `{name}` over where it is built again, and list them here"
    assert dtypes(amp.autocast(PROGRAMS[name]), X, primitive="dot_general") == ["float16 float16 -> float16"]
    rebuilt = equation(amp.autocast(PROGRAMS[name]), name).params
    assert set(rebuilt) == set(params)
    assert {key: rebuilt[key] for key in carried} == {key: params[key] for key in carried}


@pytest.mark.parametrize("name", ["call_p", "closed_call_p"])
def test_a_plain_call_has_a_jaxpr_only_and_is_inlined(name):
    primitive = getattr(jex_core.primitives, name)

    def fun(x):
        jaxpr = jax.make_jaxpr(lambda x: jnp.tanh(x @ x.T))(x)
        return apply(primitive, {"call_jaxpr": jaxpr.jaxpr if primitive.name == "call" else jaxpr}, [x])[0]

    (eqn,) = jax.make_jaxpr(fun)(X).eqns
    assert set(eqn.params) == {INLINED[eqn.primitive.name]}
    assert not {e.primitive.name for e in equations(amp.autocast(fun), X)} & set(INLINED)
    assert dtypes(amp.autocast(fun), X, primitive="dot_general") == ["float16 float16 -> float16"]


foreign_p = jex_core.Primitive("of_another_platform")  # compiles nowhere
foreign_p.def_abstract_eval(lambda x: x)
batching.defvectorized(foreign_p)

WAYS = {
    "eager": lambda fun: fun(X),
    "jit": lambda fun: jax.jit(fun)(X),
    "vmap": lambda fun: jax.vmap(fun)(X[None])[0],
    "jit of vmap": lambda fun: jax.jit(jax.vmap(fun))(X[None])[0],
    "remat": lambda fun: jax.jit(jax.checkpoint(fun))(X),
    "scan": lambda fun: jax.jit(lambda x: lax.scan(lambda x, _: (fun(x), None), x, length=1)[0])(X),
}
PLATFORMS = {
    "a branch of its own": lambda x: lax.platform_dependent(x, cpu=product, tpu=foreign_p.bind),
    "the default": lambda x: lax.platform_dependent(x, tpu=foreign_p.bind, default=product),
    "one branch for two": lambda x: lax.platform_dependent(x, tpu=product, cpu=product, cuda=foreign_p.bind),
    "the default only": lambda x: lax.platform_dependent(x, default=product),
}


@pytest.mark.sweep(15)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PLATFORMS)
@pytest.mark.parametrize("inner", [lambda f: f, jax.jit], ids=["", "jit"])
def test_of_a_platform_dependent_program_only_the_branch_of_the_platform_is_compiled(name, way, inner):
    fun = PLATFORMS[name]
    got = WAYS[way](amp.autocast(inner(lambda x: jnp.sin(fun(x @ W)))))
    np.testing.assert_allclose(got, jnp.sin(product(X @ W)), rtol=1e-2)


def test_a_platform_dependent_program_is_differentiated():
    def loss(x):
        return jnp.sum(lax.platform_dependent(x, cpu=product, tpu=jnp.sin))

    for fun in (jax.grad(amp.autocast(loss)), jax.jit(jax.grad(amp.autocast(loss))), amp.autocast(jax.grad(loss))):
        np.testing.assert_allclose(fun(X), jax.grad(loss)(X), rtol=1e-2)
