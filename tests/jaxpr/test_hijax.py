"""Primitives and types that users write with `jax.experimental.hijax`, and those that JAX is moving to."""

import dataclasses

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import hijax
from jax.interpreters import ad
from jaxprs import dtypes

import jmp_amp as amp
from jmp_amp._autocast._api import parse_settings, planner_of

pytestmark = pytest.mark.usefixtures("users_code")

HiPrim = getattr(hijax, "HiPrim", None) or hijax.VJPHiPrimitive  # the name up to JAX 0.11
X = jnp.eye(8) * 0.6 + 0.15
FLAGS = [flag for flag in ("jax_remat3", "jax_custom_vjp3", "jax_custom_jvp3") if hasattr(jax.config, flag)]
LOW = {"float16 float16 -> float16"}


class Product(HiPrim):
    def __init__(self, aval):
        self.in_avals, self.out_aval, self.params = (aval,), aval, {"aval": aval}
        super().__init__()

    def expand(self, x):
        return jnp.tanh(x @ x)


class WithCotangent(Product):
    def vjp_fwd(self, nonzeros, x):
        return self(x), x

    def vjp_bwd_retval(self, x, cotangent):
        return (2 * cotangent @ x.T,)  # not the derivative, so that a lost rule is seen


class WithTangent(Product):
    def jvp(self, primals, tangents):
        return self(*primals), 2 * tangents[0] @ primals[0]


class WithBoth(WithCotangent, WithTangent):
    pass


@jax.custom_jvp
def with_jvp(x):
    return jnp.tanh(x @ x)


@jax.custom_vjp
def with_vjp(x):
    return jnp.tanh(x @ x)


with_jvp.defjvp(lambda primals, tangents: (with_jvp(*primals), 2 * tangents[0] @ primals[0]))
with_vjp.defvjp(lambda x: (with_vjp(x), x), lambda x, cotangent: (2 * cotangent @ x.T,))


def named(x):
    return jnp.tanh(jax.ad_checkpoint.checkpoint_name(x @ x, "product"))


PROGRAMS = {
    "checkpoint": lambda x: jax.checkpoint(lambda x: jnp.tanh(x @ x))(x),
    "checkpoint that saves by name": jax.checkpoint(
        named, policy=jax.checkpoint_policies.save_only_these_names("product")
    ),
    "custom_jvp": with_jvp,
    "custom_vjp": with_vjp,
    "all in a scan": lambda x: (
        lax.scan(lambda x, _: (jax.checkpoint(lambda x: with_vjp(with_jvp(x) @ x))(x), None), x, None, length=2)[0] / 64
    ),  # so that its gradient, of 2e6, is within float16
    "a primitive of the user": lambda x: Product(jax.typeof(x))(x),
    "one with a cotangent rule": lambda x: WithCotangent(jax.typeof(x))(x @ x),
    "one with a tangent rule": lambda x: WithTangent(jax.typeof(x))(x @ x),
    "one in a scan": lambda x: lax.scan(lambda x, _: (WithCotangent(jax.typeof(x))(x), None), x, None, length=2)[0],
}


@pytest.fixture(params=[[], *([flag] for flag in FLAGS), FLAGS], ids=["no flag", *FLAGS, "all flags"])
def _flags(request):
    for flag in request.param:
        jax.config.update(flag, True)
    yield
    for flag in request.param:
        jax.config.update(flag, False)


@pytest.mark.sweep(9)
@pytest.mark.usefixtures("_flags")
@pytest.mark.parametrize("name", PROGRAMS)
def test_products_are_low_precision_and_derivatives_those_of_the_program(name):
    fun = PROGRAMS[name]

    def loss(x):
        return jnp.sum(fun(x))

    assert set(dtypes(amp.autocast(fun), X, primitive="dot_general")) == LOW
    np.testing.assert_allclose(*jax.jit(lambda x: (amp.autocast(fun)(x), fun(x)))(X), rtol=1e-2)
    try:
        jax.eval_shape(jax.vmap(jax.grad(loss)), X[None])
    except NotImplementedError:  # the primitive has no such rule
        return
    ways = [
        jax.grad(loss),
        jax.grad(amp.autocast(loss)),
        amp.autocast(jax.grad(loss)),
        lambda x: jax.vmap(jax.grad(amp.autocast(loss)))(x[None])[0],
    ]
    derivative, *derivatives = jax.jit(lambda x: [way(x) for way in ways])(X)
    for got in derivatives:
        np.testing.assert_allclose(got, derivative, rtol=3e-2, atol=1e-2)


