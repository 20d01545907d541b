"""The same training run on one device and on many: data parallel, with sharded parameters, tensor parallel."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from many_devices import BAD_STEP, CLIP, NAMES, SCALES, WAYS, batch_of, control, initial_params, loss_and_grads, run

import jmp_amp as amp

pytestmark = pytest.mark.usefixtures("users_code")


def on_each_device(array):
    return [np.asarray(shard.data) for shard in array.addressable_shards]


CASES = [
    *((way, how, clip) for way in WAYS for how in ("auto", "shard_map") for clip in (None, CLIP)),
    *((way, "explicit", CLIP) for way in WAYS),
    # Without types nothing tells shards from copies, so only copies have a norm that is global.
    ("data_parallel", "shard_map_untyped", CLIP),
    ("fsdp", "shard_map_untyped", None),
]


def each_case(test):
    """By module, so that the tests of one case follow each other and share its run."""
    return pytest.mark.sweep(9)(pytest.mark.parametrize(("way", "how", "clip"), CASES, scope="module")(test))


@each_case
def test_a_run_on_many_devices_is_the_run_on_one(way, how, clip):
    history = run(way, how, clip)
    for step, (ours, expected) in enumerate(zip(history, control(clip), strict=True)):
        message = f"after step {step}"
        if (way, how) == ("fsdp", "shard_map_untyped"):
            ours, expected = ((p, state._replace(sum_of_squares=None), loss) for p, state, loss in (ours, expected))
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6, err_msg=message), ours, expected
        )
        # Of what is not sharded, every device holds the same bits.
        for leaf in jax.tree.leaves(ours):
            if leaf.sharding.is_fully_replicated:
                first, *others = on_each_device(leaf)
                assert len(others) == np.prod(WAYS[way][0]) - 1
                for other in others:
                    np.testing.assert_array_equal(other, first, message)


@each_case
def test_an_overflow_on_one_device_skips_the_step_on_all(way, how, clip):
    history = run(way, how, clip)
    (old, old_state, _), (new, new_state, loss) = history[BAD_STEP - 1 : BAD_STEP + 1]
    assert not np.isfinite(loss)
    before, after = (jax.tree.leaves(tree) for tree in ((old, old_state.inner_state), (new, new_state.inner_state)))
    for x, y in zip(before, after, strict=True):
        for mine, now in zip(on_each_device(x), on_each_device(y), strict=True):
            np.testing.assert_array_equal(now, mine)
    scales = [on_each_device(state.loss_scale.loss_scale) for _, state, _ in history]
    assert scales == [[scale] * np.prod(WAYS[way][0]) for scale in SCALES]
    assert [bool(state.loss_scale.last_finite) for _, state, _ in history] == [
        i != BAD_STEP for i in range(len(SCALES))
    ]


@pytest.mark.parametrize("way", WAYS)
def test_the_parameters_and_their_moments_lie_where_they_were_put(way):
    shape, specs = WAYS[way]
    params, state, _ = run(way, "auto", None)[-1]
    adam = state.inner_state[0]
    for tree in (params, adam.mu, adam.nu):
        for name, leaf in tree.items():
            parts = np.prod([dict(zip(("data", "model"), shape, strict=True))[axis] for axis in specs[name] if axis])
            assert leaf.addressable_shards[0].data.size == leaf.size // parts


def test_the_overflow_is_in_one_gradient_only_and_the_other_steps_are_clipped():
    for step in range(len(SCALES)):
        _, grads = loss_and_grads(initial_params(), batch_of(step), 1024.0)
        bad = {name: np.argwhere(~np.isfinite(g)).tolist() for name, g in grads.items()}
        assert bad == {name: [[6]] if (name, step) == ("b1", BAD_STEP) else [] for name in NAMES}
    norms = [np.sqrt(np.abs(state.sum_of_squares)) for _, state, _ in control(CLIP)]
    assert np.isinf(norms[BAD_STEP])
    assert min(norms) > 2 * CLIP


@pytest.mark.parametrize(
    ("axis_name", "message"),
    [
        (None, r"average the gradients first, `grads = jax.lax.pmean\(grads, 'data'\)`, or, .* `axis_name='data'`"),
        ("data", r"`inner`\[0\].mu\['w'\] is the same on all .* average .*`grads = jax.lax.pmean\(grads, 'data'\)`"),
    ],
)
def test_gradients_that_were_not_averaged_under_shard_map_say_so(axis_name, message):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    tx = amp.dynamic_loss_scale(optax.adam(1e-2), axis_name=axis_name)
    params, x = {"w": jnp.ones((4, 2))}, jnp.ones((8, 4))

    def step(params, state, x, average):
        mine = jax.tree.map(lambda p: lax.pcast(p, "data", to="varying"), params)
        grads = amp.grad(lambda p, x: jnp.mean((x @ p["w"]) ** 2), opt_state=state)(mine, x)
        updates, state = tx.update(lax.pmean(grads, "data") if average else grads, state, params)
        return optax.apply_updates(params, updates), state

    def run(average):
        sharded = jax.shard_map(
            functools.partial(step, average=average), mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P()
        )
        return jax.jit(sharded)(params, tx.init(params), x)

    with pytest.raises(ValueError, match=message):
        run(average=False)
    assert run(average=True)[1].loss_scale.last_finite
