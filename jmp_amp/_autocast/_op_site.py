"""An op site: where an op is in the program, the dtypes that it runs in, and why."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jmp_amp._float8 import PRIMITIVE


class OpSite(NamedTuple):
    """An op of the program at one place in the code.

    Attributes:
        direction: `"forward"`, `"backward"`, or `"recomputed"` for the backward pass.
        module: the named scopes around it, such as the modules of Flax and Haiku.
        source: the file and line that it comes from, and the function there.
        primitive: its name in a jaxpr.
        op_class: the class of the primitive, see `autocast`.
        why: a key of `REASONS`.
        inputs: the dtypes of its floating operands before they are cast.
        compute: the dtype that they are cast to; two for a product of float8 operands of different dtypes.
        output: the dtype of its result.
        runs: how often it runs; a `while_loop` counts as one iteration, and of a `cond` each branch counts.
        flops: floating-point operations of all runs, of products and convolutions only.
        bytes: the size of the results of all runs.
    """

    direction: str
    module: str
    source: str
    primitive: str
    op_class: str
    why: str
    inputs: tuple[str, ...]
    compute: str
    output: str
    runs: int
    flops: int
    bytes: int


REASONS = {
    "rule": "the class of its primitive",
    "bias": "a bias does not widen a product, nor a scalar an array",
    "stream": "it is a part of a residual stream, which `residual_stream` asks to be low",
    "angle": "only sines and cosines read its result",
    "distance": "a term of a squared distance or of a variance, which cancels with the others",
    "decomposition": "a matrix decomposition or a solver reads its result",
    "solution": "it reads what a decomposition or a solver returned",
    "recurrence": "a loop replaces a carry with products and sums of it",
    "logarithm": "a logarithm reads its result, which may be smaller or larger than float16 holds",
    "edge": "its result is read at the edge of a domain, where the slope is infinite, as by `acos`",
    "count": "it counts: both operands come from comparisons or integers",
    "reference": "it is in a function with a custom derivative and a reference to an array, which JAX runs",
    "loop": "it decides when a loop ends",
    "constant": "it reads a constant that the low dtype cannot hold, or a value computed from one",
    "readers": "all readers of its result read float32, and it fuses with them",
    "no matrix product": "float8 is for products of two matrices, not for convolutions or batches of products",
    "no weight": "float8 is for products with a weight, which is an argument of the function",
    "multiple": "the sizes of a float8 product are multiples of 16",
    "size": "the product is too small to gain by float8",
    "precision": "the program asks for float32 by `precision`",
    "region": "it is in a region: `full_precision` or `precision(dtype)`",
    "pattern": "its scope matches a pattern in `rules`",
    "override": "`rules` gives its primitive another class",
    "traced": "the op, or an operand, was traced in another dtype than float32",
    "unknown": "no rule for this primitive: it runs in the dtypes that it was traced in",
    "opaque": "no rule for this primitive: the products in it stay as they were traced",
    "derivative": "JAX derives it from the forward pass",
}


def widest_of(dtypes: Sequence[Any]) -> np.dtype:
    """Returns the floating dtype with the most bits."""
    return max(dtypes, key=lambda dtype: jnp.finfo(dtype).bits)


def flops_of(eqn: Any) -> int:
    """Returns the multiplications and additions of a product or convolution; memory limits all other ops."""
    if eqn.primitive.name in ("dot_general", PRIMITIVE):
        (contracting, _), _ = eqn.params["dimension_numbers"]
        terms = math.prod(eqn.invars[0].aval.shape[i] for i in contracting)
    elif eqn.primitive.name == "conv_general_dilated":
        kernel, out_features = eqn.invars[1].aval.shape, eqn.params["dimension_numbers"].rhs_spec[0]
        terms = math.prod(kernel) // max(kernel[out_features], 1)
    else:
        return 0
    return 2 * math.prod(eqn.outvars[0].aval.shape) * terms