@pytest.mark.sweep(6)
@pytest.mark.usefixtures("_flags")
def test_a_primitive_of_the_user_may_run_in_a_shard_map_outside_jit():
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.PartitionSpec("i")

    def loss(x, way):
        fun = way(lambda x: WithCotangent(jax.typeof(x))(x))
        return jnp.sum(jax.shard_map(fun, mesh=mesh, in_specs=rows, out_specs=rows)(x))

    got, want = (jax.grad(loss)(jnp.concatenate([X, X]), way) for way in (amp.autocast, lambda fun: fun))
    np.testing.assert_allclose(got, want, rtol=3e-2, atol=1e-2)


POLICIES = {
    "products": jax.checkpoint_policies.dots_saveable,
    "products of matrices": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "names": jax.checkpoint_policies.save_only_these_names("product"),
    "nothing": jax.checkpoint_policies.nothing_saveable,
}


@pytest.mark.usefixtures("_flags")
@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_saves_what_it_saves_without_autocast(name):
    def fun(x):
        return jnp.sum(named(named(x)))

    def products(fun):
        return str(jax.make_jaxpr(jax.grad(jax.checkpoint(fun, policy=POLICIES[name])))(X)).count("dot_general")

    def products_outside(fun):
        return str(jax.make_jaxpr(jax.grad(amp.autocast(jax.checkpoint(fun, policy=POLICIES[name]))))(X)).count(
            "dot_general"
        )

    assert products(amp.autocast(fun)) == products_outside(fun) == products(fun)


@pytest.mark.usefixtures("_flags")
@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_around_autocast_decides_for_the_scans_in_it(name):
    def fun(x):
        return jnp.sum(lax.scan(lambda x, _: (named(x), None), x, None, length=2)[0])

    def products(fun):
        return str(jax.make_jaxpr(jax.grad(jax.checkpoint(fun, policy=POLICIES[name])))(X)).count("dot_general")

    assert products(amp.autocast(fun)) == products(fun)


@pytest.mark.usefixtures("_flags")
def test_a_name_keeps_under_vmap():
    batched = jax.vmap(lambda x: jnp.tanh(jax.ad_checkpoint.checkpoint_name(x @ x, "product")))
    try:
        want = batched(X[None])
    except NotImplementedError:
        pytest.skip("JAX 0.10 cannot batch a name with this flag")
    np.testing.assert_allclose(amp.autocast(batched)(X[None]), want, rtol=1e-2)
    assert "product" in str(jax.make_jaxpr(amp.autocast(batched))(X[None]))


@pytest.mark.usefixtures("_flags")
def test_jax_checkpoint_runs_the_function_itself_where_its_rule_says_so():
    @jax.custom_vjp
    def fun(x):
        return jnp.sum(x @ x)

    fun.defvjp(lambda x: (2 * jnp.sum(x @ x), x), lambda x, cotangent: (cotangent * (x @ x),), optimize_remat=True)

    def squared(x, way):
        return jax.checkpoint(way)(x) ** 2

    pairs = [jax.value_and_grad(squared)(X, way) for way in (fun, amp.autocast(fun))]
    values, gradients = zip(*pairs, strict=True)
    np.testing.assert_allclose(*values, rtol=1e-2)
    np.testing.assert_allclose(*gradients, rtol=1e-2)


class WithBothInside(WithBoth):
    def expand(self, x):
        return jax.jit(super().expand)(x)


