"""A class of the user that checks its leaves gets no others: no numbers, flags or None, in any public function."""

import dataclasses
import inspect

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_amp as amp
from jmp_amp import debug
from jmp_amp.compat import jmp

KINDS = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)  # JAX traces the last one


@jax.tree_util.register_pytree_with_keys_class
class Weights:
    """Weights that must be floating, as in a class that converts or checks them where it is made."""

    def __init__(self, w, b):
        for x in (w, b):
            if not isinstance(x, KINDS) or not jnp.issubdtype(x.dtype, jnp.floating):
                raise TypeError(f"weights must be floating, got {x!r}")
        self.w, self.b = w, b

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in "wb"], None

    @classmethod
    def tree_unflatten(cls, _, leaves):
        return cls(*leaves)


def params(dtype="float32", b_dtype=None):
    return {"head": Weights(jnp.eye(64, dtype=dtype) / 8, jnp.zeros(64, b_dtype or dtype)), "scale": jnp.ones(())}


def loss_fn(p, x):
    x = x.w if isinstance(x, Weights) else x
    return p["scale"] * jnp.mean((jnp.tanh(x @ p["head"].w) + p["head"].b - 0.5) ** 2)


X = jnp.ones((4, 64))
P, LOW, MIXED = params(), params("float16"), params("bfloat16", "float32")
BAD = jax.tree.map(lambda x: jnp.inf * x, P)


def trained(tx, p=P, **options):
    """Two steps outside `jit`, and two inside; the second of them overflows."""
    for update in (tx.update, jax.jit(tx.update)):
        state = tx.init(p)
        for grads in (p, jax.tree.map(lambda x: jnp.inf * x, p)):
            updates, state = update(grads, state, p, **options)
            assert isinstance(optax.apply_updates(p, updates)["head"], Weights)
    return state


def step(p, state, x):
    loss, grads = amp.value_and_grad(loss_fn, opt_state=state)(p, x)
    updates, state = TX.update(grads, state, p)
    return optax.apply_updates(p, updates), state, loss


TX = amp.dynamic_loss_scale(optax.adam(0.1))
FLAGGED = amp.dynamic_loss_scale(optax.adam(0.1), nonfinite_leaves=True)


def unhealthy(**trees):
    state = trained(FLAGGED)
    with pytest.raises(amp.LossScaleError, match=r"\['head'\]\.w"):
        amp.check_health(state._replace(loss_scale=state.loss_scale._replace(notfinite_count=jnp.int32(99))), **trees)


def low_params(p, **options):
    tx = amp.low_precision_params(optax.adam(0.1), **options)
    trained(amp.dynamic_loss_scale(tx), p)
    return trained(tx, p)


