import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_amp as amp

SCALE = 2.0**16


def product(a, b, *, c=1.0):
    """Gradients are `b * c` and `a * c`."""
    return (a * b).sum() * jnp.asarray(c, a.dtype)


A, B = np.float32([1, 2, 3]), np.float32([4, 5, 6])


# Signatures


@pytest.mark.parametrize("argnums", [0, 1, (0,), (0, 1), (1, 0), [0, 1], -1, np.int64(1), np.array(1), {0, 1}, True])
def test_argnums_mean_what_they_mean_in_jax(argnums):
    expected_loss, expected = jax.value_and_grad(product, argnums)(A, B)
    loss, grads = amp.value_and_grad(product, argnums, loss_scale=SCALE)(A, B)
    assert loss == expected_loss
    chex.assert_trees_all_equal(grads, jax.tree.map(lambda g: g * SCALE, expected))
    chex.assert_trees_all_equal(amp.grad(product, argnums, loss_scale=SCALE)(A, B), grads)


def test_the_scale_is_one_unless_given():
    chex.assert_trees_all_equal(amp.value_and_grad(product)(A, B), jax.value_and_grad(product)(A, B))
    assert (amp.grad(product)(A, B) == B).all()


def test_keyword_arguments_reach_the_function():
    loss, grads = amp.value_and_grad(product, loss_scale=2.0)(A, B, c=3.0)
    assert loss == 3 * 32
    assert (grads == 2 * 3 * B).all()
    assert (amp.grad(product, loss_scale=2.0)(A, b=B, c=3.0) == grads).all()


@pytest.mark.parametrize("positional", [False, True])
def test_aux_is_passed_through_unscaled(positional):
    def fun(a, b):
        return product(a, b), {"count": jnp.int32(3), "logits": a.astype(jnp.float16), "none": None}

    args = (0, True) if positional else ()
    kwargs = {} if positional else {"has_aux": True}
    (loss, aux), grads = amp.value_and_grad(fun, *args, loss_scale=SCALE, **kwargs)(A, B)
    assert loss == 32
    assert (aux["count"], aux["logits"].dtype, aux["none"]) == (3, jnp.float16, None)
    assert (aux["logits"].astype(jnp.float32) == A).all()
    assert (grads == SCALE * B).all()
    grads_alone, aux_alone = amp.grad(fun, *args, loss_scale=SCALE, **kwargs)(A, B)
    chex.assert_trees_all_equal((grads_alone, aux_alone), (grads, aux))


def test_other_keywords_reach_the_transform():
    allow = amp.grad(lambda n, a: (a * a).sum(), (0, 1), allow_int=True, loss_scale=2.0)
    int_grad, grad = allow(jnp.int32(3), A)
    assert int_grad.dtype == jax.dtypes.float0
    assert (grad == 4 * A).all()


def test_gradients_have_the_tree_and_the_dtypes_of_the_parameters():
    def fun(params):
        return sum((leaf.astype(jnp.float32) ** 2).sum() for leaf in jax.tree.leaves(params))

    params = {"f32": jnp.ones(2), "f16": jnp.ones(2, jnp.float16), "list": [jnp.ones(2, jnp.bfloat16), None]}
    grads = amp.grad(fun, loss_scale=4.0)(params)
    chex.assert_trees_all_equal(grads, jax.tree.map(lambda leaf: 8 * leaf, params))
    chex.assert_trees_all_equal_dtypes(grads, params)


class Model:
    def __call__(self, a, b):
        return product(a, b)


@pytest.mark.parametrize(
    "fun", [functools.partial(product, c=1.0), jax.jit(product), Model()], ids=["partial", "jit", "object"]
)
def test_partials_jitted_functions_and_callable_objects_are_differentiated(fun):
    loss, grads = amp.value_and_grad(fun, loss_scale=2.0)(A, B)
    assert loss == 32
    assert (grads == 2 * B).all()


def test_name_and_docstring_of_the_function_are_kept():
    for transformed in (amp.value_and_grad(product), amp.grad(product)):
        assert transformed.__name__ == "product"
        assert transformed.__doc__ == product.__doc__


