"""Rules of the user's own, and the op table as a table."""

import functools
import gc
import importlib
import pkgutil

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import Primitive
from jaxprs import dtypes, row, scoped_equations

import jmp_amp as amp
import pallas_kernels
from jmp_amp._jaxpr import HIGHER_ORDER
from jmp_amp._ops import RULES, OpClass, Rule

pytestmark = pytest.mark.usefixtures("users_code")

X, W = jnp.ones((4, 8)) / 8, jnp.eye(8)


def model(x):
    with jax.named_scope("Encoder"), jax.named_scope("Dense_0"):
        x = jax.jit(lambda x: jnp.tanh(x @ W))(x)
    with jax.named_scope("Decoder"):
        with jax.named_scope("Dense_0"):
            x = x @ W
        with jax.named_scope("Dense_1"):
            x = lax.scan(lambda x, w: (jnp.abs(x @ w), None), x, jnp.stack([W, W]))[0]
    return x


def products(fun):
    return [row(e).split()[0] for _, e in scoped_equations(fun, X) if e.primitive.name == "dot_general"]


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({"Decoder/*": "bfloat16"}, ["float16", "bfloat16", "bfloat16"]),
        ({"Decoder": "bfloat16"}, ["float16", "bfloat16", "bfloat16"]),
        ({"*/Dense_0": "full"}, ["float32", "float32", "float16"]),
        ({"Dense_1": "full"}, ["float16", "float16", "float32"]),
        ({"Encoder/Dense_?": "full"}, ["float32", "float16", "float16"]),
        ({"*": "full", "*/Dense_1": "float16"}, ["float32", "float32", "float16"]),
        ({"*/Dense_1": "float16", "*": "full"}, ["float32", "float32", "float32"]),
    ],
)
def test_a_pattern_sets_the_dtype_of_the_scopes_it_matches(rules, expected):
    assert products(amp.autocast(model, rules=rules)) == expected


def test_a_pattern_holds_in_the_backward_pass_either_way_round():
    def loss(x):
        return jnp.sum(model(x))

    for fun in (
        jax.grad(amp.autocast(loss, rules={"Decoder": "full"})),
        amp.autocast(jax.grad(loss), rules={"Decoder": "full"}),
    ):
        assert products(fun) == ["float16", "float32", "float32", "float32", "float32", "float16"]


