"""Training of Flax NNX modules: accumulation, and the loss scale in an `nnx.Optimizer`."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_amp as amp

nnx = pytest.importorskip("flax.nnx", reason="needs Flax")

pytestmark = pytest.mark.usefixtures("users_code")
X = jax.random.normal(jax.random.key(1), (8, 4))
STEPS = 4


class Model(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(4, 16, rngs=rngs)
        self.batch_norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.outer = nnx.Linear(16, 2, rngs=rngs)

    def __call__(self, x, rngs=None):
        return self.outer(self.dropout(nnx.relu(self.batch_norm(self.inner(x))), rngs=rngs))


def loss_fn(model, x):
    return jnp.mean(model(x) ** 2)


def loss_with_rngs(model, rngs, x):
    return jnp.mean(model(x, rngs) ** 2)


def arrays(tree):
    """The arrays in modules, with keys as numbers."""
    leaves = jax.tree.leaves(nnx.state(tree))
    keys = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in leaves]
    return [np.asarray(jax.random.key_data(x) if is_key else x) for x, is_key in zip(leaves, keys, strict=True)]


def assert_close(a, b, **tolerance):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), a, b)


def accumulated_by_hand(fun, *args, x):
    """The loop that a torch user writes: one micro-batch after the other, in the same modules."""
    loss, grads = 0.0, None
    for i in range(STEPS):
        micro_loss, micro_grads = nnx.value_and_grad(fun)(*args, x[i::STEPS])
        loss += micro_loss / STEPS
        micro_grads = jax.tree.map(lambda g: g / STEPS, micro_grads)
        grads = micro_grads if grads is None else jax.tree.map(jnp.add, grads, micro_grads)
    return loss, grads


@pytest.mark.parametrize("jit", [nnx.jit, lambda fun: fun], ids=["jit", "eager"])
@pytest.mark.sweep(4)
@pytest.mark.parametrize("fun", [loss_fn, loss_with_rngs])
def test_micro_batches_change_modules_as_a_loop_does(fun, jit):
    def inputs():
        return (Model(nnx.Rngs(0)),) if fun is loss_fn else (Model(nnx.Rngs(0)), nnx.Rngs(5))

    accumulated = amp.value_and_grad(fun, loss_scale=8.0, accumulate_steps=STEPS, transform=nnx.value_and_grad)
    modules, expected_modules = inputs(), inputs()
    for _ in range(2):  # the second step goes on where the first ended
        loss, grads = jit(accumulated)(*modules, X)
        expected_loss, expected = accumulated_by_hand(fun, *expected_modules, x=X)
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-4)
        assert_close(jax.tree.map(lambda g: g / 8, grads), expected, rtol=1e-3, atol=1e-4)
    assert_close(arrays(modules), arrays(expected_modules), rtol=1e-5, atol=1e-6)
    count = (modules[0].dropout.rngs if fun is loss_fn else modules[1].default).count[...]
    assert count == 2 * STEPS  # another mask for each micro-batch


def test_only_the_state_that_changes_is_carried_through_the_loop():
    graph, state = nnx.split(Model(nnx.Rngs(0)))

    def step(state, x):
        model = nnx.merge(graph, state)
        out = amp.value_and_grad(loss_fn, accumulate_steps=STEPS, transform=nnx.value_and_grad)(model, x)
        return out, nnx.state(model)

    (scan,) = [eqn for eqn in jax.make_jaxpr(step)(state, X).eqns if eqn.primitive.name == "scan"]
    carried = [var.aval for var in scan.outvars]
    shapes = sorted(aval.shape for aval in carried)
    gradients = [x.shape for x in jax.tree.leaves(nnx.state(Model(nnx.Rngs(0)), nnx.Param))]
    loss, count, statistics = [()], [()], [(16,), (16,)]
    assert shapes == sorted([*gradients, *loss, *count, *statistics])


def test_a_training_loop_of_torchs_kind_learns_and_skips():
    model = Model(nnx.Rngs(0))
    tx = amp.dynamic_loss_scale(optax.adam(1e-2), clip_global_norm=1.0)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    low_loss_fn = amp.autocast(lambda model, x: jnp.mean((model(x) - 1) ** 2))

    @nnx.jit
    def step(model, optimizer, x):
        value_and_grad = amp.value_and_grad(
            low_loss_fn, opt_state=optimizer, accumulate_steps=2, transform=nnx.value_and_grad
        )
        loss, grads = value_and_grad(model, x)
        optimizer.update(model, grads)
        return loss

    losses = [step(model, optimizer, X) for _ in range(20)]
    assert losses[-1] < losses[0] / 2
    before, scale = arrays(nnx.state(model, nnx.Param)), amp.get_loss_scale(optimizer)
    step(model, optimizer, X.at[3].set(jnp.inf))  # one micro-batch
    assert_close(arrays(nnx.state(model, nnx.Param)), before, rtol=0)
    assert amp.get_loss_scale(optimizer) == scale / 2


def test_only_a_part_of_a_model_is_differentiated():
    model = Model(nnx.Rngs(0))
    bias = nnx.All(nnx.Param, nnx.PathContains("bias"))
    value_and_grad = amp.value_and_grad(
        loss_fn, argnums=nnx.DiffState(0, bias), accumulate_steps=STEPS, transform=nnx.value_and_grad
    )
    _, grads = value_and_grad(model, X)
    assert len(jax.tree.leaves(grads)) == 3
    assert model.dropout.rngs.count[...] == STEPS


def test_keyword_modules_are_kept_and_aux_is_stacked():
    def with_aux(model, x, rngs):
        out = model(x, rngs)
        return jnp.mean(out**2), out

    model, rngs = Model(nnx.Rngs(0)), nnx.Rngs(5)
    value_and_grad = amp.value_and_grad(with_aux, has_aux=True, accumulate_steps=STEPS, transform=nnx.value_and_grad)
    (_, out), _ = value_and_grad(model, X, rngs=rngs)
    assert out.shape == (STEPS, 2, 2)
    assert rngs.default.count[...] == STEPS


def test_a_module_among_what_is_split_is_named():
    transform = {"accumulate_steps": STEPS, "transform": nnx.value_and_grad}
    message = r"splits argument 1, which holds a Flax NNX module; pass the module as an argument of its own"
    with pytest.raises(ValueError, match=message):
        amp.value_and_grad(lambda m, both: loss_with_rngs(m, *both), **transform)(Model(nnx.Rngs(0)), (nnx.Rngs(0), X))
    with pytest.raises(ValueError, match=message):
        amp.value_and_grad(loss_with_rngs, batch_argnums=(1, 2), **transform)(Model(nnx.Rngs(0)), nnx.Rngs(0), X)


def test_a_variable_that_the_loss_adds_is_named():
    def adds(model, x):
        model.last_loss = nnx.Variable(loss_fn(model, x))
        return model.last_loss[...]

    with pytest.raises(ValueError, match=r"adds the variable `.*last_loss.*` to a module.*in the constructor"):
        amp.value_and_grad(adds, accumulate_steps=STEPS, transform=nnx.value_and_grad)(Model(nnx.Rngs(0)), X)


@pytest.fixture
def optimizer():
    return nnx.Optimizer(Model(nnx.Rngs(0)), amp.dynamic_loss_scale(optax.adam(1e-3)), wrt=nnx.Param)


@pytest.mark.parametrize("of", [lambda optimizer: optimizer, lambda optimizer: optimizer.opt_state])
def test_the_scale_is_read_from_an_optimizer_or_its_state(optimizer, of):
    assert amp.get_loss_scale(of(optimizer)) == amp.metrics(of(optimizer))["loss_scale"] == 2**16
    assert amp.interop.torch.state_dict(of(optimizer))["scale"] == 2**16
    amp.check_health(of(optimizer))
    grad = amp.grad(loss_fn, opt_state=of(optimizer), transform=nnx.value_and_grad)
    expected = amp.grad(loss_fn, loss_scale=2.0**16, transform=nnx.value_and_grad)
    assert_close(grad(Model(nnx.Rngs(0)), X), expected(Model(nnx.Rngs(0)), X), rtol=1e-6)


SAVED = {"scale": 3.0, "growth_factor": 4.0, "backoff_factor": 0.5, "growth_interval": 2, "_growth_tracker": 1}


@pytest.mark.parametrize("jit", [nnx.jit, lambda fun: fun], ids=["jit", "eager"])
def test_the_scale_of_an_optimizer_is_set_in_place(optimizer, jit):
    rule, scale_state = amp.interop.torch.load_state_dict(SAVED)
    variable, moments = optimizer.opt_state.loss_scale.loss_scale, arrays(optimizer.opt_state.inner_state)

    @jit
    def set_it(optimizer, value):
        amp.set_loss_scale(optimizer, value)

    set_it(optimizer, scale_state)
    assert amp.interop.torch.state_dict(optimizer, rule) == SAVED
    assert optimizer.opt_state.loss_scale.loss_scale is variable
    assert_close(arrays(optimizer.opt_state.inner_state), moments, rtol=0)
    assert amp.set_loss_scale(optimizer, 8.0) is optimizer
    assert amp.interop.torch.state_dict(optimizer, rule) == SAVED | {"scale": 8.0, "_growth_tracker": 0}


def test_a_state_that_is_set_can_be_put_back(optimizer):
    new = amp.set_loss_scale(optimizer.opt_state, amp.interop.torch.load_state_dict(SAVED)[1])
    assert amp.get_loss_scale(optimizer) == 2**16
    optimizer.opt_state = new
    assert amp.get_loss_scale(optimizer) == 3


# `check_loss_scaling` of a step that writes into its modules.

SKIPPING = amp.dynamic_loss_scale(optax.adam(0.01), amp.LossScale(init_scale=2.0**10))


class Watched(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 2, rngs=rngs)
        self.batch_norm = nnx.BatchNorm(2, rngs=rngs)
        self.norm = nnx.BatchStat(jnp.float32(0))

    def __call__(self, x):
        return self.batch_norm(self.linear(x))


def train(model, optimizer, losses, x, *, kept=True, scaled=None):
    old = jax.tree.map(jnp.copy, nnx.state(model, nnx.BatchStat))
    value_and_grad = amp.value_and_grad(amp.autocast(loss_fn), opt_state=optimizer, transform=nnx.value_and_grad)
    loss, grads = value_and_grad(model, x)
    optimizer.update(model, grads)
    losses.update(loss=loss)
    if scaled == "norm":
        model.norm[...] = optax.tree.norm(grads)
    if scaled == "parameters":
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), grads))
    if kept:
        nnx.update(model, optax.tree.where(amp.metrics(optimizer)["last_finite"], nnx.state(model, nnx.BatchStat), old))
    return loss


@pytest.mark.parametrize(
    "jit", [nnx.jit, pytest.param(lambda step: step, marks=pytest.mark.slow)], ids=["jit", "plain"]
)
def test_what_a_step_writes_into_modules_is_checked(jit):
    model = Watched(nnx.Rngs(0))
    modules = model, nnx.Optimizer(model, SKIPPING, wrt=nnx.Param), nnx.metrics.Average("loss")
    before = arrays(modules)

    def warned(**options):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            amp.debug.check_loss_scaling(jit(functools.partial(train, **options)))(*modules, X)
        return [str(each.message) for each in caught]

    assert warned() == []
    (moved,) = warned(kept=False)
    assert "it changes `model.batch_norm.mean.value`, `model.batch_norm.var.value`, `optimizer.step.value`. " in moved
    scaled, moved = warned(kept=False, scaled="norm")
    assert scaled.startswith("`step` returns `model.norm.value`, a value multiplied by the loss scale")
    assert "`model.norm.value` (not finite)" in moved
    with pytest.raises(ValueError, match="the gradients are still scaled here"):
        warned(scaled="parameters")
    for old, new in zip(before, arrays(modules), strict=True):
        np.testing.assert_array_equal(old, new)