# Precision of the loss

LOW = [jnp.float16, jnp.bfloat16, jnp.float8_e5m2]


@pytest.mark.parametrize("dtype", [*LOW, jnp.float32])
@pytest.mark.parametrize("scale", [2.0**-10, 1.0, 2.0**15, 2.0**16, 2.0**24, 2.0**100])
def test_a_loss_of_any_precision_is_finite_and_has_the_right_gradients_at_any_scale(dtype, scale):
    # 2 * 2^16 is infinite in float16, and so is the cotangent 2^16.
    fun = lambda w: (w * w / 2).astype(dtype)  # noqa: E731
    loss, grad = amp.value_and_grad(fun, loss_scale=scale)(jnp.float32(2))
    assert (loss, loss.dtype) == (2, jnp.float32)
    assert (grad, grad.dtype) == (2 * scale, jnp.float32)


@pytest.mark.parametrize("dtype", LOW[:2])
def test_gradients_of_a_low_precision_mean_are_right_under_jit(dtype):
    def fun(params):
        return jnp.mean(params["w"].astype(dtype) * jnp.asarray(8, dtype)), params["n"]

    params = {"w": jnp.ones(8), "n": None}
    (loss, _), grads = jax.jit(amp.value_and_grad(fun, has_aux=True, loss_scale=SCALE))(params)
    assert (loss, loss.dtype) == (8, jnp.float32)
    assert grads["n"] is None
    assert (grads["w"] == SCALE).all()


def test_a_float16_loss_with_integer_arguments_has_float0_gradients():
    fun = lambda n, w: (w * 2).astype(jnp.float16)  # noqa: E731
    int_grad, grad = amp.grad(fun, (0, 1), allow_int=True, loss_scale=SCALE)(jnp.int32(1), jnp.float32(3))
    assert int_grad.dtype == jax.dtypes.float0
    assert grad == 2 * SCALE


def test_a_float64_loss_stays_float64():
    with jax.enable_x64(True):
        loss, grad = amp.value_and_grad(lambda w: w * w, loss_scale=jnp.float32(4))(jnp.float64(1 + 2**-40))
        assert loss.dtype == grad.dtype == jnp.float64
        assert loss == (1 + 2**-40) ** 2
        assert grad == 8 * (1 + 2**-40)


def test_a_loss_that_overflows_by_itself_is_reported_as_it_is():
    loss, grad = amp.value_and_grad(lambda w: w * jnp.inf, loss_scale=4.0)(jnp.float32(1))
    assert (loss, grad) == (jnp.inf, jnp.inf)


# Wrong losses


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda w: w, r"must be a scalar, got shape \(3,\)"),
        (lambda w: w.sum(keepdims=True), r"must be a scalar, got shape \(1,\)"),
        (lambda w: np.ones((2, 1), np.float32), r"must be a scalar, got shape \(2, 1\)"),
        (lambda w: (w.sum(), w), "must be a scalar, got tuple.*`has_aux=True`"),
        (lambda w: {"loss": w.sum()}, "must be a scalar, got dict"),
        (lambda w: None, "must be a scalar, got NoneType"),
        (lambda w: "0", "must be a scalar, got str"),
        (lambda w: w.sum().astype(jnp.int32), "must be a real floating-point scalar, got dtype int32"),
        (lambda w: w.sum() > 0, "must be a real floating-point scalar, got dtype bool"),
        (lambda w: 1, "must be a real floating-point scalar, got dtype int32"),
        (lambda w: w.sum().astype(jnp.complex64), "must be a real floating-point scalar, got dtype complex64"),
    ],
)
@pytest.mark.parametrize("has_aux", [False, True])
def test_a_wrong_loss_is_named(loss, message, has_aux):
    fun = (lambda w: (loss(w), "aux")) if has_aux else loss
    with pytest.raises(TypeError, match=message):
        amp.value_and_grad(fun, has_aux=has_aux)(jnp.ones(3))


def test_a_constant_python_loss_has_zero_gradients():
    loss, grad = amp.value_and_grad(lambda w: 2.5)(jnp.ones(3))
    assert (loss, loss.dtype) == (2.5, jnp.float32)
    assert not grad.any()


