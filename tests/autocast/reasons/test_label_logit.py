"""The gather of a label's logit, which is rewritten, and those that look like it, which are not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jaxprs import equations

import jmp_amp as amp
from jmp_amp._autocast._rewrites import is_label_logit

W = jnp.eye(300)
X = jax.random.normal(jax.random.key(0), (4, 300))
LABELS = jnp.array([[299], [3], [44], [-7]])
PICK = lax.GatherDimensionNumbers((), (1,), (1,), (0,), (0,))
FILL = lax.GatherScatterMode.FILL_OR_DROP


def gather(numbers=PICK, slice_sizes=(1, 1), mode=FILL, indices=LABELS[..., None], x=lambda x: x, **options):
    return lambda logits: lax.gather(x(logits), indices, numbers, slice_sizes, mode=mode, **options)


PICKS = {
    "take_along_axis": lambda x: jnp.take_along_axis(x, LABELS, -1),
    "fill": gather(),
    "a value that fills": gather(fill_value=7.0),
    "in bounds": gather(mode="promise_in_bounds", indices=jnp.abs(LABELS)[..., None]),
    "out of bounds": gather(indices=LABELS[..., None] + 290),
    "unsigned indices": gather(indices=LABELS.astype(jnp.uint32)[..., None]),
    "sorted": gather(indices_are_sorted=True, indices=jnp.sort(LABELS, 0)[..., None]),
}
OTHERS = {
    "slices": gather(lax.GatherDimensionNumbers((1,), (), (1,), (0,), (0,)), (1, 3)),
    "slices of one": gather(lax.GatherDimensionNumbers((1,), (), (1,), (0,), (0,))),
    "clipped": gather(mode="clip", indices=LABELS[..., None] + 290),
    "small indices": gather(indices=jnp.array([1, 44, 255, 0], jnp.uint8)[:, None, None]),
    "small negative indices": gather(indices=jnp.array([1, 44, 127, -1], jnp.int8)[:, None, None]),
    "another axis": gather(
        lax.GatherDimensionNumbers((), (0,), (0,), (1,), (0,)), x=lambda x: x[:4, :4], indices=LABELS[..., None] // 100
    ),
    "rows": gather(lax.GatherDimensionNumbers((1,), (0,), (0,)), (1, 300)),
    "two indices a row": lambda x: jnp.take_along_axis(x, LABELS + jnp.arange(2), -1),
    "integers": lambda x: gather(x=lambda x: jnp.argsort(x, -1))(x) + 0.5,
    "half precision": gather(x=lambda x: x.astype(jnp.float16)),
}


def loss(pick):
    def fun(x):
        logits = x @ W
        return jnp.sum(jax.nn.logsumexp(logits, -1)) - jnp.sum(jnp.exp(pick(logits).astype(jnp.float32)))

    return fun


@pytest.mark.sweep(9)
@pytest.mark.parametrize("name", [*PICKS, *OTHERS])
@pytest.mark.usefixtures("users_code")
def test_a_gather_and_its_gradient_are_those_of_float32(name):
    fun = loss((PICKS | OTHERS)[name])
    got, want = jax.jit(lambda x: [jax.value_and_grad(f)(x) for f in (amp.autocast(fun), fun)])(X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-2, atol=1e-3), got, want)


@pytest.mark.parametrize("name", [*PICKS, *OTHERS])
@pytest.mark.usefixtures("users_code")
def test_only_the_gather_of_one_element_a_row_has_a_gradient_that_is_not_scattered(name):
    names = {eqn.primitive.name for eqn in equations(jax.grad(amp.autocast(loss((PICKS | OTHERS)[name]))), X)}
    assert ("scatter-add" not in names) == (name in PICKS or name == "integers")


@pytest.mark.parametrize("rows", [(1,), (1, 4), (4, 1), (1, 1), (2, 1, 2), ()], ids=str)
@pytest.mark.sweep(3)
@pytest.mark.usefixtures("users_code")
def test_axes_of_size_one_are_rows_too(rows):
    n = np.prod(rows, dtype=int)
    x, labels = X[:n].reshape(*rows, 300), LABELS[:n].reshape(*rows, 1)
    fun = loss(lambda logits: jnp.take_along_axis(logits, labels, -1))
    grads = jax.grad(amp.autocast(fun))
    assert "scatter-add" not in {eqn.primitive.name for eqn in equations(grads, x)}
    np.testing.assert_allclose(jax.jit(grads)(x), jax.jit(jax.grad(fun))(x), rtol=2e-2, atol=1e-3)


def test_every_parameter_is_compared():
    """Another value of any parameter but those that do not change the result is another gather."""
    params = {"dimension_numbers": PICK, "slice_sizes": (1, 1), "mode": FILL, "fill_value": None}
    params |= {"unique_indices": False, "indices_are_sorted": False}
    x, indices = jax.ShapeDtypeStruct((4, 300), jnp.float32), jax.ShapeDtypeStruct((4, 1, 1), jnp.int32)
    (eqn,) = jax.make_jaxpr(gather())(X).eqns
    assert set(eqn.params) == set(params), "does the rewrite assume anything of the new parameter?"
    assert is_label_logit(params, (x, indices))
    assert is_label_logit(
        params | {"fill_value": 1.0, "unique_indices": True, "indices_are_sorted": True}, (x, indices)
    )
    changes = [{"slice_sizes": (1, 3)}, {"slice_sizes": (2, 1)}, {"mode": lax.GatherScatterMode.CLIP}]
    for field in ("offset_dims", "collapsed_slice_dims", "start_index_map", "operand_batching_dims"):
        for value in {(), (0,), (1,), (0, 1)} - {getattr(PICK, field)}:
            numbers = {name: getattr(PICK, name) for name in PICK._fields} | {field: value}
            changes.append({"dimension_numbers": lax.GatherDimensionNumbers(**numbers)})
    for change in changes:
        assert not is_label_logit(params | change, (x, indices)), change
    for other in (
        jax.ShapeDtypeStruct((4, 1), jnp.int32),
        jax.ShapeDtypeStruct((4, 2, 1), jnp.int32),
        jax.ShapeDtypeStruct((4, 1, 2), jnp.int32),
        jax.ShapeDtypeStruct((4, 1, 1), jnp.uint8),
    ):
        assert not is_label_logit(params, (x, other))
    assert not is_label_logit(params, (jax.ShapeDtypeStruct((4, 300), jnp.int32), indices))
