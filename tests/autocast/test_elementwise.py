"""Derivatives of ops on elements in 16 bits, at all sizes of their operands."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import dtypes

import jmp_amp as amp

pytestmark = pytest.mark.usefixtures("users_code")

EYE, OTHER = jnp.eye(8), jnp.eye(8)  # products with one matrix belong together
RNG = np.random.default_rng(0)
DATA = [jnp.asarray(RNG.uniform(0.5, 2, (8, 8)) * RNG.choice([-1, 1], (8, 8)), jnp.float32) for _ in range(2)]
SIZES = 1e-3, 1.0, 100.0, 3000.0
# Functions of two arrays, with the power of their size that the result has. `atan2` is missing: as that of torch, its
# derivative divides by a sum of squares.
OPS = {
    "x + y": (jnp.add, 1),
    "x - y": (jnp.subtract, 1),
    "x / y": (jnp.divide, 0),
    "x / max": (lambda x, y: x / jnp.max(jnp.abs(y), -1, keepdims=True), 0),
    "x / s": (lambda x, y: x / y[0, 0], 0),
    "range": (lambda x, y: (x - jnp.min(x, -1, keepdims=True)) / (jnp.max(x, -1, keepdims=True) + jnp.abs(y)), 0),
    "1 / x": (lambda x, y: 1 / x, -1),
    "y / x, 3": (lambda x, y: jax.lax.map(lambda pair: pair[1] / pair[0], (x, y)), 0),
    "max": (jnp.maximum, 1),
    "where": (lambda x, y: jnp.where(x > 0, x, y), 1),
    "abs": (lambda x, y: jnp.abs(x), 1),
    "sqrt": (lambda x, y: jnp.sqrt(jnp.abs(x)), 0.5),
    "cbrt": (lambda x, y: jnp.cbrt(x), 1 / 3),
    "tanh": (lambda x, y: jnp.tanh(x), 0),
    "clip": (lambda x, y: jnp.clip(x, -1, 1), 0),
}


@pytest.mark.parametrize("low", ["float16", "bfloat16"])
def test_gradients_are_those_of_float32_at_any_size(low):
    """Between products with the identity, which round; cotangents and gradients are as far from 1 as each other."""

    def gradients(transform, size):
        def of(op, power):
            def fun(x, y):
                return jnp.sum(jnp.tanh(transform(lambda x, y: op(x @ EYE, y @ OTHER) @ EYE)(x, y) / size**power))

            return jax.grad(lambda pair: fun(*pair) * size ** ((1 + power) / 2))([x * size for x in DATA])

        return {name: of(*each) for name, each in OPS.items()}

    def rounded(fun):  # the operands, once
        return lambda x, y: fun(*(z.astype(low).astype(jnp.float32) for z in (x, y)))

    def scaled(fun):
        return lambda x, y: amp.autocast(fun, low)(x, y)

    run = jax.jit(lambda: [[gradients(way, size) for way in (scaled, rounded)] for size in SIZES])
    for size, (got, want) in zip(SIZES, run(), strict=True):
        for name in OPS:
            for x, y in zip(got[name], want[name], strict=True):
                assert np.linalg.norm(x - y) <= 0.03 * np.linalg.norm(y), (name, size)


def test_the_divisor_of_a_quotient_is_no_power_in_16_bits():
    fun = jax.grad(lambda x, y: jnp.sum(amp.autocast(lambda x, y: ((x @ EYE) / (y @ OTHER)) @ EYE)(x, y)), (0, 1))
    assert dtypes(fun, *DATA, primitive="integer_pow") == []
    low = dtypes(fun, *DATA, primitive="div")
    assert low == ["float16 float16 -> float16"] * 2  # forward, and once backward for both gradients


def test_powers_above_cubes_are_float32_as_those_of_torch():
    def hill(power):  # at most 1, though its powers are not
        return lambda x: (lambda p: p / (1 + p))(jnp.abs(x @ EYE) ** power) @ EYE

    x = 16 * DATA[0]
    for power, computed in {2: "float16", 3: "float16", 4: "float32", 6: "float32", -1: "float32"}.items():
        rows = amp.explain(hill(power))(x).select(direction="forward").rows
        assert [row.compute for row in rows if row.primitive in ("integer_pow", "square")] == [computed], power
        if power > 3:
            assert np.allclose(amp.autocast(hill(power))(x), hill(power)(x), atol=2e-3)
