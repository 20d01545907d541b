"""Decides the dtypes of the operands of a first-order op, and describes its results."""

import functools
import math
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any, NamedTuple

from jax import lax
from jax.extend.core import Var

from jmp_amp import _jaxpr as jx
from jmp_amp._autocast._options import Options
from jmp_amp._autocast._plan import Inside, Region
from jmp_amp._autocast._values import Origin, Stream, Use, Value, common_dtype, widest
from jmp_amp._formats import FLOAT32
from jmp_amp._ops import Axes, Demand, EqnInfo, OpClass, ResultKind, Rule, operand_dtypes, varying


class Neighbours(NamedTuple):
    """What is known of the operands of an equation and of those who read its results, as these are decided.

    Attributes:
        values: what is known of its operands.
        needs_float32: whether all readers of its results read float32, so that it is evaluated in float32.
        is_stored: whether they do, but some from memory, so that only a sum, which may cancel, is, and in float16 a
            product, which may overflow.
        reads_stored_norm: whether it reads a norm of low-precision data that a product reads too.
        uses: how each of its results is used, if it holds jaxprs.
    """

    values: tuple[Value, ...] = ()
    needs_float32: bool = False
    is_stored: bool = False
    reads_stored_norm: bool = False
    uses: tuple[Use, ...] = ()


class Context(NamedTuple):
    """An equation, and everything that its decision depends on. Only its neighbours change while it is planned.

    Attributes:
        info: the facts of the equation.
        rule: that of its op; in a float32 region, where each op runs as it was traced, `ORIGINAL`.
        region: its format, and the scopes around it.
        options: the arguments of `autocast`.
        leaves_range: whether the low dtype may not hold its results, because of a constant.
        is_asked: whether the user asks for its format, by a region in the code or in `rules`; no reason is above that.
        demand: whether its results are chosen from by their order, `RANK`, and whether a product reads them or what is
            made of them, `HIDDEN`.
        stream: how the residual stream that it adds to is read; `NONE` if there is none.
        inside: its jaxprs, with info, if it holds some and does not run as it was traced.
        neighbours: its operands and readers.
        is_float32: whether each operand was traced in float32; empty until it is decided.
    """

    info: EqnInfo
    rule: Rule
    region: Region
    options: Options
    leaves_range: bool
    is_asked: bool
    demand: int
    stream: int
    inside: Sequence[Inside]
    neighbours: Neighbours = Neighbours()
    is_float32: Sequence[bool] = ()

    @property
    def values(self) -> tuple[Value, ...]:
        """What is known of its operands."""
        return self.neighbours.values

    @property
    def is_input(self) -> tuple[bool, ...]:
        """Whether each operand is an input of the program, moved or not, so that it may be a weight."""
        return tuple([value.origin <= Origin.INPUT for value in self.neighbours.values])

    def stream_dtype(self, value: Value) -> Any:
        """Returns the data dtype of an operand where inputs of the program count as low-precision data."""
        return self.region.format.dtype if value.origin is Origin.INPUT else value.stream_dtype or value.dtype


