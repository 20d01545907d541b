"""`explain`: the dtypes that autocast chooses for each op of a function, and the reasons."""

import dataclasses
import functools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import compress
from operator import attrgetter
from typing import Any, Unpack, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from jmp_amp import _jaxpr as jx
from jmp_amp._attention import AttentionSite
from jmp_amp._autocast import (
    DEMAND_OF,
    AutocastOptions,
    Decision,
    Settings,
    Steps,
    autocast_with,
    decision_of,
    matches_scope,
    parse_settings,
    planner_of,
    steps_of,
)
from jmp_amp._calls import quote, shorten, transformation
from jmp_amp._formats import FLOAT32, FORMATS
from jmp_amp._modules import unbound
from jmp_amp._ops import RULES, Demand, ResultKind, Rule, product_axes
from jmp_amp._products import FLOAT8_DOT, FLOAT8_RAGGED_DOT, RAGGED_DOT, padding
from jmp_amp.debug._report import Content, Report, Table, as_jit_takes, check_callable, grouped, without_numbers

_COLUMNS = ("op", "class", "why", "in", "compute", "out", "runs", "size", "source")
_ATTENTION = ("module", "kernel", "why", "runs", "source")
_FEW_IN_FLOAT32, _MOST_REASONS = 0.95, 8  # with so many of the FLOPs in 16 bits, nothing is said of the others
_FLOAT8 = {FLOAT8_DOT, FLOAT8_RAGGED_DOT}
_KERNELS = {name for name, rule in RULES.items() if isinstance(rule, Rule) and rule.is_kernel}
# The reasons for a dtype, `OpSite.why`, in words.
_REASONS = {
    "rule": "the class of its primitive",
    "bias": "a bias does not widen a product, nor a scalar an array",
    "number": "a number in the code that the low dtype does not hold: it computes in float32 and rounds its result",
    "stream": "it is a part of a residual stream, which `residual_stream` asks to be low",
    "index": "its result is converted to an integer",
    "decomposition": "a matrix decomposition, a solver, or an iteration for one reads its result",
    "distance": "a term of a squared distance, of a variance or of a difference from a mean: they cancel",
    "angle": "only sines and cosines read its result",
    "edge": "its result is read at the edge of a domain, where the slope is infinite, as by `acos`",
    "logarithm": "a logarithm or a quotient reads it, and it may be smaller or larger than float16 holds",
    "solution": "it reads what a decomposition or a solver returned",
    "loss": "it selects logarithms, or sums them for what the program returns, as a loss does",
    "recurrence": "a loop replaces a carry with products and sums of it",
    "code": "a sum by whole numbers that is compared with another, as a code",
    "rank": "its few columns are chosen from by their order, as by `top_k` or `argsort`",
    "vector": "a product with a constant vector, such as an expectation over bins, which is a sum",
    "count": "it counts: both operands come from comparisons or integers",
    "sum": "it sums so many squares, or terms by whole numbers, that float16 may overflow",
    "loop": "it decides when a loop ends",
    "reference": "it is in a function with a custom derivative and a reference to an array, which JAX runs",
    "cast_inputs": "it is in a function with `cast_inputs`, which runs as it is written",
    "constant": "it reads a constant that the low dtype cannot hold, or a value computed from one",
    "offset": "it adds or multiplies by a constant of 16 or more, whose digits or range 16 bits do not have",
    "short": "it sums at most 3 terms of float32 data, which no matrix unit computes faster",
    "readers": "all readers of its result read float32, and it fuses with them",
    "no matrix product": "float8 is for products of two matrices, not for convolutions or batches of products",
    "no weight": "float8 is for products with a weight, which is an argument of the function",
    "multiple": "a product of experts in float8 needs sizes that are multiples of 16",
    "size": "the product is too small to gain by float8",
    "precision": "the program asks for float32 by `precision`",
    "region": "it is in a region: `full_precision` or `precision(dtype)`",
    "pattern": "its scope matches a pattern in `rules`",
    "override": "`rules` gives its primitive another class",
    "traced": "the op, or an operand, was traced in another dtype than float32",
    "kernel": "autocast cannot read a kernel: it runs in the dtypes that it was traced in; see `cast_inputs`",
    "unknown": "no rule for this primitive: it runs in the dtypes that it was traced in",
    "small divisor": "it divides a float16 value by a number plus a constant below 6e-5: where the number is 0, the "
    "gradient of the value is 1 / constant, beyond float16; see docs/sharp-bits.md",
    "opaque": "no rule for this primitive: the products in it stay as they were traced",
    "derivative": "JAX derives it from the forward pass",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpSite(jx.Site):
    """The dtypes that autocast chooses for an op, and why.

    Attributes:
        op_class: the class of the primitive, see `autocast`.
        why: the reason in a word or two, which `explain` prints with its meaning.
        begins: of a product in float32, the op where the reason begins, `"eigh at train.py:12 (whiten)"`; empty for
            other ops, and where it is the product itself.
        inputs: the dtypes of its floating operands before they are cast.
        compute: the dtype that they are cast to; two for a product of float8 operands of different dtypes.
        output: the dtype of its result.
        padding: what padding on CUDA devices makes of sizes of a product, `"50257 to 50264"`; empty for most.
        flops: floating-point operations of all runs, of products and convolutions only. A symbolic size counts as 1.
        bytes: the size of the results of all runs.
    """

    op_class: str
    why: str
    begins: str = ""
    inputs: tuple[str, ...]
    compute: str
    output: str
    padding: str
    flops: int
    bytes: int


@transformation
def explain(
    fun: Callable, dtype: Any = None, *, argnums: int | Sequence[int] | None = None, **options: Unpack[AutocastOptions]
) -> "Callable[..., PrecisionReport]":
    """Returns a function that reports, for each op of `fun`, the dtypes that `autocast` chooses, and why.

    The returned function takes the arguments of `fun`. It traces the forward and the backward pass (of all floating
    results, with respect to all floating arguments, or those in `argnums`), and compiles and runs nothing. The report
    includes the ops inside loops, branches and custom derivatives. If the derivative raises, as of an argument that a
    library does not differentiate, the report has the forward pass, and what was raised.

    Args:
        fun: a function for `autocast`, or a function that `autocast` returned. The latter brings its own settings, so
            pass no other arguments with it.
        dtype: as for `autocast`.
        argnums: as in `jax.grad`; None differentiates all floating arrays.
        **options: `rules`, `save`, `weight_grad_dtype`, `residual_stream` and `attention`, as for `autocast`.

    Returns:
        A function that returns a `PrecisionReport`. Its array arguments may be `jax.ShapeDtypeStruct`.

    Raises:
        TypeError: `fun` is not callable, or is already under `autocast` and options are given; or `explain` got the
            arguments of `fun`.
        ValueError: `argnums` names no argument of the call.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> def loss_fn(w, b, x):
        ...     return jnp.mean(jnp.exp(x @ w + b))
        >>> report = amp.explain(loss_fn)(jnp.ones((8, 2)), jnp.zeros(2), jnp.ones((4, 8)))
        >>> for row in report.select(direction="forward").rows[:4]:
        ...     print(row.primitive, row.op_class, row.why, row.inputs, row.compute, row.output)
        dot_general lower rule ('float32', 'float32') float16 float16
        broadcast_in_dim follow rule ('float32',) float32 float32
        add promote rule ('float16', 'float32') float32 float32
        exp full rule ('float32',) float32 float32
        >>> report.summary()["matmul_flops"]
        {'float16': 1.0}
    """
    if hasattr(fun, "autocast_of"):
        if options or dtype is not None:
            raise TypeError(
                "`fun` is already under `autocast`, which fixes its options; "
                "call `explain(fun)` without options, or pass the function without `autocast`"
            )
        fun, settings = fun.autocast_of
    else:
        check_callable(fun, "explain")
        settings = parse_settings(dtype, **options)

    @jx.api_boundary
    @functools.wraps(fun, updated=())
    def explained(*args: Any, **kwargs: Any) -> PrecisionReport:
        args, kwargs = as_jit_takes(args, kwargs)
        program, why_forward, plan, attention = _traced(fun, settings, args, kwargs, argnums)
        planner, steps, equations = planner_of(settings.options), list(steps_of(plan)), list(jx.equations_in(program))
        beginning, forward = _beginnings(planner.rule_of, plan, steps), list[OpSite]()
        for within, step, eqns in steps:
            eqn, rule = step.eqn, planner.rule_of(step.eqn)
            if step.inner or not any(map(jx.is_inexact, (*eqn.invars, *eqn.outvars))):
                continue
            decision = decision_of(planner, within, step)
            if decision.why == step.why and _has_small_divisor(planner.rule_of, within, eqn):
                decision = decision._replace(why="small divisor")
            is_wide = rule.is_product and FLOAT32 in decision.operands
            begins = beginning(eqns, decision.why, step.region.format.dtype) if is_wide else ""
            site = _op_site(eqns, rule, decision)
            forward.append(dataclasses.replace(site, direction="forward", begins=begins))  # also of a gradient in `fun`
        behind = (eqns for eqns in equations if jx.direction_of(eqns) != "forward")
        backward = [_backward_site(planner.rule_of(eqns[-1]), eqns) for eqns in behind if _is_op(eqns[-1])]
        lines = dict.fromkeys((step.keeper, jx.Site.at(eqns).source) for _, step, eqns in steps if step.keeper)
        return PrecisionReport(
            rows=(*forward, *backward),
            attention=tuple([each.site for each in attention]),
            dtype=settings.format.name,
            casts=sum(jx.runs_of(eqns) for eqns in equations if _is_cast(eqns[-1])),
            kept=None if why_forward else _kept(program),
            scans={keeper: [line for name, line in lines if name == keeper] for keeper, _ in lines},
            why_forward=why_forward,
            _explain_again=lambda **options: explain(fun, argnums=argnums, **options)(*args, **kwargs),
        )

    return explained


def _traced(
    fun: Callable, settings: Settings, args: Sequence[Any], kwargs: dict[str, Any], argnums: Any
) -> tuple[Any, str, Any, Sequence[Any]]:
    """Traces a call under autocast and its gradient, or the call alone if it has none.

    Returns:
        The program, why it has no gradient, the plan of autocast, and what it found of attention.
    """
    (fun, args), n_args = unbound(fun, args), len(args)
    chosen = range(len(args) + 1) if argnums is None else _positions(argnums, n_args, len(args) - n_args)
    calls = list[Any]()
    autocasted = autocast_with(fun, settings, lambda *call: calls.append(call))

    def call_and_pull(*args: Any, **kwargs: Any) -> Any:
        arrays, rebuild = jx.split_arrays((args, kwargs))
        arguments = [i for i, arg in enumerate((*args, kwargs)) for _ in jx.split_arrays(arg)[0]]  # keywords are last
        is_float = [jx.is_floating(x) and i in chosen for i, x in zip(arguments, arrays, strict=True)]

        def of_floats(*floats: Any) -> list[Any]:
            args, kwargs = rebuild(jx.combine(is_float, floats, arrays))
            return list(filter(jx.is_inexact, jx.split_arrays(autocasted(*args, **kwargs))[0]))

        out, pull = jax.vjp(of_floats, *compress(arrays, is_float))
        return out, pull([jnp.ones_like(x) for x in out])

    try:
        return jx.trace_call(call_and_pull, args, kwargs, jax.ShapeDtypeStruct)[0], "", *calls[-1]
    except Exception as error:
        by = "all floating arguments" if argnums is None else f"the arguments {argnums}"
        if not jx.versions.has_no_derivative(error):
            error.add_note(f"`explain` differentiates with respect to {by}; others are chosen by `argnums`")
            raise
        what = shorten(str(error).strip().partition("\n")[0].rstrip("."))
        why = f"with respect to {by} ({type(error).__name__}: {what})"
        return jx.trace_call(autocasted, args, kwargs, jax.ShapeDtypeStruct)[0], why, *calls[-1]


def _positions(argnums: int | Sequence[int], n: int, offset: int) -> set[int]:
    """Returns the positions of arguments among `n`, behind `offset` others."""
    numbers = [argnums] if isinstance(argnums, int) else list(argnums)
    if not all(isinstance(i, int) and -n <= i < n for i in numbers):
        raise ValueError(f"`argnums` must be positions of the {n} positional arguments, got {quote(argnums)}")
    return {i % n + offset for i in numbers}


def _has_small_divisor(rule_of: Callable[[JaxprEqn], Rule], plan: Any, eqn: JaxprEqn) -> bool:
    """Whether a quotient is of a float16 value and of a number that a small constant keeps from 0.

    The derivative in the value is 1 / constant where the number is 0, and is cast to float16.
    """
    if rule_of(eqn).kind is not ResultKind.QUOTIENT:
        return False
    value, divisor = list[Any](eqn.invars)
    if isinstance(value, Literal) or plan.values[value].dtype != jnp.float16:
        return False
    made = {var: step.eqn for step in plan.steps for var in step.eqn.outvars}
    while isinstance(divisor, Var) and (made_by := made.get(divisor)):
        rule = rule_of(made_by)
        if rule.kind is ResultKind.SUM or made_by.primitive.name == "max":
            numbers = [float(x.val) for x in made_by.invars if isinstance(x, Literal) and np.ndim(x.val) == 0]
            return any(0 < x < float(jnp.finfo(jnp.float16).tiny) for x in numbers)
        divisor = made_by.invars[0] if rule.moves or rule.is_cast else None
    return False


def _op_site(eqns: Sequence[JaxprEqn], rule: Rule, decision: Decision) -> OpSite:
    eqn, site, results = eqns[-1], jx.Site.at(eqns), decision.results
    floating = [*compress(results, map(jx.is_inexact, eqn.outvars))]
    operands = decision.operands or floating
    compute = " ".join(map(str, dict.fromkeys(operands) if eqn.primitive.name in _FLOAT8 else [_widest(operands)]))
    pairs = zip(eqn.outvars, results, strict=True)
    sizes = [_size(jx.shape_of(var) or ()) * getattr(dtype, "itemsize", 0) for var, dtype in pairs]
    return OpSite(
        **vars(site),
        op_class=rule.op_class.value,
        why=decision.why,
        inputs=tuple(map(str, decision.inputs)),
        compute=compute,
        output=str(_widest(floating) if floating else results[0] if results else ""),
        padding=_padding(eqn, compute),
        flops=site.runs * flops_of(eqn),
        bytes=site.runs * sum(sizes),
    )


def _is_op(eqn: JaxprEqn) -> bool:
    return any(map(jx.is_inexact, eqn.outvars)) and not jx.inner_jaxprs(eqn)


def _backward_site(rule: Rule, eqns: Sequence[JaxprEqn]) -> OpSite:
    eqn = eqns[-1]
    inputs = [jx.dtype_of(atom) for atom in eqn.invars if jx.is_inexact(atom)]
    operands = eqn.params["operands"] if eqn.primitive.name in _FLOAT8 else inputs
    return _op_site(eqns, rule, Decision(inputs, operands, [*map(jx.dtype_of, eqn.outvars)], "derivative"))


def _padding(eqn: Any, compute: str) -> str:
    """Returns the sizes of a product that are padded; `compute` is the dtype of its operands, or two."""
    if eqn.primitive.name not in ("dot_general", FLOAT8_DOT):
        return ""
    avals = [jx.with_dtype(atom.aval, jnp.dtype(compute.split()[0])) for atom in eqn.invars[:2]]
    zeros = padding(avals, eqn.params) or []
    sizes = [(aval.shape[axis], n) for aval, each in zip(avals, zeros, strict=False) for axis, n in each.items()]
    return ", ".join(f"{size} to {size + n}" for size, n in dict.fromkeys(sizes))


def flops_of(eqn: Any) -> int:
    """Returns the multiplications and additions of a product or convolution; memory limits all other ops."""
    if eqn.primitive.name == "conv_general_dilated":
        kernel, out_features = eqn.invars[1].aval.shape, eqn.params["dimension_numbers"].rhs_spec[0]
        return 2 * _size(eqn.outvars[0].aval.shape) * (_size(kernel) // max(kernel[out_features], 1))
    if eqn.primitive.name not in ("dot_general", RAGGED_DOT, *_FLOAT8):
        return 0
    contracting, _, groups = product_axes(eqn.params)
    sums_rows = "ragged_dot_dimension_numbers" in eqn.params and not groups[1]  # each group its own
    sizes = eqn.outvars[0].aval.shape[1 if sums_rows else 0 :]
    return 2 * _size([*sizes, *[eqn.invars[0].aval.shape[i] for i in contracting[0]]])


def _size(shape: Sequence[Any]) -> int:
    """Returns the number of elements; a symbolic size counts as 1."""
    return math.prod([n for n in shape if isinstance(n, int)])


def _widest(dtypes: Sequence[Any]) -> np.dtype:
    """Returns the dtype with the most bits."""
    return max(dtypes, key=lambda dtype: dtype.itemsize)


def _kept(program: Any) -> dict[str, int]:
    eqns = jx.open_jaxpr(program)[0].eqns
    is_late = [jx.is_backward(eqn.source_info.name_stack) for eqn in eqns]
    read = {atom for eqn in compress(eqns, is_late) for atom in eqn.invars if isinstance(atom, Var)}
    saved = [var for eqn, late in zip(eqns, is_late, strict=True) if not late for var in eqn.outvars if var in read]
    kept: Counter[str] = Counter()
    for var in filter(jx.is_inexact, saved):
        kept[str(jx.dtype_of(var))] += jx.nbytes_of(var)
    return dict(kept)


def _is_cast(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "convert_element_type" and all(map(jx.is_floating, (*eqn.invars, *eqn.outvars)))


@dataclasses.dataclass(frozen=True)
class PrecisionReport(Report):
    """The dtypes that autocast chose for each op of a program, and why; `explain` returns it.

    `print` shows a table of the op sites, grouped by module; modules that differ in numbers only (`layer_0`, `layer_1`)
    share a group. A notebook shows a collapsible section for each module.

    Attributes:
        rows: an `OpSite` for each op: direction, module, source, primitive, class, reason, input, compute and output
            dtypes, number of runs, FLOPs and bytes.
        attention: an `AttentionSite` for each softmax that a product reads: what computes it, or why it stays as it is
            written. Empty without the option `attention`.
        dtype: the compute dtype.
        casts: the number of casts between floating dtypes that the program runs, including the backward pass.
        kept: by dtype, the bytes of the residuals: values that the backward pass reads from the forward pass, except
            arguments. None if the report has no backward pass.
        scans: the lines of the scans, by who decides what their backward pass keeps: `"jax.checkpoint"` in the program,
            `"autocast"` (`save="matmuls"`), or `"JAX"`.
        why_forward: why the report has no backward pass: with respect to what the program was differentiated, and what
            that raised, as for a `while_loop`. Empty if it has one.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> report = amp.explain(lambda w, x: jnp.exp(x @ w))(jnp.ones((8, 2)), jnp.ones((4, 8)))
        >>> [(row.primitive, row.compute) for row in report.select(direction="forward").rows]
        [('dot_general', 'float16'), ('exp', 'float32')]
        >>> report.summary()["matmul_flops"]
        {'float16': 1.0}
    """

    rows: tuple[OpSite, ...]
    attention: tuple[AttentionSite, ...]
    dtype: str
    casts: int
    kept: dict[str, int] | None
    scans: dict[str, list[str]]
    why_forward: str
    _explain_again: Callable[..., "PrecisionReport"] = dataclasses.field(repr=False, compare=False)

    def summary(self) -> dict[str, Any]:
        """Returns the summary of the report.

        Returns:
            A dict with `dtype`; `matmul_flops`, the shares of the FLOPs of products and convolutions by compute dtype,
            including the backward pass, where `"float8"` counts all float8 dtypes; `activation_bytes`, the share of
            dtypes of less than 32 bits in the bytes of the residuals, before XLA rematerializes any (None without a
            backward pass); `scans`; `attention`, how often each kernel computes attention, `"as written"` for the rest;
            `casts`; `kernels`, the names of the primitives of kernels, which autocast cannot
            read; and `unknown`, the names of the other primitives without a rule.
        """
        flops: Counter[str] = Counter()
        for row in self.rows:
            flops["float8" if row.compute.startswith("float8") else row.compute] += row.flops
        low_share = None
        if self.kept is not None:
            low = sum(size for dtype, size in self.kept.items() if jnp.dtype(dtype).itemsize < 4)
            low_share = low / max(sum(self.kept.values()), 1)
        return {
            "dtype": self.dtype,
            "matmul_flops": {dtype: n / flops.total() for dtype, n in flops.most_common() if n},
            "activation_bytes": low_share,
            "scans": self.scans,
            "attention": dict(Counter(site.kernel or "as written" for site in self.attention)),
            "casts": self.casts,
            "kernels": sorted(_KERNELS & {row.primitive for row in self.rows}),
            "unknown": sorted({row.primitive for row in self.rows if row.why in ("unknown", "opaque")}),
        }

    def select(self, pattern: str = "*", **fields: str) -> "PrecisionReport":
        """Returns a report with the rows whose module matches `pattern` and whose fields equal `fields`.

        Examples:
            >>> import jax.numpy as jnp
            >>> import jmp_amp as amp
            >>> report = amp.explain(lambda w, x: jnp.tanh(x @ w))(jnp.ones((8, 8)), jnp.ones((8, 8)))
            >>> [row.compute for row in report.select(primitive="dot_general").rows]
            ['float16', 'float16', 'float16']
        """
        matching = (row for row in self.rows if matches_scope(row.module, pattern))
        rows = tuple(row for row in matching if all(getattr(row, name) == value for name, value in fields.items()))
        return dataclasses.replace(self, rows=rows)

    def diff(self, other: Any = None, **options: Any) -> "PrecisionDiff":
        """Returns the differences to another report, or to the same call under other options of `autocast`.

        Args:
            other: the other report; or the dtype or policy under which the call is explained again.
            **options: `dtype` and the other options of `explain`.
        """
        is_report = isinstance(other, PrecisionReport)
        return PrecisionDiff(self, other if is_report else self._explain_again(**{"dtype": other, **options}))

    def to_json(self, **options: Any) -> str:
        """Returns the summary and all rows as JSON; `options` are those of `json.dumps`."""
        return json.dumps({"summary": self.summary(), "rows": list(map(vars, self.rows))}, **options)

    def _content(self, rows: Sequence[OpSite] = ()) -> Content:
        # The rows of the forward pass; all rows if none belongs to it.
        rows = rows or [row for row in self.rows if row.direction == "forward"] or self.rows
        return _headline(self), list(_tables(self.attention, rows)), _notes(rows, self.rows)

    def _content_of_notebook(self) -> Content:
        return self._content(self.rows)


def _beginnings(rule_of: Callable[[JaxprEqn], Rule], plan: Any, steps: Steps) -> Callable[..., str]:
    """Returns a function that names the op where the reason begins for which a product is float32.

    It follows what the product reads as long as a fact holds, or what reads its result, to what demands that, through
    calls, branches and loops. The name is empty if there is no other op.
    """
    links = list[tuple[Sequence[JaxprEqn], Sequence[Any], Sequence[Any]]]()
    values, demands = {**plan.values}, {**plan.demands}
    for _, step, eqns in steps:
        atoms, results, structure = step.eqn.invars, step.eqn.outvars, cast(Any, jx.structure_of(step.eqn))
        if not step.inner or rule_of(step.eqn).demand:  # such as a solver, whose program autocast does not follow
            links.append((eqns, atoms, results))
        for (_, places), inner in zip(jx.entries(structure) if step.inner else (), step.inner, strict=True):
            values |= inner.values
            demands |= inner.demands
            ins, outs = inner.signature.invars, inner.signature.outvars
            carried = ins[structure.body_carry] if isinstance(structure, jx.Loop) else ()
            same = *zip([atoms[i] for i in places], ins, strict=True), *zip(outs, results, strict=False)
            links += [((), [a], [b]) for a, b in (*same, *zip(outs, carried, strict=False))]
    made, read = defaultdict[Any, list[Any]](list), defaultdict[Any, list[Any]](list)
    for op, before, after in links:
        before = [x for x in before if isinstance(x, Var)]
        for edges, variables, others in ((made, after, before), (read, before, after)):
            for var in variables:
                edges[var].append((op, others))

    def beginning(eqns: Sequence[JaxprEqn], why: str, low: np.dtype) -> str:
        way = DEMAND_OF.get(why, Demand.NONE)

        def holds(var: Var) -> bool:
            known = values[var].known
            facts = {"solution": known.is_solution, "loss": known.is_log, "constant": known.leaves(low)}
            return bool(facts.get(why, demands[var] & way)) and not known.is_constant

        waiting = [x for x in (eqns[-1].outvars if way else eqns[-1].invars) if isinstance(x, Var) and holds(x)]
        ends = list[tuple[Sequence[JaxprEqn], Rule]]()
        for var in waiting:
            for op, others in (read if way else made)[var]:
                further = list(filter(holds, others))
                waiting += [x for x in further if x not in waiting]
                ends += [(op, rule_of(op[-1]))] if op and not further else []
        found = [op for op, rule in ends if not way or rule.demand & way]
        if way & (Demand.DISTANCE | Demand.RANGE | Demand.EDGE):  # a sum whose terms cancel, or a quotient
            found += [op for op, rule in ends if rule.arithmetic and rule.kind is not ResultKind.PRODUCT]
        if why in ("recurrence", "loop"):
            found = [eqns[:i] for i, eqn in enumerate(eqns, 1) if isinstance(jx.structure_of(eqn), jx.Loop)][-1:]
        return next((f"{op[-1].primitive.name} at {jx.lines_of(op)[0]}" for op in found), "")

    return beginning


def low_share(report: PrecisionReport) -> float:
    """Returns the share of the FLOPs of products that run in less than 32 bits."""
    shares = report.summary()["matmul_flops"]
    return sum(share for dtype, share in shares.items() if dtype == "float8" or jnp.dtype(dtype).itemsize < 4)


def _headline(report: PrecisionReport) -> str:
    """Returns the summary of a report as one line."""
    summary = report.summary()
    shares = sorted(summary["matmul_flops"].items(), key=lambda x: x[0] == "float32")  # what matters for speed first
    flops = ", ".join(f"{share:.0%} in {dtype}" for dtype, share in shares)
    share = summary["activation_bytes"]
    saved = f"JAX cannot differentiate it {report.why_forward}; `argnums` chooses arguments"
    if share is not None:
        saved = f"Saved for the backward pass: {share:.0%} of the bytes in low precision"
    keepers = ", ".join(f"{keeper} ({len(lines)})" for keeper, lines in summary["scans"].items())
    scans = f" What scans keep is decided by {keepers}." if keepers else ""
    kernels = f" Kernels: {', '.join(summary['kernels'])}." if summary["kernels"] else ""
    return (
        f"Autocast to {summary['dtype']}. Matmul FLOPs: {flops or 'none'}. {_reasons(report)}{saved}.{scans} "
        f"{summary['casts']} casts.{kernels} Primitives without a rule: {', '.join(summary['unknown']) or 'none'}."
    )


def _reasons(report: PrecisionReport) -> str:
    """Returns why products are float32, if many are: the shares of their FLOPs, and the line where each begins."""
    if not FORMATS[report.dtype].is_low or low_share(report) >= _FEW_IN_FLOAT32:
        return ""
    place, shares = attrgetter("module", "source"), Counter[tuple[str, str]]()
    products = [row for row in report.rows if row.flops and row.compute == "float32"]
    by_begin = sorted(products, key=attrgetter("begins"))  # of several on a line, one that begins elsewhere
    forward = {place(row): row for row in by_begin if row.direction == "forward"}
    for row in products:  # the backward pass of a product is float32 for the same reason
        cause = forward.get(place(row), row)
        shares[cause.why, cause.begins or cause.source] += row.flops
    total = sum(row.flops for row in report.rows)
    lines = [f"\n{n / total:.0%} {why}, from {begins}" for (why, begins), n in shares.most_common(_MOST_REASONS)]
    return "".join(["In float32:", *lines, "\nTo lower them: docs/custom-rules.md\n"]) if lines else ""


def _tables(attention: Sequence[AttentionSite], ops: Sequence[OpSite]) -> Iterator[Table]:
    """Yields the tables of a report: of attention, and of each module's ops.

    Modules that differ in numbers only, such as `layer_0` and `layer_1`, share a table. In it, sites that differ only
    in their module and in how often they run share a row.
    """
    if attention:
        by_layer = grouped(attention, lambda x: (without_numbers(x.module), x.source, x.kernel, x.why))
        yield Table([_ATTENTION, *map(_attention_row, by_layer.values())], "attention")
    tables = grouped(ops, lambda x: (without_numbers(_module_or_function(x)), x.direction))
    for (_, direction), sites in tables.items():
        title = f"{_format_modules(map(_module_or_function, sites))}, {direction}"
        equal = grouped(sites, lambda x: dataclasses.replace(x, module="", runs=0, flops=0, bytes=0))
        yield Table([_COLUMNS, *map(_op_row, equal.values())], title)


def _attention_row(sites: Sequence[AttentionSite]) -> tuple[str, ...]:
    site, runs = sites[0], sum(x.runs for x in sites)
    return _format_modules(x.module for x in sites), site.kernel or "as written", site.why, str(runs), site.source


def _op_row(sites: Sequence[OpSite]) -> tuple[str, ...]:
    site, runs, size = sites[0], sum(x.runs for x in sites), sum(x.bytes for x in sites)
    dtypes = " ".join(map(_short_dtype, site.inputs)), _short_dtype(site.compute), _short_dtype(site.output)
    why = f"{site.why}, padded from {site.padding}" if site.padding else site.why
    return site.primitive, site.op_class, why, *dtypes, str(runs), _format_bytes(size), site.source


def _notes(printed: Sequence[OpSite], sites: Sequence[OpSite]) -> list[str]:
    """Returns the meaning of each reason among the printed sites, and the number of sites that are not printed."""
    reasons = {site.why for site in printed}
    hidden = Counter(site.direction for site in sites) - Counter(site.direction for site in printed)
    more = [f'{count} more op sites: `report.select(direction="{name}")`' for name, count in hidden.items()]
    if any(site.padding for site in printed):
        more.insert(0, "padded: with zeros, on CUDA devices, whose matrix units read rows of 16 bytes")
    return [f"{why}: {meaning}" for why, meaning in _REASONS.items() if why in reasons] + more


def _module_or_function(site: OpSite) -> str:
    return site.module or site.source.rpartition("(")[2].replace(")", "()")


def _format_modules(modules: Iterable[str]) -> str:
    """Returns the name of a module, or a pattern for several: `layer_* (3 modules)`."""
    different = set(modules)
    if len(different) == 1:
        return different.pop() or "-"
    return f"{without_numbers(min(different))} ({len(different)} modules)"


def _short_dtype(dtype: str) -> str:
    """Returns `f16` for `float16`, and so on."""
    return dtype.replace("float", "f").replace("e4m3fn", "e4m3")


def _format_bytes(n: float) -> str:
    power = min(int(math.log10(max(n, 1)) // 3), 3)
    return f"{n / 1000**power:.3g} {('B', 'kB', 'MB', 'GB')[power]}"


@dataclasses.dataclass(frozen=True)
class PrecisionDiff(Report):
    """The differences between two reports of one program. `print` shows a line for each op with other dtypes.

    Attributes:
        before: the first report.
        after: the second report.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> report = amp.explain(lambda w, x: jnp.tanh(x @ w) @ w.T)(jnp.ones((8, 8)), jnp.ones((4, 8)))
        >>> diff = report.diff(rules={jax.lax.tanh_p: "full"})
        >>> [(before.compute, after.compute) for before, after in diff.changes]
        [('float16', 'float32')]
    """

    before: PrecisionReport
    after: PrecisionReport

    @property
    def changes(self) -> list[tuple[OpSite, OpSite]]:
        """The forward op sites with another compute or output dtype, before and after."""
        position = attrgetter("module", "source", "primitive", "runs")
        reports = self.before, self.after
        befores, afters = (grouped(report.select(direction="forward").rows, position) for report in reports)
        pairs = (pair for key, rows in befores.items() for pair in zip(rows, afters.get(key, ()), strict=False))
        return [(a, b) for a, b in pairs if (a.compute, a.output) != (b.compute, b.output)]

    def _content(self) -> Content:
        before, after = self.before.summary(), self.after.summary()
        lines = (f"{name}: {_format(before[name])} -> {_format(after[name])}\n" for name in before)
        rows = [("op", "compute", "why", "sites", "module", "source")]
        for (*op, source), pairs in grouped(self.changes, _change).items():
            rows.append((*op, str(len(pairs)), _format_modules(a.module for a, _ in pairs), source))
        return "".join(lines), [Table(rows)], []


def _change(pair: tuple[OpSite, OpSite]) -> tuple[str, ...]:
    """Returns the first three cells and the last one of a change in the table of a `PrecisionDiff`."""
    a, b = pair
    return a.primitive, f"{_short_dtype(a.compute)} -> {_short_dtype(b.compute)}", b.why, a.source


def _format(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{_format(each)} {name}" for name, each in value.items())
    if isinstance(value, list):
        return " ".join(value) or "none"
    return f"{value:.1%}" if isinstance(value, float) else str(value)