# The scale


@pytest.mark.parametrize(
    "scale",
    [8, 8.0, np.float32(8), np.float64(8), np.array(8), jnp.float32(8), jnp.int32(8), jnp.bfloat16(8)],
    ids=repr,
)
def test_the_scale_may_be_any_scalar_number(scale):
    loss, grads = amp.value_and_grad(product, loss_scale=scale)(A, B)
    assert (loss, loss.dtype) == (32, jnp.float32)
    assert (grads == 8 * B).all()


@pytest.mark.parametrize(
    "scale",
    [amp.LossScale(), amp.LossScale().init(), "8", True, [8.0], {"scale": 8.0}, jnp.ones(1), np.ones((2, 2))],
    ids=lambda scale: type(scale).__name__,
)
@pytest.mark.parametrize("make", [amp.value_and_grad, amp.grad])
def test_a_wrong_scale_is_refused_with_the_cure(make, scale):
    with pytest.raises(TypeError, match=r"`loss_scale` must be a scalar, got \w+; .*`amp.get_loss_scale"):
        make(product, loss_scale=scale)


TX = amp.dynamic_loss_scale(optax.adam(1e-3), amp.LossScale(init_scale=8.0))


@pytest.mark.parametrize("jit", [jax.jit, lambda fun: fun])
@pytest.mark.parametrize("wrap", [lambda s: s, lambda s: s.loss_scale, lambda s: {"step": 3, "opt_state": s}])
def test_the_scale_may_be_that_of_the_optimizer_state(jit, wrap):
    @jit
    def step(state):
        return amp.value_and_grad(product, opt_state=state)(A, B), amp.grad(product, 1, opt_state=state)(A, B)

    state = wrap(TX.init(A))
    for scale in (8, 32):
        (loss, grads), grads_of_b = step(amp.set_loss_scale(state, scale))
        assert loss == 32
        assert (grads == scale * B).all()
        assert (grads_of_b == scale * A).all()


def test_a_step_that_takes_its_scale_from_the_state_unscales_by_the_same():
    @jax.jit
    def step(params, state):
        _, grads = amp.value_and_grad(product, opt_state=state)(params, B)
        return tx.update(grads, state, params)

    tx = amp.dynamic_loss_scale(optax.sgd(1.0))
    updates, _ = step(A, tx.init(A))
    assert (updates == -B).all()
    amp.debug.check_loss_scaling(step)(A, tx.init(A))


@pytest.mark.parametrize("make", [amp.value_and_grad, amp.grad])
def test_a_scale_and_a_state_are_one_too_many(make):
    with pytest.raises(TypeError, match=r"either `opt_state` or `loss_scale`; .* is short for `loss_scale=amp.get"):
        make(product, opt_state=TX.init(A), loss_scale=1.0)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (optax.adam(1e-3).init(A), "there is no `LossScaleState` in this tuple; wrap the optimizer in `amp.dynamic_lo"),
        (TX, "there is no `LossScaleState` in this GradientTransformationExtraArgs; .* its `init` or `update` returns"),
        ([TX.init(A)] * 2, "there are 2 loss scales in this state; pass only one of"),
    ],
    ids=["of a plain optimizer", "the optimizer", "of two optimizers"],
)
def test_a_state_without_a_scale_is_refused_with_the_cure(state, message):
    with pytest.raises(ValueError, match=message):
        amp.value_and_grad(product, opt_state=state)


def test_the_scale_may_be_traced_and_does_not_recompile():
    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(scale):
        return amp.value_and_grad(product, loss_scale=scale)(A, B)

    for scale in (1.0, 2.0**16, 3.0):
        loss, grads = step(jnp.float32(scale))
        assert loss == 32
        assert (grads == scale * B).all()


def test_under_vmap_each_scale_makes_its_own_gradients():
    scales = jnp.float32([1, 2, 4])
    _, grads = jax.vmap(lambda scale: amp.value_and_grad(product, loss_scale=scale)(A, B))(scales)
    assert (grads == scales[:, None] * B[None]).all()


