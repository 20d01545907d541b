"""Which numbers are a loss scale: what every entry takes, and what becomes of a state that holds another."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_amp as amp
from jmp_amp import LossScale

pytestmark = pytest.mark.usefixtures("users_code")

PARAMS = {"w": jnp.array([1.0, -2.0, 3.0]), "b": jnp.array([0.5, -0.5])}
MARK = amp.unscale_and_check


def loss_fn(params):
    return jnp.sum(params["w"] ** 2) + jnp.sum((params["b"] - 1) ** 4)


@pytest.mark.parametrize("scale", [0, 0.0, -8, 1e300, np.nan, np.inf, jnp.float32(0), np.float32(-1)], ids=repr)
def test_a_scale_that_is_no_scale_raises_outside_of_jit(scale):
    for call in (
        lambda: amp.value_and_grad(loss_fn, loss_scale=scale)(PARAMS),
        lambda: amp.grad(loss_fn, loss_scale=scale)(PARAMS),
        lambda: MARK().update(PARAMS, MARK().init(PARAMS), loss_scale=scale),
    ):
        with pytest.raises(
            ValueError, match="`loss_scale` must be a number from 2^-126 to 2^126.*, got".replace("^", r"\^")
        ):
            call()


BEYOND = [2.0**127, 3e38, np.nextafter(2.0**126, np.inf), np.nextafter(2.0**-126, 0), 2.0**-127, 1e-40, 5e-324]
ENTRIES = {
    "init_scale": lambda x: LossScale(init_scale=x, min_scale=2.0**-126, max_scale=2.0**126),
    "min_scale": lambda x: LossScale(min_scale=x),
    "max_scale": lambda x: LossScale(max_scale=x),
    "static": LossScale.static,
    **{
        name: lambda x, name=name: getattr(LossScale, name)(init_scale=x, min_scale=2.0**-126, max_scale=2.0**126)
        for name in ("torch", "apex", "deepspeed", "deepspeed_consecutive", "megatron", "keras", "flax", "jmp")
    },
    "value_and_grad": lambda x: amp.value_and_grad(loss_fn, loss_scale=x),
    "a state": lambda x: amp.value_and_grad(loss_fn, opt_state=LossScale().init()._replace(loss_scale=np.float64(x))),
    "grad": lambda x: amp.grad(loss_fn, loss_scale=x),
    "link": lambda x: MARK().update(PARAMS, MARK().init(PARAMS), loss_scale=x),
    "update": lambda x: amp.dynamic_loss_scale(optax.sgd(0.1)).update(
        PARAMS, amp.dynamic_loss_scale(optax.sgd(0.1)).init(PARAMS), PARAMS, loss_scale=x
    ),
    "set": lambda x: amp.set_loss_scale(LossScale().init(), x),
    "set a state": lambda x: amp.set_loss_scale(
        LossScale().init(), LossScale().init()._replace(loss_scale=np.float64(x))
    ),
    "load_state_dict": lambda x: amp.interop.torch.load_state_dict(
        {"scale": x, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 1, "_growth_tracker": 0}
    ),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_entry_takes_the_same_scales(entry):
    for scale in (2.0**-126, 1e-30, 1.0, 3.0, 2.0**24, 2.0**126):
        for cast in (float, np.float32, jnp.float32):
            if (entry != "min_scale" or scale <= 2.0**16) and (entry != "max_scale" or scale >= 2.0**16):
                ENTRIES[entry](cast(scale))
    for scale in BEYOND:
        for cast in (float, np.float64):
            with pytest.raises(ValueError, match=r"from 2\^-126 to 2\^126, so that float32 holds its reciprocal, got"):
                ENTRIES[entry](cast(scale))


@pytest.mark.parametrize("scale", [np.nan, 0.0, 2.0**127])
def test_a_traced_scale_is_data(scale):
    state = LossScale().init()
    for call in (
        lambda x: amp.grad(loss_fn, loss_scale=x)(PARAMS),
        lambda x: MARK().update(PARAMS, MARK().init(PARAMS), loss_scale=x),
        lambda x: amp.set_loss_scale(state, x),
        lambda x: amp.set_loss_scale(state, state._replace(loss_scale=x)),
    ):
        jax.jit(call)(jnp.float32(scale))


# A state from elsewhere.


@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf, -4.0, 0.0, 1e-45, 2.0**127], ids=repr)
@pytest.mark.parametrize(
    "rule", [LossScale(), LossScale.static(8.0), LossScale.apex()], ids=["default", "static", "apex"]
)
def test_a_scale_that_is_none_is_told_and_replaced(rule, scale):
    tx = amp.dynamic_loss_scale(optax.sgd(0.1), rule)
    state = tx.init(PARAMS)
    state = state._replace(loss_scale=state.loss_scale._replace(loss_scale=jnp.float32(scale)))
    with pytest.raises(
        amp.LossScaleError, match=r"loss scale in the state is not between 2\^-126 and .*set_loss_scale"
    ):
        amp.check_health(state)
    _, state = jax.jit(tx.update)(PARAMS, state, PARAMS)
    assert amp.get_loss_scale(state) == rule.init_scale


def test_a_tracker_at_the_end_of_int32_does_not_wrap():
    rule = LossScale(growth_interval=2**31 - 1)
    state = rule.init()._replace(growth_tracker=jnp.int32(2**31 - 2))
    state = rule.update(state, True)
    assert (state.growth_tracker, state.loss_scale) == (0, 2.0**17)
    saved = {"scale": 4.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3}
    rule, state = amp.interop.torch.load_state_dict(saved | {"_growth_tracker": 2**31 - 1})
    assert rule.update(state, True).loss_scale == 8


def test_a_static_scale_that_was_set_stays_where_it_is():
    rule = LossScale.static(64.0)
    for finite in (True, False):
        state = amp.set_loss_scale(rule.init(), 8.0)._replace(growth_tracker=jnp.int32(1999))
        assert rule.update(state, finite).loss_scale == 8


def test_apex_ends_at_its_ceiling():
    rule = LossScale.apex(init_scale=2.0**24 - 2**20, growth_interval=1)
    assert rule.update(rule.init(), True).loss_scale == 2.0**24
    beyond = amp.set_loss_scale(rule.init(), 2.0**30)
    assert rule.update(beyond, True).loss_scale == 2.0**30
    refuses = LossScale(init_scale=2.0**24 - 2**20, growth_interval=1)
    assert refuses.update(refuses.init(), True).loss_scale == 2.0**24 - 2**20