def decide(op: Context) -> tuple[Any, str]:
    """Returns the dtype that the float32 operands of an op are cast to, and why, as in `OpSite.why`.

    None leaves the operands as they are.
    """
    rule, low = op.rule, op.region.format.dtype
    atoms = (*op.info.eqn.invars, *op.info.eqn.outvars)
    is_traced = FLOAT32 not in map(jx.dtype_of, atoms)
    if rule.op_class is OpClass.ORIGINAL:
        return FLOAT32, "traced" if is_traced else "precision" if rule.is_product else "rule"
    values = list(compress(for_promotion(op), op.is_float32))
    # `x = x + mlp(norm(x))`, with `residual_stream="low"`.
    if _joins_stream(op):
        return low, "stream"
    if rule.op_class is OpClass.FULL:
        return FLOAT32, "traced" if is_traced else "rule"
    if rule.op_class is OpClass.LOWER:
        allowed = operand_dtypes(op.info.eqn.params.get("precision"))
        # `jnp.where(mask, x, -1e9) @ w`, and `(x * 1e-9) @ w`.
        if op.leaves_range or any(value.known.leaves(low) for value in values):
            return FLOAT32, "constant"
        if not op.region.format.takes(set(map(jx.dtype_of, atoms))) or not (allowed is None or low in allowed):
            return FLOAT32, "traced"
        if _is_short(op, values) and not op.is_asked:
            return FLOAT32, "short"
        return (FLOAT32, "rank") if _is_router(op) else (low, "traced" if is_traced else "rule")
    if is_traced or not values:
        return None, "traced" if is_traced else "rule"
    if _has_large_constant(op) and not op.is_asked:
        return FLOAT32, "offset"
    # In `jnp.exp(x @ w - 1)` the subtraction fuses with the exponential, which is float32.
    near = op.neighbours
    if op.leaves_range or (near.needs_float32 and not _is_exact(op)) or (near.is_stored and _needs_range(op)):
        return FLOAT32, _why_float32(op, values)
    stored = [value.as_data() for value in values] if near.reads_stored_norm or rule.stores else values
    dtype = common_dtype(stored) if rule.op_class is OpClass.PROMOTE else widest(value.dtype for value in stored)
    if dtype == FLOAT32:
        why = _why_float32(op, values)
    else:
        widened = [value for value in values if rule.op_class is OpClass.PROMOTE and value.dtype == FLOAT32]
        is_stream = op.options.has_low_stream and any(value.origin is not Origin.SCALAR for value in widened)
        why = "stream" if is_stream else "bias" if widened else "rule"
    return dtype if rule.op_class is OpClass.PROMOTE or rule.stores else None, why


def exact_numbers(op: Context, dtype: Any) -> list[bool]:
    """Returns which operands of an op in `dtype` are numbers that it does not hold, so that the op rounds its result.

    In bfloat16 `287 * h` would be `288 * h`. A maximum of numbers that were rounded is itself rounded once: it stays in
    `dtype`, and so does a comparison, so that `jnp.clip(h, 0, 0.7) >= 0.7` finds what was clipped.
    """
    if not (op.rule.arithmetic and op.rule.fuses and op.rule.op_class is OpClass.PROMOTE) or dtype == FLOAT32:
        return [False] * len(op.values)
    divides = False, op.rule.kind is ResultKind.QUOTIENT
    triples = zip(op.values, op.is_float32, divides, strict=True)
    return [is_float32 and x.origin is Origin.SCALAR and x.known.is_rounded(dtype, by) for x, is_float32, by in triples]


def _why_float32(op: Context, values: Sequence[Value]) -> str:
    """Returns why an op that follows its operands reads float32; `values` are those traced in float32."""
    arrays = [value for value in values if value.origin is not Origin.SCALAR]
    is_low = bool(arrays) and all(value.dtype != FLOAT32 for value in arrays)
    low = op.region.format.dtype
    if op.leaves_range or any(value.overflows(low) or (is_low and not value.fits(low)) for value in values):
        return "constant"
    return "readers" if is_low else "rule"


def _has_large_constant(op: Context) -> bool:
    """Whether an op adds a large constant, or multiplies by one, so that the result is float32 whatever reads it.

    `80 + 5 * (x @ w)` is read as a difference from another such value sooner or later, and bfloat16 has no number
    between 80 and 80.5. `287 * (x @ w)` may be too large for float16. `1 + scale` and `jax.nn.hard_swish`, which adds
    3, lose less than a product does.
    """
    kind, known = op.rule.kind, [value.known for value in op.values]
    is_sum = kind in (ResultKind.SUM, ResultKind.DIFFERENCE)
    if not (is_sum or (op.rule.scales and op.region.format.needs_loss_scale)):
        return False
    if kind is ResultKind.QUOTIENT:
        return known[1].is_constant and known[1].least * _LARGE <= 1
    return any(each.is_constant and each.size >= _LARGE for each in known)


_LARGE = 16


