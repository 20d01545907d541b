"""Rounding to float16 and bfloat16: what is exact stays, what is not goes either way with the odds of the distances."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_amp as amp
from jmp_amp._params import round_stochastically, round_to_nearest

LOW = [jnp.float16, jnp.bfloat16]
SAMPLES = 8192


def every_value(dtype):
    return np.arange(2**16, dtype=np.uint16).view(dtype)


def bits(x):
    return np.asarray(x).view(np.uint16)


def stochastic(x, dtype, jit=True):
    def rounded(x, key):
        return round_stochastically(x, dtype, key)

    return np.asarray((jax.jit(rounded) if jit else rounded)(jnp.asarray(x), jax.random.key(0)))


def one_value_in_every_binade(dtype):
    """float32 values of both signs from far below the smallest subnormal of `dtype` to its largest value."""
    rng = np.random.default_rng(0)
    lowest = {jnp.float16: -40, jnp.bfloat16: -133}[dtype]
    exponents = np.arange(lowest, jnp.finfo(dtype).maxexp)
    magnitudes = np.minimum(rng.uniform(1, 2, exponents.size) * 2.0**exponents, float(jnp.finfo(dtype).max))
    return np.concatenate([magnitudes, -magnitudes]).astype(np.float32)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("jit", [pytest.param(False, marks=pytest.mark.slow), True])
def test_stochastic_rounding_is_unbiased_in_every_binade(dtype, jit):
    info, x = jnp.finfo(dtype), one_value_in_every_binade(dtype)
    size = np.abs(x.astype(np.float64))
    last_place = 2.0 ** (np.maximum(np.frexp(size)[1] - 1, info.minexp) - info.nmant)
    below, odds = np.floor(size / last_place), size / last_place % 1
    rounded = stochastic(np.repeat(x[:, None], SAMPLES, axis=1), dtype, jit).astype(np.float64)
    assert (np.signbit(rounded) == np.signbit(x)[:, None]).all()
    ups = np.abs(rounded) / last_place[:, None] - below[:, None]
    assert np.isin(ups, [0, 1]).all()
    sigma = np.sqrt(odds * (1 - odds) / SAMPLES) + 1e-6  # where both are 0, the value is exact
    z = (ups.mean(axis=1) - odds) / sigma
    assert np.abs(z).max() < 4
    assert abs(z.sum()) < 4 * np.sqrt(z.size)  # no small bias that all binades share


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("jit", [False, True])
def test_stochastic_rounding_never_moves_what_the_dtype_holds(dtype, jit):
    values = every_value(dtype)
    wide = values.astype(np.float32)
    rounded, nan = stochastic(wide, dtype, jit), np.isnan(wide)
    assert np.isnan(rounded[nan]).all()
    np.testing.assert_array_equal(bits(rounded)[~nan], bits(values)[~nan])


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("sign", [-1, 1])
def test_finite_values_stay_finite(dtype, sign):
    largest = np.float32(jnp.finfo(dtype).max)
    beyond = np.float32([largest, np.nextafter(largest, np.inf), largest * (1 + 2.0**-11), np.finfo(np.float32).max])
    for rounded in (stochastic(sign * beyond, dtype), np.asarray(round_to_nearest(jnp.asarray(sign * beyond), dtype))):
        np.testing.assert_array_equal(rounded.astype(np.float32), sign * largest)
    for rounded in (stochastic([sign * np.inf], dtype), round_to_nearest(jnp.asarray([sign * np.inf]), dtype)):
        np.testing.assert_array_equal(np.float32(rounded), sign * np.inf)


@pytest.mark.parametrize("dtype", LOW)
def test_vmap_and_scan_round_as_a_loop_does(dtype):
    x, keys = jnp.asarray(one_value_in_every_binade(dtype)), jax.random.split(jax.random.key(1), 3)

    @jax.jit
    def three_ways(keys):
        mapped = jax.vmap(lambda key: round_stochastically(x, dtype, key))(keys)
        _, scanned = jax.lax.scan(lambda _, key: (None, round_stochastically(x, dtype, key)), None, keys)
        return jnp.stack([round_stochastically(x, dtype, key) for key in keys]), mapped, scanned

    expected, mapped, scanned = three_ways(keys)
    np.testing.assert_array_equal(bits(mapped), bits(expected))
    np.testing.assert_array_equal(bits(scanned), bits(expected))


@pytest.mark.sweep(9)
@pytest.mark.usefixtures("users_code")
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("inner", [optax.sgd(1.0), optax.adam(1e-3)], ids=["sgd", "adam"])
def test_five_hundred_steps_of_no_gradient_leave_every_bit(dtype, inner):
    values = every_value(dtype)
    # On a CPU float32 arithmetic, optax's too, flushes the subnormals of bfloat16 to zero.
    size = np.abs(values.astype(np.float32))
    values = values[np.isfinite(size) & ((size == 0) | (size >= np.finfo(np.float32).tiny))]
    largest = jnp.finfo(dtype).max
    edges = np.array([0.0, -0.0, largest, -largest, jnp.finfo(dtype).smallest_normal], dtype)
    params = np.concatenate([np.random.default_rng(0).choice(values, 4000), edges])
    tx = amp.low_precision_params(inner, masters=False, rounding="stochastic")

    def step(_, carry):
        params, state = carry
        updates, state = tx.update(jnp.zeros(params.shape, dtype), state, params)
        return optax.apply_updates(params, updates), state

    params = jnp.asarray(params)
    after, _ = jax.jit(lambda *carry: jax.lax.fori_loop(0, 500, step, carry))(params, tx.init(params))
    np.testing.assert_array_equal(bits(after), bits(params))
