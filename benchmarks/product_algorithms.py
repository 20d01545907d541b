"""Errors of float32 products on matrix units: one product of float32, or several of bfloat16 parts.

It is the last section of the page of `autocast_accuracy.py`. A CPU computes all of them in float32, so the algorithms
are written out here.
"""

import jax.numpy as jnp
import numpy as np
from report import head, row

PARTS = {"bfloat16": 1, "bfloat16_x3": 2, "bfloat16_x6": 3}  # the bfloat16 numbers that a float32 is split into
SIZES = (64, 512, 4096)  # terms of a sum

WHY = """
## Float32 products on matrix units

`with amp.precision("bfloat16_x3"):`, or the same as a rule of a scope, lets float32 products run on matrix units: an
operand is split into a sum of bfloat16 numbers, and the products of these are added in float32 ([Henry, Tang and
Heinecke, 2019](https://arxiv.org/abs/1904.06376)). For you: where a product must be float32, `"bfloat16_x6"` is as
accurate, and `"bfloat16_x3"` is accurate to 4e-6 at half the work.
"""
NOTES = """
The error of a product of normally distributed matrices is the L2 norm of its difference to float64, over the norm of
the product. The squared distances are |x|² + |y|² - 2 x·y of points in 64 dimensions that are a hundredth of their
norm apart; the error is the largest one, over the distance. Autocast leaves such products in float32: in bfloat16
nothing of them is right.

Compiled for an H200, the products carry the algorithm (`tests/ops/test_product_algorithms.py`). `"tensorfloat32"` is
not in the table: NVIDIA's GPUs compute a float32 product so by default, with operands of 11 bits; a TPU, with the same
name, as `"bfloat16_x3"`.
"""


def parts(x, n):
    """Splits float32 numbers into a sum of `n` bfloat16 numbers, the largest first."""
    found = []
    for _ in range(n):
        found.append(x.astype(jnp.bfloat16).astype(np.float32))
        x = x - found[-1]
    return found


def product(x, y, algorithm):
    """Multiplies matrices; of the products of parts, those that are too small to matter are left out."""
    if algorithm == "float32":
        return x @ y
    n = PARTS[algorithm]
    pairs = [(i, j) for i in range(n) for j in range(n) if i + j < n]
    xs, ys = parts(x, n), parts(y, n)
    return sum(xs[i] @ ys[j] for i, j in sorted(pairs, key=sum, reverse=True))


def product_error(terms, algorithm):
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal(shape).astype(np.float32) for shape in ((128, terms), (terms, 128)))
    exact = x.astype(np.float64) @ y.astype(np.float64)
    return np.linalg.norm(product(x, y, algorithm) - exact) / np.linalg.norm(exact)


def distance_error(algorithm):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((128, 64)).astype(np.float32)
    y = (x + 0.01 * rng.standard_normal((128, 64))).astype(np.float32)

    def squared(x, y, xy):
        return np.diag((x**2).sum(1)[:, None] + (y**2).sum(1) - 2 * xy)

    exact = squared(*(z.astype(np.float64) for z in (x, y)), x.astype(np.float64) @ y.T.astype(np.float64))
    return np.max(np.abs(squared(x, y, product(x, y.T, algorithm)) - exact) / exact)


def section():
    """Yields the lines of the section."""
    yield WHY
    yield from head("format", "products", *(f"error, {n} terms" for n in SIZES), "squared distances")
    for algorithm in ("float32", "bfloat16_x6", "bfloat16_x3", "bfloat16"):
        n = PARTS.get(algorithm, 1)
        errors = (f"{product_error(terms, algorithm):.1e}" for terms in SIZES)
        yield row(f"`{algorithm}`", n * (n + 1) // 2, *errors, f"{distance_error(algorithm):.1e}")
    yield NOTES.rstrip()