def _is_short(op: Context, values: Sequence[Value]) -> bool:
    """Whether an op is a matrix product of float32 data that sums up to 3 terms, as of normals, `n @ lights.T`.

    The matrix units of NVIDIA GPUs sum at least 8 terms at a time (PTX ISA, `mma.m16n8k8`), and others more: here they
    would multiply more zeros than numbers. Memory limits such a product, and its operands are float32 already. Factors
    of rank 4 are layers.
    """
    terms, is_matrix = op.rule.terms, bool(op.rule.columns)
    return is_matrix and isinstance(terms, int) and 0 < terms < 4 and all(value.dtype == FLOAT32 for value in values)


def _is_router(op: Context) -> bool:
    """Whether an op is a product whose few columns are chosen from by their order.

    A router has a column for each expert, up to some hundred. A layer that has one for each word of a vocabulary, which
    is searched, stays low: it is the largest product of a model.
    """
    columns = [n for n, is_input in zip(op.rule.columns, op.is_input, strict=False) if is_input and isinstance(n, int)]
    return bool(op.demand & Demand.RANK) and min(columns, default=math.inf) <= _MOST_EXPERTS


_MOST_EXPERTS, _MOST_RESULTS = 512, 1024


def _is_of_result(op: Context, value: Value) -> bool:
    """Whether an input is added to a layer of few columns that no product reads, as a mean return to that of a critic.

    Such a layer is a result, and a bias of 200 in 16 bits would round what the products say. A hidden layer is rounded
    anyway, and a wide one is the largest of a model.
    """
    shape, is_sum = jx.shape_of(op.info.eqn.outvars[0]), op.rule.kind in (ResultKind.SUM, ResultKind.DIFFERENCE)
    if op.demand & Demand.HIDDEN or not (is_sum and shape) or value.origin > Origin.INPUT or value.known.is_constant:
        return False
    columns = math.prod([shape[axis] for axis in value.axes[0]] if value.axes else shape[-1:])
    return isinstance(columns, int) and columns <= _MOST_RESULTS


def _needs_range(op: Context) -> bool:
    """Whether an op adds arrays, whose sum may cancel, or multiplies them in float16, whose product may overflow."""
    kinds = {ResultKind.SUM, ResultKind.DIFFERENCE}
    kinds |= {ResultKind.PRODUCT, ResultKind.POWER} if op.region.format.needs_loss_scale else set()
    return op.rule.kind in kinds and all(value.origin is not Origin.SCALAR for value in for_promotion(op))


def _is_exact(op: Context) -> bool:
    """Whether an op scales a product by a power of two in a dtype with the range of float32, so that it rounds nothing.

    Attention with 64 features a head divides its scores by 8. Divided in float32, they would be stored in float32 on a
    TPU, where XLA fuses the product with the maximum of the softmax and keeps the result for the backward pass.
    """
    if not op.rule.scales or op.region.format.needs_loss_scale:
        return False
    factors = op.values if op.rule.kind is ResultKind.PRODUCT else op.values[1:]
    numbers = [value.known.scalar for value in factors if value.known.scalar is not None]
    is_product = any(value.origin is Origin.PRODUCT for value in op.values)
    return is_product and any(abs(math.frexp(number)[0]) == 0.5 for number in numbers)


def _joins_stream(op: Context) -> bool:
    """Whether an op adds low-precision data to a residual stream, and not only a bias."""
    if not op.stream:
        return False
    # `tokens[ids] + positions`: two inputs of the program, which only a norm reads, count as low-precision data.
    terms = [value for value in for_promotion(op) if value.origin is not Origin.SCALAR]
    dtypes = [op.stream_dtype(value) if op.stream == Stream.NORM else value.as_data().dtype for value in terms]
    is_low = all(dtype == op.region.format.dtype for dtype in dtypes)
    fits = not any(value.overflows(op.region.format.dtype) for value in op.values)
    return is_low and fits and len(terms) == 2


