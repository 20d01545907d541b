"""A layer and both its gradients in float8: kernels and bytes by the compiler, beside the bytes that must move.

    python benchmarks/quantized_layer.py

`benchmarks/kernels.py` writes the table to the page. A process compiles for one kind of GPU only: the compiler of
Mosaic GPU kernels keeps the first.
"""

import functools

import gpu_aot  # first: it sets the platform
import jax
import jax.numpy as jnp
from jax import lax
from report import head, row

import jmp_amp as amp
from pallas_kernels import quantize

LAYER = 8192, 4096, 4096  # tokens, and the features that a layer reads and returns

BFLOAT16, ONE, BLOCKS = "bfloat16", "one scale", "blocks of 32"
# Bytes for each element of the input, the weights and the cotangent, which all have as many elements as the result of
# a product that contracts the other two. Each is an operand of two products: of 16 or 8 bits, and a scale for 32.
FLOORS = {
    BFLOAT16: 2 * 2 + 2,  # read by two products, written by one
    ONE: 2 * 2 + 2 + 2 + 2,  # read for the maximum and for the casts; both casts written; read by two products; written
    BLOCKS: 2 + (2 + 2) * (1 + 1 / 32) + 2,  # the same with scales, but read once
}
CONTRACT_LAST = ((1,), (1,)), ((), ())


def in_bfloat16(x, w, cotangent):
    def product(a, b):
        return lax.dot_general(a, b, CONTRACT_LAST, preferred_element_type=jnp.bfloat16)

    return product(x, w.T), product(cotangent, w), product(x.T, cotangent.T)


def autocast(x, w, cotangent):
    y, vjp = jax.vjp(amp.autocast(jnp.matmul, "float8"), x, w)
    return y, *vjp(cotangent)


def scaled_dot_general(x, w, cotangent):
    configs = [jax.nn.get_scaled_dot_general_config("mxfp8")] * 3
    numbers = (((2,), (1,)), ((), ()))
    product = functools.partial(jax.nn.scaled_dot_general, dimension_numbers=numbers, configs=configs)
    y, vjp = jax.vjp(lambda x, w: product(x[None], w).astype(jnp.bfloat16), x, w)
    return y[0], *vjp(cotangent[None])


def one_scale(implementation, x, w, cotangent):
    x, w, cotangent = (quantize(a, implementation=implementation) for a in (x, w, cotangent))

    def product(a, b, *scales):
        y = lax.dot_general(a, b, CONTRACT_LAST, preferred_element_type=jnp.bfloat16)
        return y * scales[0].astype(y.dtype) * scales[1].astype(y.dtype)

    return (
        product(x.rows, w.columns, x.scale, w.scale),
        product(cotangent.rows, w.rows, cotangent.scale, w.scale),
        product(x.columns, cotangent.columns, x.scale, cotangent.scale),
    )


def triton_product(a, b, a_scales, b_scales):
    return lax.scaled_dot(
        a,
        b,
        lhs_scale=a_scales,
        rhs_scale=b_scales,
        dimension_numbers=CONTRACT_LAST,
        preferred_element_type=jnp.bfloat16,
    )


def cudnn_product(*args):
    return jax.nn.scaled_matmul(*(a[None] for a in args), preferred_element_type=jnp.bfloat16)[0]


def blocks(implementation, product, x, w, cotangent):
    x, w, cotangent = (quantize(a, block=32, implementation=implementation) for a in (x, w, cotangent))
    return (
        product(x.rows, w.columns, x.row_scales, w.column_scales),
        product(cotangent.rows, w.rows, cotangent.row_scales, w.row_scales),
        product(x.columns, cotangent.columns, x.column_scales, cotangent.column_scales),
    )


IMPLEMENTATIONS = "xla", "mosaic_gpu", "triton"
PRODUCTS = {"`lax.scaled_dot`": triton_product, "`jax.nn.scaled_matmul`": cudnn_product}
ROWS = {(BFLOAT16, "", "`lax.dot_general`"): in_bfloat16, (ONE, "autocast", "`lax.dot_general`"): autocast}
ROWS |= {(ONE, by, "`lax.dot_general`"): functools.partial(one_scale, by) for by in IMPLEMENTATIONS}
OF_B200 = {(BLOCKS, "JAX", "`jax.nn.scaled_dot_general`"): scaled_dot_general}
OF_B200 |= {
    (BLOCKS, by, name): functools.partial(blocks, by, product)
    for name, product in PRODUCTS.items()
    for by in IMPLEMENTATIONS
}
TARGETS = {"H200": ROWS, "B200": ROWS | OF_B200}


def costs(target, only=TARGETS["B200"]):
    """Returns the figures of each row on a GPU, with the bytes of its floor, in units of a byte."""
    tokens, features, results = LAYER
    shapes = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        for shape in ((tokens, features), (features, results), (tokens, results))
    ]
    elements = sum(x.size for x in shapes)
    mesh = gpu_aot.mesh(target)
    found = {}
    for key, layer in TARGETS[target].items():
        if key in only:
            figures = gpu_aot.cost(gpu_aot.compile_for(layer, *gpu_aot.struct(mesh, shapes)))
            found[key] = figures | {"floor": FLOORS[key[0]] * elements}
    return found


def table():
    """Yields the lines of the table."""
    tokens, features, results = LAYER
    yield f"A layer of {features} x {results} on {tokens} tokens, with both gradients; operands, results: bfloat16."
    yield f"Compiled with JAX {jax.__version__}, by `benchmarks/quantized_layer.py`."
    yield ""
    yield from head("GPU", "scales", "quantized by", "product", "kernels", "MB", "MB at least", "x", "temporary MB")
    for target in TARGETS:
        for key, cost in gpu_aot.in_a_process(costs, target).items():
            mb = [cost[name] / 1e6 for name in ("bytes_moved", "floor", "temp_bytes")]
            cells = f"{mb[0]:.0f}", f"{mb[1]:.0f}", f"{mb[0] / mb[1]:.2f}", f"{mb[2]:.0f}"
            yield row(target, *key, cost["kernels"], *cells)


if __name__ == "__main__":
    for line in table():
        print(line, flush=True)