# By the name of the public function, and of a variant.
USES = {
    "autocast": lambda: amp.autocast(lambda p, x: (p, loss_fn(p, x)))(P, X),
    "autocast policy": lambda: amp.autocast(lambda p, x: (p, loss_fn(p, x)), "O2")(LOW, X),
    "autocast kernel": lambda: amp.autocast(loss_fn, "bfloat16", attention="xla")(P, X),
    "cast_inputs": lambda: amp.autocast(jax.grad(amp.cast_inputs("bfloat16")(loss_fn)))(P, X),
    "precision": lambda: amp.autocast(amp.precision("bfloat16")(loss_fn))(P, X),
    "full_precision": lambda: amp.autocast(amp.full_precision(loss_fn))(P, X),
    "explain": lambda: amp.explain(loss_fn)(P, X),
    "value_and_grad": lambda: amp.value_and_grad(loss_fn, loss_scale=8.0)(P, X),
    "value_and_grad low": lambda: amp.value_and_grad(amp.autocast(loss_fn, "O2"), loss_scale=2.0**20)(LOW, X),
    "value_and_grad steps": lambda: jax.jit(amp.value_and_grad(loss_fn, accumulate_steps=2))(P, Weights(X, X)),
    "grad": lambda: amp.grad(loss_fn, loss_scale=8.0, accumulate_steps=2)(P, X),
    "LossScale": lambda: amp.LossScale().unscale(RULE_STATE, amp.LossScale().scale(RULE_STATE, P)),
    "unscale_and_check": lambda: trained(amp.unscale_and_check(), loss_scale=8.0),
    "dynamic_loss_scale": lambda: trained(TX),
    "dynamic_loss_scale select": lambda: trained(amp.dynamic_loss_scale(optax.adam(0.1), skip="select")),
    "dynamic_loss_scale clip": lambda: trained(amp.dynamic_loss_scale(optax.adam(0.1), clip_global_norm=1.0)),
    "dynamic_loss_scale flags": lambda: trained(FLAGGED),
    "get_loss_scale": lambda: amp.get_loss_scale(trained(TX)),
    "set_loss_scale": lambda: amp.set_loss_scale(trained(TX), 8.0),
    "metrics": lambda: amp.metrics(trained(FLAGGED)),
    "check_health": lambda: amp.check_health(trained(TX), P, grads=P),
    "check_health params": lambda: unhealthy(params=BAD),
    "check_health grads": lambda: unhealthy(grads=BAD),
    "check_health flags": lambda: amp.check_health(trained(FLAGGED)),
    "all_finite": lambda: amp.all_finite(P),
    "cast_params": lambda: amp.cast_params(P, "O2"),
    "is_norm": lambda: jax.tree.leaves_with_path(P, is_leaf=lambda x: amp.is_norm((), x)),
    "low_precision_params": lambda: low_params(LOW),
    "low_precision_params mixed": lambda: low_params(MIXED),
    "low_precision_params remainder": lambda: low_params(MIXED, remainder=True),
    "low_precision_params rounded": lambda: low_params(MIXED, masters=False, rounding="stochastic"),
    "low_precision_state": lambda: trained(amp.low_precision_state(optax.adam(0.1))),
    "get_policy": lambda: [cast(P) for cast in (POLICY.cast_to_param, POLICY.cast_to_compute, POLICY.cast_to_output)],
    "check_loss_scaling": lambda: debug.check_loss_scaling(step)(P, TX.init(P), X),
    "compare": lambda: debug.compare(loss_fn)(P, X),
    "error_budget": lambda: debug.error_budget(loss_fn)(P, X),
    "fastest": lambda: debug.fastest(loss_fn, ["bfloat16"])(P, X),
    "first_nonfinite": lambda: debug.first_nonfinite(loss_fn)(P, jnp.inf * X),
    "suggest_rules": lambda: debug.suggest_rules(loss_fn)(P, X),
    "underflow": lambda: debug.underflow(P),
    "initialize": lambda: amp.interop.apex.initialize(loss_fn, P, optax.adam(0.1), "O2")[0](LOW, X),
    "cast_to_half": lambda: jmp.cast_to_full(jmp.cast_to_half(P)),
    "select_tree": lambda: jmp.select_tree(jnp.array(True), P, BAD),
    "DynamicLossScale": lambda: jmp.DynamicLossScale(jnp.float32(8)).unscale(P),
}
POLICY, RULE_STATE = amp.get_policy("O2"), amp.LossScale().init()


@pytest.mark.sweep(5)
@pytest.mark.parametrize("name", USES)
@pytest.mark.usefixtures("users_code")
def test_no_class_of_the_user_gets_other_leaves(name):
    USES[name]()


def test_every_public_function_is_here():
    public = {name for module in (amp, debug) for name in module.__all__ if inspect.isfunction(getattr(module, name))}
    assert public - {name.split()[0] for name in USES} == set()