def for_promotion(op: Context) -> Sequence[Value]:
    """Returns the operands of an op, with `SCALAR` as the origin of those that do not widen it, and of no others.

    These are scalars beside an array, arrays that hold one number in an op that only selects values, and biases.
    """
    # `0.5 * h`, `jnp.where(mask, h, jnp.zeros_like(h))`, and `x @ w + b`, whose `b` is a float32 parameter.
    rule, eqn, values = op.rule, op.info.eqn, op.values
    if rule.op_class is not OpClass.PROMOTE:
        return values
    features: list[Axes] = []
    if rule.kind is ResultKind.SUM:
        products = [(a, v) for a, v in zip(eqn.invars, values, strict=True) if v.origin.takes_bias]
        features = [varying(jx.shape_of(atom)) - rows for atom, value in products for rows in value.axes]
    result = jx.shape_of(eqn.outvars[0])

    def widens(value: Value, shape: tuple[int, ...] | None) -> bool:
        if value.origin is Origin.SCALAR:
            if shape == result == ():  # a scalar variable is as wide as the other scalar, a known number is not
                return value.known.scalar is None
            return value.filled and rule.arithmetic and shape == result
        return value.origin is not Origin.INPUT or not any(map(value.axes[0].issubset, features))

    def as_term(value: Value, atom: Any) -> Value:
        if not (widens(value, jx.shape_of(atom)) or _is_of_result(op, value)):
            return value._replace(origin=Origin.SCALAR)
        data_dtype = None if value.filled else value.data_dtype
        return value._replace(origin=max(value.origin, Origin.INPUT), data_dtype=data_dtype)

    return list(map(as_term, values, eqn.invars))


def params_for(op: Context, operands: Sequence[Any]) -> dict[str, Any]:
    """Returns new values for the parameters that name float32 and must name the dtype that the op computes in.

    Args:
        op: the op.
        operands: the dtypes that its operands are cast to.
    """
    rule, eqn, eligible = op.rule, op.info.eqn, list(compress(operands, op.is_float32))
    dtype = widest(eligible) if eligible else FLOAT32
    if dtype == FLOAT32:
        is_product = eqn.primitive is lax.dot_general_p and op.info.rule.can_run_as_traced
        is_free = is_product and eqn.params["precision"] is None and len(eligible) == len(operands)
        return {"precision": op.region.format.precision} if is_free and op.region.format.precision is not None else {}
    params: dict[str, Any] = {name: dtype for name in rule.dtype_params if eqn.params.get(name) == FLOAT32}
    jaxprs = {name: eqn.params[name] for name in rule.jaxpr_params if eqn.params[name] is not None}
    return params | {name: jx.retyped(jaxpr, dtype) for name, jaxpr in jaxprs.items()}


def describe_results(op: Context, operands: Sequence[Any]) -> tuple[Value, ...]:
    """Returns what is known of the results of an op.

    Args:
        op: the op.
        operands: the dtypes that its operands are cast to.
    """
    eqn, rule, values = op.info.eqn, op.rule, op.values
    scalars = all(x.origin is Origin.SCALAR and jx.shape_of(a) == () for x, a in zip(values, eqn.invars, strict=True))
    eligible = list(compress(operands, op.is_float32))
    outs = []
    for i, var in enumerate(eqn.outvars):
        is_scalar = scalars and jx.shape_of(var) == ()
        out = _moved(op, var) if rule.moves else Value(None, Origin.SCALAR) if is_scalar else _computed(op)
        dtype = _result_dtype(op, i, operands, eligible)
        data_dtype = _data_dtype(op, var, lambda value: value.as_data().dtype)
        stream_dtype = _data_dtype(op, var, op.stream_dtype) if op.options.has_low_stream else None
        save_cast = rule.moves and all(value.save_cast for value in values)
        outs.append(out._replace(dtype=dtype, data_dtype=data_dtype, stream_dtype=stream_dtype, save_cast=save_cast))
    return tuple(outs)


def _result_dtype(op: Context, i: int, operands: Sequence[Any], eligible: Sequence[Any]) -> Any:
    """Returns the dtype of a result. An op on several arrays side by side leaves each in its own dtype."""
    dtype, op_class = jx.dtype_of(op.info.eqn.outvars[i]), op.rule.op_class
    if dtype != FLOAT32 or op_class is OpClass.ORIGINAL or not eligible:
        return dtype
    is_pairwise = op_class is OpClass.FOLLOW and len(operands) == len(op.info.eqn.outvars)
    return operands[i] if is_pairwise and jx.dtype_of(op.info.eqn.invars[i]) == FLOAT32 else widest(eligible)


