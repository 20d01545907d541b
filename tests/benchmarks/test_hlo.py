"""What `benchmarks/hlo.py` reads off a module, on programs whose figures are known."""

import types

import hlo
import jax
import jax.numpy as jnp
import pytest
from jax import lax


def conv(x, w, stride, padding):
    return lax.conv_general_dilated(x, w, stride, padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize("stride", [(1, 1), (2, 2), (2, 1)])
def test_a_convolution_and_its_gradients_multiply_the_same_pairs(stride, padding):
    x, w = jnp.ones((2, 9, 8, 3)), jnp.ones((3, 2, 3, 5))
    pairs = jnp.sum(conv(x, w, stride, padding))  # of ones, each of which is counted once
    grads = jax.grad(lambda x, w: jnp.sum(conv(x, w, stride, padding) ** 2), (0, 1))
    flops = [each for _, each, _ in hlo.products(jax.jit(grads).lower(x, w).compile())]
    assert flops == [2 * pairs] * 3


def test_products_in_a_loop_count_as_often_as_it_runs():
    def fun(x, ws):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]

    x, ws = jnp.ones((4, 16)), jnp.ones((7, 16, 16))
    ((times, flops, dtypes),) = hlo.products(jax.jit(fun).lower(x, ws).compile())
    assert (times, flops, dtypes) == (7, 2 * 4 * 16 * 16, ("f32", "f32"))


def test_a_tpu_multiplies_matrices_by_a_convolution_without_a_window():
    module = """ENTRY %main (x: bf16[4,8], w: bf16[8,16]) -> f32[4,16] {
  %x = bf16[4,8]{1,0} parameter(0)
  %w = bf16[8,16]{1,0} parameter(1)
  ROOT %product = f32[4,16]{1,0} convolution(%x, %w), dim_labels=bf_io->bf
}"""
    compiled = types.SimpleNamespace(as_text=lambda: module)
    assert list(hlo.products(compiled)) == [(1, 2 * 4 * 8 * 16, ("bf16", "bf16"))]
