"""Writes the page of the classes of all primitives, from the table that autocast uses: `python docs/write_ops.py`."""

import pathlib
from collections import defaultdict
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from jmp_amp._jaxpr import HIGHER_ORDER
from jmp_amp._ops import PASSES, RULES, Demand, OpClass, ResultKind, Rule, rule_of

PAGE = pathlib.Path(__file__).parent / "reference/ops.md"
HEAD = """# Ops by class

The class of each primitive of JAX under `autocast`. PyTorch has the same list: the [autocast op
reference](https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference).

A function of `jax.numpy` or `jax.nn` is made of primitives, and each primitive has its own class.
`jax.make_jaxpr(fun)(x)` lists the primitives of a function. `amp.explain(fun)(x)` lists the dtype that `autocast`
chooses for each, with the reason. [`rules`](../custom-rules.md#primitives) gives a primitive another class.

The class decides the dtype of operands that were traced in float32. All other operands stay as they are. Notes:

- **fuses**: the op runs in float32 if only float32 ops read its result. XLA fuses it with them, so it stores nothing.
- **moves**: the op only moves values, which is exact in any dtype.
- **float32 products in front**: the nearest product that this op reads runs in float32, because the op would increase
  the rounding errors of that product ([the reasons](../explain.md#why-is-this-op-float32)).

`docs/write_ops.py` writes this page from the table that `autocast` uses.
"""
SECTIONS = {
    OpClass.LOWER: """## Lower: float16 or bfloat16

The operands are cast to the `dtype` of `autocast`, and so is the result. Matrix units accumulate in float32.""",
    OpClass.FULL: """## Full: float32

The operands are cast to float32, and the result is float32.""",
    OpClass.PROMOTE: """## Promote: the widest dtype of the operands

A bias does not widen the op, nor does a scalar.""",
    OpClass.FOLLOW: """## Follow: the dtype of the operand

The operands are taken as they are.""",
    OpClass.ORIGINAL: """## Original: the dtypes in which the op was traced

The operands are cast back to the traced dtypes. A primitive that is not on this page belongs here, too.""",
}
USED_BY = {  # what people look for
    "dot_general": "`x @ y`, `jnp.matmul`, `jnp.dot`, `jnp.einsum`, `jnp.tensordot`",
    "conv_general_dilated": "`lax.conv`, convolution layers",
    "ragged_dot_general": "`lax.ragged_dot`, mixtures of experts",
    "exp": "`jax.nn.softmax`, `jax.nn.logsumexp`",
    "pow": "`x**y`",
    "integer_pow": "`x**3`, GELU",
    "log": "`jax.nn.log_softmax`, losses",
    "rsqrt": "norms",
    "reduce_sum": "`jnp.sum`, `jnp.mean`, `jnp.var`",
    "reduce_prod": "`jnp.prod`",
    "cumsum": "`jnp.cumsum`",
    "scatter-add": "`x.at[i].add(y)`, `jax.ops.segment_sum`, the gradient of a gather",
    "reduce_window_sum": "average pooling",
    "add": "`x + y`",
    "sub": "`x - y`",
    "mul": "`x * y`",
    "div": "`x / y`",
    "max": "`jnp.maximum`, ReLU",
    "select_n": "`jnp.where`",
    "scatter": "`x.at[i].set(y)`",
    "concatenate": "`jnp.concatenate`",
    "tanh": "`jnp.tanh`, GELU",
    "logistic": "`jax.nn.sigmoid`, SiLU",
    "erf": "exact GELU",
    "sqrt": "`jnp.sqrt`, `jnp.std`",
    "reduce_max": "`jnp.max`",
    "reduce_window_max": "max pooling",
    "psum": "`lax.psum`, `lax.pmean`",
    "gather": "`x[i]`, `jnp.take`, embeddings",
    "convert_element_type": "`x.astype(dtype)`",
    "cholesky": "`jnp.linalg.cholesky`",
    "custom_linear_solve": "`jnp.linalg.solve`",
    "fft": "`jnp.fft.fft`",
    "pallas_call": "Pallas kernels",
    "ffi_call": "kernels of other libraries",
    "dot_product_attention_fwd_wrapper": '`implementation="cudnn"` of `jax.nn.dot_product_attention`',
}
X, LOW = jnp.ones((8, 8)), jnp.ones((8, 8), jnp.bfloat16)
USUAL = {  # of a primitive whose class depends on its parameters or shapes: a usual call, and what other calls are
    "dot_general": (
        lambda: X @ X,
        "of two vectors, of rows of vectors, or of at most 3 terms of float32 data: full; if it sums nothing, or a "
        "matrix is at most 4 x 4: promote; "
        '`precision="highest"`: original',
    ),
    "conv_general_dilated": (
        lambda: lax.conv(jnp.ones((1, 2, 4, 4)), jnp.ones((2, 2, 3, 3)), (1, 1), "SAME"),
        'if it sums nothing, or a matrix is at most 4 x 4: promote; `precision="highest"`: original',
    ),
    "ragged_dot_general": (
        lambda: lax.ragged_dot(X, jnp.ones((2, 8, 8)), jnp.array([4, 4])),
        'if it sums nothing, or a matrix is at most 4 x 4: promote; `precision="highest"`: original',
    ),
    "exp": (
        lambda: jnp.exp(X),
        "of a complex number: original, and float32 products in front, if only such ops read them",
    ),
    "scatter": (lambda: X.at[0].set(X[1]), "of a function, as in `x.at[i].apply(f)`: original"),
    "integer_pow": (lambda: X**3, "a negative exponent: full"),
    "mul": (lambda: X * X, "with `out_dtype`: original"),
    "div": (lambda: X / X, "of a number by an array, as `1 / x`: full"),
    "gather": (lambda: X[jnp.array([0, 1])], "with a fill value that float16 cannot hold: full"),
    "sort": (lambda: jnp.sort(X), "of `argsort`: a float32 product in front, if it has at most 512 columns"),
    "convert_element_type": (
        lambda: LOW.astype(jnp.float32),
        "a cast to any other dtype than float32: original, so it is done as written; to an integer of more than 8 "
        "bits: float32 products in front",
    ),
}
READ = {
    Demand.ANGLE: "float32 products in front, if only sines and cosines read them",
    Demand.MATRIX: "float32 products in front",
    Demand.RANGE | Demand.LOG: "in float16, float32 products in front",
    Demand.LOG: "in float16, float32 products in front, if the program scales them up or changes their sign",
    Demand.EDGE: "float32 products in front",
    Demand.ROOT: "in `sqrt(1 - x)`, float32 products in front",
    Demand.CODE: "float32 products with whole numbers in front",
    Demand.RANK: "a float32 product in front, if it has at most 512 columns",
}