def _moved(op: Context, var: Var) -> Value:
    """Returns the origin of the result of an op that moves values."""
    eqn, values = op.info.eqn, op.values
    origin, shape = max((value.origin for value in values), default=Origin.SCALAR), jx.shape_of(var) or ()
    floating = [i for i, atom in enumerate(eqn.invars) if jx.dtype_of(atom) == FLOAT32]
    if origin is Origin.SCALAR:
        is_filled = all(x.filled or not varying(jx.shape_of(a)) for x, a in zip(values, eqn.invars, strict=True))
        return Value(None, origin, filled=is_filled and bool(varying(shape)))
    axes = _moved_axes(op, floating[0], shape) if len(floating) == 1 else (None,)
    if origin is Origin.INPUT:
        along = varying(shape) if axes[0] is None else axes[0]
        return Value(None, origin, axes=(along,)) if along else Value(None, Origin.SCALAR)
    known = tuple(each for each in axes if each is not None)
    return Value(None, origin, axes=known) if origin.takes_bias and known else Value(None)


def _moved_axes(op: Context, i: int, after: tuple[int, ...]) -> tuple[Axes | None, ...]:
    value, before = op.values[i], jx.shape_of(op.info.eqn.invars[i]) or ()

    def move(axes: Axes) -> Axes | None:
        return op.rule.move_axes(op.info.eqn.params, before, after, axes)

    if not value.origin.takes_bias:
        return tuple(map(move, value.axes))
    # `(x @ w).reshape(batch, length, heads, -1) + b`: the axes of the weight move. A bias varies along none of the
    # others, nor along new ones.
    places = [(move(varying(before)), move(rows)) for rows in value.axes]
    return tuple(None if every is None or rows is None else varying(after) - (every - rows) for every, rows in places)


def _computed(op: Context) -> Value:
    """Returns the origin of the result of another op: a product, or a sum of products and their biases, stays one."""
    rule, values = op.rule, op.values
    if rule.can_run_as_traced and any(rows is not None for rows in rule.rows):
        inputs = [value.origin <= Origin.INPUT for value in values[:2]]
        weights = inputs if any(inputs) else [True, True]
        axes = tuple(rows for rows, is_weight in zip(rule.rows, weights, strict=True) if is_weight and rows is not None)
        return Value(None, Origin.PRODUCT, axes=axes) if axes else Value(None)
    products = [value for value in values if value.origin.takes_bias]
    others = [value for value in for_promotion(op) if value.origin is not Origin.SCALAR]
    if rule.kind is ResultKind.SUM and products and len(products) == len(others):
        axes = functools.reduce(lambda a, b: tuple(x | y for x in a for y in b), (value.axes for value in products))
        return Value(None, Origin.SUM, axes=axes)
    return Value(None)


def _data_dtype(op: Context, var: Var, dtype: Callable[[Value], Any]) -> Any:
    """Returns the data dtype of a float32 result: the `dtype` of the operands whose elements it holds.

    A norm is `(x - mean) * rsqrt(variance) * scale + bias`: computed in float32, it holds the data of a float16 `x`.
    """
    rule, shape = op.rule, jx.shape_of(var) or ()
    if jx.dtype_of(var) != FLOAT32 or rule.op_class not in (OpClass.PROMOTE, OpClass.FOLLOW):
        return None
    before = [jx.shape_of(atom) or () for atom in op.info.eqn.invars]
    data = [
        value
        for value, is_float32, each in zip(for_promotion(op), op.is_float32, before, strict=True)
        if is_float32 and not _is_broadcast(value, each) and (rule.moves or each == shape)
    ]
    if op.info.enlarges and len(data) < 2:
        return op.region.format.dtype
    return widest(map(dtype, data)) if data else None


def _is_broadcast(value: Value, shape: tuple[Any, ...]) -> bool:
    """Whether an operand was broadcast to its shape."""
    if value.origin is Origin.INPUT and value.axes:
        return value.axes[0] != varying(shape)
    return value.origin is Origin.SCALAR