@pytest.mark.parametrize("cls", [WithBoth, WithBothInside])
def test_a_primitive_whose_products_stay_float32_is_named(cls):
    def fun(x):
        return cls(jax.typeof(x))(x)

    with pytest.warns(UserWarning, match="no rule for `call_hi_primitive`, so the products in it stay"):
        value = amp.autocast(fun)(X)
    np.testing.assert_allclose(value, fun(X), rtol=1e-6)
    with pytest.warns(UserWarning, match="call_hi_primitive"):
        report = amp.explain(fun)(X)
    assert "the products in it stay as they were traced" in str(report)


@pytest.mark.parametrize("cls", [Product, WithCotangent, WithTangent, WithBoth])
def test_a_primitive_of_the_user_is_saved_and_not_computed_again(cls):
    assert is_saved(lambda x: cls(jax.typeof(x))(x))


@pytest.mark.usefixtures("_flags")
def test_a_function_with_a_rule_is_saved_if_it_holds_a_product():
    assert is_saved(with_jvp)
    assert is_saved(with_vjp)
    assert not is_saved(jax.nn.relu)


def is_saved(fun):
    """Whether the bodies of scans save the result of the last equation of a function."""
    planner = planner_of(parse_settings().options)
    *_, eqn = jax.make_jaxpr(fun)(X).eqns
    while eqn.primitive.name == "jit":
        *_, eqn = eqn.params["jaxpr"].eqns
    return planner.is_saved(eqn.primitive, *[atom.aval for atom in eqn.invars], **eqn.params)


@dataclasses.dataclass(frozen=True)
class PairType(hijax.HiType):
    of: jax.core.ShapedArray

    def lo_ty(self):
        return [self.of, self.of]

    def lower_val(self, pair):
        return [pair.left, pair.right]

    def raise_val(self, left, right):
        return Pair(left, right)


@dataclasses.dataclass(frozen=True)
class Pair:
    left: jax.Array
    right: jax.Array


hijax.register_hitype(Pair, lambda pair: PairType(jax.typeof(pair.left)))


class MakePair(HiPrim):
    def __init__(self, aval):
        self.in_avals, self.out_aval, self.params = (aval, aval), PairType(aval), {"aval": aval}
        super().__init__()

    def expand(self, left, right):
        return Pair(left, right)


class Left(HiPrim):
    def __init__(self, aval):
        self.in_avals, self.out_aval, self.params = (PairType(aval),), aval, {"aval": aval}
        super().__init__()

    def expand(self, pair):
        return pair.left


def test_values_of_types_of_the_user_pass():
    def fun(x):
        aval = jax.typeof(x)
        pair = MakePair(aval)(x @ x, x)
        return Left(aval)(pair) @ x

    got = jax.jit(amp.autocast(fun))(X)
    np.testing.assert_allclose(got, X @ X @ X, rtol=1e-2)
    assert set(dtypes(amp.autocast(fun), X, primitive="dot_general")) == LOW
    inner = jax.jit(lambda pair, x: Left(jax.typeof(x))(pair) @ x)
    np.testing.assert_allclose(amp.autocast(inner)(Pair(X, X), X), X @ X, rtol=1e-2)


def without_lowering():
    """Returns a primitive that JAX runs outside `jit`, but cannot compile."""
    primitive = jax.extend.core.Primitive("without_lowering")
    primitive.def_impl(lambda x: x)
    primitive.def_abstract_eval(lambda aval: aval)
    ad.defjvp(primitive, lambda tangent, x: 2 * tangent)
    return primitive.bind


def test_a_function_that_jax_cannot_compile_is_differentiated_op_by_op():
    bind = without_lowering()
    fun = amp.autocast(lambda x: jnp.sum(jnp.tanh(bind(x @ x)) * 2))
    want = jax.grad(lambda x: 2 * jnp.sum(jnp.tanh(x @ x)))(X)
    np.testing.assert_allclose(jax.grad(fun)(X), 2 * want, rtol=1e-2)