REASON = {  # what an op passes on, by the reasons of `explain`
    Demand.ANGLE: "angle",
    Demand.DISTANCE: "distance",
    Demand.MATRIX: "decomposition",
    Demand.RANGE: "logarithm",
    Demand.EDGE: "edge",
}
PASSED = """## What passes a reason on

A reason for float32 begins at an op that asks for it, and goes on, through the ops in front of that, to the nearest
product, which ends it. Of an op in between, the kind of its results says which reasons pass; a square passes
`distance` and `edge`, too.

| results | passes on |
|---|---|"""


def equation(name: str) -> JaxprEqn:
    """Returns the equation of the usual call of a primitive."""
    return next(eqn for eqn in equations(jax.make_jaxpr(USUAL[name][0])()) if eqn.primitive.name == name)


def equations(jaxpr) -> Iterator[JaxprEqn]:
    """Yields the equations of a jaxpr and of the functions that it calls."""
    for eqn in jaxpr.eqns:
        yield eqn
        if "jaxpr" in eqn.params:
            yield from equations(eqn.params["jaxpr"])


def notes(name: str, rule: Rule) -> str:
    """What the page says of a primitive beside its class."""
    parts = [
        "moves" if rule.moves else "",
        "fuses" if rule.fuses else "",
        READ.get(rule.demand, ""),
        USUAL[name][1] if name in USUAL else "",
    ]
    return "; ".join(filter(None, parts))


def page() -> str:
    """Returns the text of the page."""
    tables = {op_class: defaultdict(list) for op_class in OpClass}  # the primitives with equal notes
    for name, rule in RULES.items():
        found = rule if isinstance(rule, Rule) else rule_of(equation(name))
        tables[found.op_class][USED_BY.get(name, ""), notes(name, found)].append(f"`{name}`")
    parts = [HEAD]
    for op_class, head in SECTIONS.items():
        rows = [f"| {' '.join(names)} | {users} | {note} |" for (users, note), names in tables[op_class].items()]
        parts.append("\n".join([head, "", "| primitives | used by | notes |", "|---|---|---|", *rows, ""]))
    kinds = defaultdict(list)  # those that pass the same
    for kind in [kind for kind in ResultKind if kind is not ResultKind.MATRIX_PRODUCT]:
        passes = PASSES.get(kind, Demand.MATRIX)
        kinds[", ".join(f"`{reason}`" for way, reason in REASON.items() if passes & way) or "none"].append(kind.value)
    parts.append("\n".join([PASSED, *(f"| {', '.join(each)} | {reasons} |" for reasons, each in kinds.items()), ""]))
    names = " ".join(f"`{name}`" for name in HIGHER_ORDER if name not in RULES)
    return "\n".join(
        [*parts, "## Ops that hold functions", "", "Each op inside these has its own class:", "", names, ""]
    )


if __name__ == "__main__":
    PAGE.write_text(page())