# Other transforms


def equinox_like(fun, *, has_aux=False):
    """Equinox's signature: no `argnums`; what is no inexact array has the gradient None."""

    def value_and_grad(model, *args, **kwargs):
        leaves, treedef = jax.tree.flatten(model)
        inexact = [isinstance(leaf, jax.Array) for leaf in leaves]

        def inner(arrays):
            arrays = iter(arrays)
            merged = [next(arrays) if ok else leaf for leaf, ok in zip(leaves, inexact, strict=True)]
            return fun(treedef.unflatten(merged), *args, **kwargs)

        arrays = [leaf for leaf, ok in zip(leaves, inexact, strict=True) if ok]
        value, grads = jax.value_and_grad(inner, has_aux=has_aux)(arrays)
        grads = iter(grads)
        return value, treedef.unflatten([next(grads) if ok else None for ok in inexact])

    return value_and_grad


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
@pytest.mark.parametrize("has_aux", [False, True])
def test_a_transform_with_the_signature_of_equinox_is_served(has_aux, dtype):
    def fun(model, x):
        loss = (model["w"] * x).sum().astype(dtype)
        return (loss, model["name"]) if has_aux else loss

    model = {"w": jnp.ones(3), "name": "linear", "act": len}
    transformed = amp.value_and_grad(fun, has_aux=has_aux, loss_scale=SCALE, transform=equinox_like)
    value, grads = transformed(model, x=B)
    assert value == ((15, "linear") if has_aux else 15)
    assert (grads["w"] == SCALE * B).all()
    assert (grads["name"], grads["act"]) == (None, None)


def test_a_transform_gets_argnums_that_were_chosen_and_other_keywords():
    seen = []

    def transform(fun, argnums=0, has_aux=False, **kwargs):
        seen.append((argnums, has_aux, kwargs))
        return jax.value_and_grad(fun, argnums, has_aux)

    amp.value_and_grad(product, (0, 1), transform=transform, wrt="params")
    amp.value_and_grad(product, transform=transform)
    assert seen == [((0, 1), True, {"wrt": "params"}), (0, True, {})]


# Composition


def test_a_gradient_penalty_equals_that_of_float32():
    # The norm of unscaled gradients is part of the loss, so that the scale must not leak into it.
    def loss_fn(w, x):
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    def penalised(inner_scale):
        def fun(w, x):
            loss, grads = amp.value_and_grad(loss_fn, loss_scale=inner_scale)(w, x)
            return loss + optax.tree.norm(jax.tree.map(lambda g: g / inner_scale, grads))

        return fun

    rng = np.random.default_rng(0)
    w, x = rng.normal(size=(8, 4)).astype(np.float32), rng.normal(size=(8, 8)).astype(np.float32)
    expected_loss, expected = jax.value_and_grad(penalised(1.0))(w, x)
    loss, grads = jax.jit(amp.value_and_grad(penalised(SCALE), loss_scale=2.0**10))(w, x)
    chex.assert_trees_all_close((loss, grads / 2**10), (expected_loss, expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
def test_second_derivatives_carry_both_scales(dtype):
    cube = lambda w: (w * w * w).astype(dtype)  # noqa: E731
    second = amp.grad(amp.grad(cube, loss_scale=4.0), loss_scale=8.0)
    assert second(jnp.float32(3)) == 6 * 3 * 4 * 8


def test_gradients_are_scaled_under_vmap_and_scan():
    grad = amp.grad(lambda w: w * w, loss_scale=8.0)
    w = jnp.float32([1, 2, 3])
    assert jax.vmap(grad)(w).tolist() == [16, 32, 48]
    assert jax.lax.scan(lambda carry, w: (carry, grad(w)), None, w)[1].tolist() == [16, 32, 48]


def test_a_loss_that_closes_over_its_batch_cannot_be_accumulated_and_says_so():
    with pytest.raises(ValueError, match="no batch among the 1 arguments of the loss; pass the batch"):
        amp.value_and_grad(lambda a: product(a, B), accumulate_steps=2)(A)