HOLDERS = {
    "nothing": lambda fun: fun,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "cond": lambda fun: lambda x: lax.cond(x[0, 0] > 0, fun, fun, x),
    "scan": lambda fun: lambda x: lax.scan(lambda x, _: (fun(x), None), x, length=2)[0],
    "while": lambda fun: lambda x: lax.fori_loop(0, jnp.argmax(x[0]), lambda _, x: fun(x), x),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_region_in_the_code_comes_before_patterns_and_facts_in_what_it_calls_too(holder):
    @jax.named_scope("Head")
    def head(x):
        return jnp.tanh(x @ W)

    def expectation(x):  # a product with a constant vector, which is float32 outside of a region
        return x + (x @ jnp.arange(8.0))[:, None]

    def within(region, fun):
        return lambda x: region(HOLDERS[holder](fun))(x)

    in_float32 = amp.autocast(within(amp.full_precision, head), rules={"Head": "bfloat16"})
    assert set(products(in_float32)) == {"float32"}
    assert set(products(amp.autocast(within(lambda fun: fun, expectation)))) == {"float32"}
    assert set(products(amp.autocast(within(amp.precision("float16"), expectation)))) == {"float16"}


def test_a_pattern_that_matches_nothing_warns_with_the_scopes_there_are():
    with pytest.warns(UserWarning, match=r"`LayerNorm_\*` matches no scope.*Decoder/Dense_0, .*Encoder/Dense_0"):
        amp.autocast(model, rules={"LayerNorm_*": "full"})(X)


@pytest.mark.parametrize("name", ["layers[0]", "a[", "]", "w[0][1]"])
def test_brackets_in_a_pattern_may_be_those_of_the_name(name):
    def fun(x):
        with jax.named_scope(name):
            x = x @ W
        with jax.named_scope("a"):
            return x @ W

    assert products(amp.autocast(fun, rules={name: "full"})) == ["float32", "float16"]
    assert products(amp.autocast(fun, rules={f"*/{name}/*": "full"})) == ["float32", "float16"]
    assert {row.module for row in amp.explain(fun)(X).select(name).rows} == {name}


OTHER_NAMES = [
    "my jmp_amp:float16",
    "jmp_amp:",
    "jmp_amp:float32:1",
    "jmp_amp",
    "ramp:up",
    "amp:foo",
    "amp:",
    "amp:float16x",
    "my amp:float32",
    "amp:float64",
    "amp:float32:1",
    "amp",
]


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_a_scope_that_resembles_a_mark_is_a_scope(name):
    def fun(x):
        with jax.named_scope(name):
            return x @ W

    assert set(products(amp.autocast(fun))) == {"float16"}
    assert set(products(jax.grad(lambda x: jnp.sum(amp.autocast(fun)(x))))) == {"float16"}
    assert set(products(amp.autocast(jax.grad(lambda x: jnp.sum(fun(x)))))) == {"float16"}
    assert set(products(amp.autocast(fun, rules={name: "full"}))) == {"float32"}
    assert {row.module for row in amp.explain(fun)(X).select(direction="forward").rows} == {name}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("around", ["", "scope", "scope/inner"])
def test_a_mark_counts_in_any_scope_and_under_any_transformation(dtype, around):
    def loss(x):
        with jax.named_scope(around), amp.precision(dtype), jax.named_scope("ramp:up"):
            return jnp.sum(jax.checkpoint(lambda x: jnp.tanh(x @ W))(x))

    for fun in (amp.autocast(loss, "bfloat16"), amp.autocast(jax.grad(jax.jit(loss)), "bfloat16")):
        assert set(products(fun)) == {dtype}
        assert set(products(lambda x, fun=fun: jax.vmap(fun)(x[None]))) == {dtype}


def test_a_primitive_is_given_another_class():
    assert dtypes(amp.autocast(model, rules={lax.tanh_p: "full"}), X, primitive="tanh") == ["float32 -> float32"]
    assert dtypes(amp.autocast(model, rules={lax.dot_general_p: "full"}), X, primitive="tanh") == ["float32 -> float32"]
    low = amp.autocast(lambda x: jnp.exp(x @ W), rules={lax.exp_p: "follow"})
    assert dtypes(low, X, primitive="exp") == ["float16 -> float16"]


def test_a_primitive_of_ones_own_is_registered():
    double_p = jex_core.Primitive("double")
    double_p.def_abstract_eval(lambda x: x)
    fun = lambda x: double_p.bind(x @ W)  # noqa: E731
    assert dtypes(amp.autocast(fun), X, primitive="double") == ["float32 -> float32"]
    assert dtypes(amp.autocast(fun, rules={double_p: "follow"}), X, primitive="double") == ["float16 -> float16"]


def test_a_policy_carries_rules():
    policy = amp.get_policy("mixed_float16").with_rules({"Encoder": "full"}).with_rules({lax.tanh_p: "follow"})
    assert hash(policy) != hash(amp.get_policy("mixed_float16"))
    assert amp.get_policy(str(policy)) == amp.get_policy("mixed_float16")
    assert products(amp.autocast(model, policy)) == ["float32", "float16", "float16"]
    assert products(amp.autocast(model, policy, rules={"Encoder": "bfloat16"})) == [
        "bfloat16",
        "float16",
        "float16",
    ]


@pytest.mark.parametrize("autocast_first", [True, False])
def test_a_pattern_of_several_scopes_holds_in_what_checkpoint_computes_again(autocast_first):
    def fun(w):
        def layer(x):
            with jax.named_scope("layer"):
                return jnp.tanh(jnp.tanh(x @ w) @ w)

        with jax.named_scope("net"):
            return jnp.mean(jax.checkpoint(layer)(jnp.ones((4, 8))))

    cast = functools.partial(amp.autocast, rules={"net/layer": "full"})
    gradient = jax.grad(cast(fun)) if autocast_first else cast(jax.grad(fun))
    found = dtypes(gradient, jnp.eye(8), primitive="dot_general")
    assert len(found) == 7
    assert set(found) == {"float32 float32 -> float32"}


@pytest.mark.parametrize(
    ("rules", "error", "message"),
    [
        (
            {lax.tanh_p: "float16"},
            ValueError,
            "`tanh` must be one of lower, full, promote, follow, original, got 'float16'",
        ),
        ({"Encoder": "float64"}, ValueError, "float64"),
        ({"Encoder": "low"}, ValueError, "low"),
        ({3: "full"}, TypeError, "got 3 of type int"),
    ],
)
def test_a_wrong_rule_is_an_error_that_names_it(rules, error, message):
    with pytest.raises(error, match=message):
        amp.autocast(model, rules=rules)


# Primitives that autocast leaves in the dtypes they were traced in, and why.
ORIGINAL = {
    "linear algebra, which has no 16-bit kernels": """cholesky eig eigh hessenberg householder_product lu qr schur svd
        triangular_solve tridiagonal tridiagonal_solve""",
    "transforms and complex numbers, which have no 16-bit kernels": "fft complex conj imag real",
    "bits, whose number depends on the dtype": """bitcast_convert_type population_count clz and or xor not shift_left
        shift_right_arithmetic shift_right_logical reduce_and reduce_or reduce_xor reduce_precision""",
    "random numbers, which would be other ones": """random_bits random_fold_in random_gamma random_seed random_split
        random_wrap random_unwrap rng_bit_generator rng_uniform threefry2x32""",
    "constants and shapes": "iota axis_index empty2 create_token after_all",
    "total orders on the bits": "eq_to le_to lt_to",
    "reductions by any function, whose range is not known": "reduce reduce_window select_and_scatter",
    "references, whose dtype is fixed": "get swap addupdate",
    "ragged communication, whose buffers are the user's": "ragged_all_to_all",
    "what a custom derivative is while it is differentiated": "custom_lin",
}


def test_every_primitive_of_jax_is_classified_or_left_alone_for_a_reason():
    primitives = {name.removesuffix("_p"): p for name, p in vars(jex_core.primitives).items() if name.endswith("_p")}
    left = {name for names in ORIGINAL.values() for name in names.split()}
    for name, primitive in primitives.items():
        rule = RULES.get(primitive.name, Rule(OpClass.ORIGINAL))
        known = primitive.name in HIGHER_ORDER or not isinstance(rule, Rule) or rule.op_class is not OpClass.ORIGINAL
        assert known != (name in left), f"classify the primitive `{name}` in _rules.py, or list it here with a reason"


def test_every_primitive_of_the_package_has_a_rule():
    for package in (amp, pallas_kernels):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    gc.unfreeze()  # of `conftest.py`
    primitives = [x for x in gc.get_objects() if isinstance(x, Primitive)]
    gc.freeze()
    ours = {x.name for x in primitives if str(x.impl.__module__).startswith(("jmp_amp.", "pallas_kernels."))}
    assert {"cast_inputs", "float8_dot_general", "sum_together"} < ours
    assert ours <= RULES.keys() | HIGHER_ORDER.keys()  # `explain` lists all others as unknown


def test_every_rule_is_for_a_primitive_that_exists():
    names = {p.name for module in (jex_core.primitives, lax) for n, p in vars(module).items() if n.endswith("_p")}
    # Not exported by JAX 0.10 to 0.12, seen in its jaxprs.
    names |= {"ragged_dot_general", "reduce_scatter", "psum_invariant", "all_gather_invariant", "pvary", "reshard"}
    names |= {"geqrf", "ffi_call", "pallas_call"}
    names |= {"dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper"}
    names |= {"float8_dot_general", "float8_ragged_dot_general", "float8_scale"}  # of this package
    names |= {"sum_together", "unscale_check"}  # of `pallas_kernels`
    newer = {"log2", "one_minus_square", "polynomial"}  # than JAX 0.10
    assert set(RULES) - names - newer == set()