@pytest.mark.usefixtures("users_code")
def test_other_leaves_are_held_at_the_paths_of_the_class():
    flags = FLAGGED.init(P).nonfinite_leaves
    state = amp.low_precision_params(optax.adam(0.1), remainder=True).init(MIXED)
    paths = [path for path, _ in jax.tree.leaves_with_path(P)]
    assert [path for path, _ in jax.tree.leaves_with_path(flags)] == paths
    assert {"nonfinite/head/w", "nonfinite/head/b", "nonfinite/scale"} < amp.metrics(trained(FLAGGED)).keys()
    assert [(path, str(x.dtype)) for path, x in jax.tree.leaves_with_path(state.masters)] == [(paths[0], "uint16")]
    full = amp.low_precision_params(optax.adam(0.1)).init(MIXED)
    assert jax.tree.leaves(state.with_float32(MIXED).masters)[0].dtype == jnp.float32
    _, halves = full.with_remainders(MIXED)
    assert jax.tree.structure(halves) == jax.tree.structure(state)
    tx = amp.low_precision_state(optax.adam(0.1))
    moments = tx.init(P)
    assert moments.inner_state[0].mu["head"].children[0].dtype == jnp.uint8
    assert isinstance(moments.with_float32()[0].mu["head"], Weights)
    assert jax.tree.structure(cloudpickle.loads(cloudpickle.dumps(moments))) == jax.tree.structure(moments)


def test_a_class_that_takes_them_stays():
    """And a tree without classes: nothing changes for those that follow JAX's rules."""

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Plain:
        w: object
        b: object

    p = {"head": Plain(jnp.ones((64, 64), jnp.bfloat16), jnp.ones(64)), "rest": [(), None, jnp.ones(2)]}
    for tree in (p, p["rest"], jnp.ones(2)):
        assert jax.tree.structure(FLAGGED.init(tree).nonfinite_leaves) == jax.tree.structure(tree)
    state = amp.low_precision_params(amp.low_precision_state(optax.adam(0.1)), remainder=True).init(p)
    assert isinstance(state.masters["head"], Plain)
    assert isinstance(state.masters["head"].b, optax.MaskedNode)
    assert isinstance(state.inner_state.inner_state[0].mu["head"], Plain)


def test_a_class_that_converts_its_leaves_does_not_change_them():
    @jax.tree_util.register_pytree_with_keys_class
    class Converts(Weights):
        def __init__(self, w, b):
            super().__init__(*(jnp.asarray(x, jnp.float32) if isinstance(x, KINDS) else x for x in (w, b)))

    p = {"head": Converts(jnp.eye(64) / 8, jnp.zeros(64)), "scale": jnp.ones(())}
    state = amp.low_precision_state(optax.adam(0.1)).init(p)
    assert state.inner_state[0].mu["head"].children[0].dtype == jnp.uint8


@jax.tree_util.register_pytree_with_keys_class
class Named(Weights):
    """Weights with a leaf that is no array."""

    def __init__(self, w, b, name):
        super().__init__(w, b)
        if not isinstance(name, str):
            raise TypeError(f"a name must be a string, got {name!r}")
        self.name = name

    def tree_flatten_with_keys(self):
        children, _ = super().tree_flatten_with_keys()
        return [*children, (jax.tree_util.GetAttrKey("name"), self.name)], None


NAMED = P | {"head": Named(P["head"].w, P["head"].b, "head")}
FUNCTIONS = {
    "autocast": lambda: amp.autocast(lambda p, x: (p, loss_fn(p, x)))(NAMED, X),
    "cast_params": lambda: amp.cast_params(NAMED, "O2"),
    "check_health": lambda: amp.check_health(TX.init(P), NAMED),
    "explain": lambda: amp.explain(loss_fn)(NAMED, X),
    "compare": lambda: debug.compare(loss_fn)(NAMED, X),
    "error_budget": lambda: debug.error_budget(loss_fn)(NAMED, X),
    "fastest": lambda: debug.fastest(loss_fn, ["bfloat16"])(NAMED, X),
    "first_nonfinite": lambda: debug.first_nonfinite(loss_fn)(NAMED, jnp.inf * X),
    "suggest_rules": lambda: debug.suggest_rules(loss_fn)(NAMED, X),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.usefixtures("users_code")
def test_leaves_that_are_no_arrays_stay_in_their_class(name):
    FUNCTIONS[name]()
