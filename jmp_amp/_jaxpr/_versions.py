"""The only file that knows JAX's versions and its private names (JAX 0.10 to 0.12).

A private name is looked up when it is needed, so that a JAX that moved it breaks one feature and not the import.
"""

import contextlib
import functools
import inspect
import math
import operator
import os
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, DebugInfo, Jaxpr, JaxprEqn, Literal, Primitive, jaxprs_in_params
from jax.extend.linear_util import wrap_init
from jax.interpreters import ad, partial_eval

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep


source_info_util.register_exclusion(_PACKAGE)  # ops get the source line of the user who calls this package


def api_boundary(fun: Callable) -> Callable:
    """Decorates a function so that its errors show no frames of this package, as `jax_traceback_filtering` says.

    JAX's decorator is private; without it the errors show all frames.
    """
    return fun


with contextlib.suppress(ImportError, AttributeError):  # for tracebacks there is no public function
    from jax._src import traceback_util

    traceback_util.register_exclusion(_PACKAGE)
    api_boundary = traceback_util.api_boundary


def open_jaxpr(jaxpr: Any) -> tuple[Jaxpr, Sequence[Any]]:
    """Returns a jaxpr and the values of its constants; a plain jaxpr has none.

    `ClosedJaxpr` wraps a `Jaxpr` up to JAX 0.10; from 0.11 they are one class, whose constants are in `consts`.
    """
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


def scan_sizes(eqn: JaxprEqn) -> tuple[int, int]:
    """Returns how many operands of a `scan` are constants, and how many are carried.

    Up to JAX 0.10 the equation says `num_consts` and `num_carry`, from 0.11 `ft_in`, three flat trees.
    """
    if "ft_in" in eqn.params:
        consts, carry, _ = map(tuple, eqn.params["ft_in"].unpack())
        return len(consts), len(carry)
    return eqn.params["num_consts"], eqn.params["num_carry"]


def with_loop_constants(eqn: JaxprEqn, n: int) -> JaxprEqn:
    """Returns a loop whose body has `n` more constants in front of the others; its jaxprs are as before."""
    if "ft_in" in eqn.params:
        from jax._src import flattree  # type: ignore[attr-defined, unused-ignore]

        consts, carry, xs = eqn.params["ft_in"].unpack()
        params: dict[str, Any] = {"ft_in": flattree.pack(((flattree.nones(n), consts), carry, xs))}
    else:
        name = "num_consts" if "num_consts" in eqn.params else "body_nconsts"
        params = {name: eqn.params[name] + n}
    return eqn.replace(params=eqn.params | params)


def with_constants_as_inputs(jaxpr: Any) -> Jaxpr:
    """Returns an open jaxpr whose first inputs are the constants of a closed one."""
    try:
        from jax.interpreters.partial_eval import convert_constvars_jaxpr  # type: ignore[attr-defined, unused-ignore]
    except ImportError:  # up to JAX 0.10
        from jax._src.interpreters.partial_eval import convert_constvars_jaxpr
    return convert_constvars_jaxpr(open_jaxpr(jaxpr)[0])


def trace(fun: Callable, args: Sequence[Any], debug_info: Any = None) -> Any:
    """Traces a function of arrays to a closed jaxpr, given the arrays or their types.

    `jax.make_jaxpr` does the same by four times as many calls, which is most of the time for the body of a small loop.
    """
    debug_info = debug_info or DebugInfo("jit", getattr(fun, "__name__", "<unknown>"), None, None)
    flat = wrap_init(lambda *args: jax.tree.leaves(fun(*args)), debug_info=debug_info)
    avals = [x if isinstance(x, jax.core.AbstractValue) else jax.typeof(x) for x in args]
    jaxpr, _, consts = partial_eval.trace_to_jaxpr_dynamic(flat, avals)
    return ClosedJaxpr(jaxpr, consts)


def trace_named(name: str, fun: Callable, call: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Traces a call to a closed jaxpr; JAX's errors name `fun` and its arguments, and say that `name` traces it.

    Args:
        name: the name.
        fun: the function.
        call: calls it, given the leaves of its arguments.
        args: its arguments: pytrees of arrays, types and references.
        kwargs: likewise.
    """
    from jax._src import api_util

    named: Any = fun
    while isinstance(named, functools.partial):
        named = named.func
    source = api_util.fun_sourceinfo(named if hasattr(named, "__code__") else type(named).__call__)
    debug_info = api_util.debug_info(name, fun, args, kwargs, sourceinfo=source)
    leaves = jax.tree.leaves((args, kwargs))
    has_references = any(isinstance(x, jax.Ref) for x in leaves)
    if has_references:
        api_util.check_no_aliased_ref_args(lambda: debug_info, map(jax.typeof, leaves), leaves)
    program = trace(call, leaves, debug_info)
    if has_references:
        api_util._check_no_aliased_closed_over_refs(debug_info, open_jaxpr(program)[1], leaves)
    return program


def call_of(eqn: JaxprEqn) -> tuple[Any, ...]:
    """Returns a key that is equal for the equations that one call in the user's code makes."""
    return eqn.source_info.traceback, eqn.source_info.name_stack, eqn.ctx


def origin_of(eqn: JaxprEqn) -> contextlib.AbstractContextManager[Any]:
    """A context in which new equations have the source line and the scopes of `eqn`."""
    name_stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    return source_info_util.user_context(eqn.source_info.traceback, name_stack=name_stack)


def in_scopes_of(outer: Sequence[JaxprEqn], eqn: JaxprEqn) -> JaxprEqn:
    """Returns an equation with the scopes of those that held it, the outermost first, around its own."""
    stacks = [each.source_info.name_stack for each in (*outer, eqn)]
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=functools.reduce(operator.add, stacks)))


@contextlib.contextmanager
def context_of(eqn: JaxprEqn) -> Iterator[None]:
    """A context in which new equations have the source line, the scopes and the settings of `eqn`."""
    from jax._src.xla_metadata_lib import current_xla_metadata  # no public function says what is set

    with origin_of(eqn), eqn.ctx.manager:
        # The context of `eqn` does not take back the XLA metadata that is set around it.
        around = (current_xla_metadata() or {}).keys() - (eqn.ctx.xla_metadata or {}).keys()
        with set_xla_metadata(**dict.fromkeys(around)) if around else contextlib.nullcontext():
            yield


# The value of `jax.jit(inline=...)` for a call that no jaxpr shows; from JAX 0.12 on, True means another one.
INLINE: Any = jax.Inline.JAX_EARLY if hasattr(jax, "Inline") else True  # type: ignore[attr-defined, unused-ignore]

# Options with which XLA compiles for a CPU in a third of the time; from JAX 0.11 on there is no such option.
WITHOUT_FUSION_EMITTERS = {"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 11) else {}


def is_differentiated() -> bool:
    """Whether JAX differentiates each op as it is applied here. JAX has no public function for it."""
    from jax._src.core import trace_ctx
    from jax._src.interpreters.ad import LinearizeTrace

    return isinstance(trace_ctx.trace, ad.JVPTrace | LinearizeTrace)


def is_compiled() -> bool:
    """Whether `jax.jit` traces here what will be compiled, unlike `jax.make_jaxpr`, `jax.vmap` or an eager loop."""
    calls, traces, *shapes = are_running("pjit.cache_miss", "pjit.jit_trace", "api.make_jaxpr_f", "api.eval_shape")
    return calls or (traces and not any(shapes))


def are_running(*names: str) -> list[bool]:
    """Returns whether JAX is in each of these modules, `"checkify"`, or functions of one, `"api.linear_transpose"`."""
    frames = traceback.walk_stack(inspect.currentframe())
    places = {(frame.f_globals.get("__name__"), frame.f_code.co_name) for frame, _ in frames}
    running = {name for module, function in places for name in (module, f"{module}.{function}")}
    return [f"jax._src.{name}" in running for name in names]


def hi_primitive(eqn: JaxprEqn) -> Any:
    """Returns the `HiPrim` that an equation applies (`VJPHiPrimitive` up to JAX 0.11); None for other primitives."""
    return eqn.params["_prim"] if eqn.primitive.name == "call_hi_primitive" else None


def of_one(primitive: Any) -> Any:
    """Returns the `HiPrim` that a `VmapOf` applies to many, up to JAX 0.11; any other one as it is."""
    while hasattr(primitive, "prim"):
        primitive = primitive.prim
    return primitive


def is_hi_type(aval: Any) -> bool:
    """Whether a user registered this type, whose values consist of arrays."""
    from jax.experimental.hijax import HiType

    return isinstance(aval, HiType)


def hi_kind(primitive: Any) -> str | None:
    """Returns how a `HiPrim` can be applied with another function in place of its `expand`.

    Returns:
        `"remat"`, `"name"` for `checkpoint_name`, `"custom_jvp_call"` or `"custom_vjp_call"` for the derivative rule
        that it has; None if it has rules that no public function takes: of its transpose, or for both modes.
    """
    cls: Any = type(of_one(primitive))
    classes = {each.__name__: each for each in cls.__mro__}
    kind = next((kind for name, kind in _HI_KINDS.items() if name in classes), None)
    if kind is not None:
        return kind
    base = classes.get("HiPrim") or classes["VJPHiPrimitive"]

    def has(rule: str) -> bool:
        return getattr(cls, rule, None) is not getattr(base, rule, None)

    if has("transpose"):  # it is linear, which a function in its place would not be
        return None
    is_derived = cls.vjp_fwd.__module__ == base.__module__  # from the forward rule, by JAX's functions
    if has("jvp") or (is_derived and not has("lin")):  # without any rule, the error of JAX names the primitive
        return "custom_jvp_call" if is_derived else None
    return None if has("lin") else "custom_vjp_call"


# The names of JAX's own classes, which say what a class is across versions.
_HI_KINDS = {
    "RematTraced": "remat",
    "CheckpointName": "name",
    "CheckpointNameFwd": "name",
    "CustomJVPTraced": "custom_jvp_call",
    "CustomVJPTraced": "custom_vjp_call",
}


def is_checkpoint(primitive: Primitive, *args: Any, **params: Any) -> bool:
    """Whether an equation of this primitive and these parameters is a `jax.checkpoint`."""
    return primitive.name == "remat2" or ("_prim" in params and hi_kind(params["_prim"]) == "remat")


def params_of(eqn: JaxprEqn) -> dict[str, Any]:
    """Returns the parameters of an equation; a `HiPrim` holds its own."""
    primitive = hi_primitive(eqn)
    return eqn.params if primitive is None else primitive.params


def jaxprs_in(params: Mapping[str, Any]) -> list[Any] | None:
    """Returns the jaxprs in the parameters of an equation; None for a `HiPrim` that holds its function in `expand`."""
    primitive = params.get("_prim")
    if primitive is None:
        return list(jaxprs_in_params(params))
    if type(primitive).__name__ not in _HI_KINDS:
        return None
    return list(filter(None, [primitive.params.get("jaxpr"), getattr(primitive.params.get("traced"), "jaxpr", None)]))


def with_params(eqn: JaxprEqn, **params: Any) -> JaxprEqn:
    """Returns an equation with some of these parameters replaced."""
    primitive = hi_primitive(eqn)
    if primitive is not None:
        params = {"_prim": type(primitive)(**(primitive.params | params))}
    return eqn.replace(params=eqn.params | params)


def with_policy(eqn: JaxprEqn, change: Callable[[Any], Any]) -> JaxprEqn:
    """Returns a `jax.checkpoint` with another policy; one without a policy, and any other equation, as it is."""
    policy = params_of(eqn).get("policy")
    # Up to JAX 0.11, `jax_remat3` reads the class of a policy.
    is_known_by_class = hi_primitive(eqn) is not None and type(policy).__module__ == "jax._src.ad_checkpoint"
    return eqn if policy is None or is_known_by_class else with_params(eqn, policy=change(policy))


def varying_axes(x: Any) -> frozenset[Any]:
    """Returns the mesh axes along which the type of `x` varies: those of `shard_map` with `check_vma=True`."""
    return jax.typeof(x).mat.varying


def parent_of(tracer: Any) -> Any:
    """Returns the equation that computed a tracer; None for an argument, or for a tracer that does not know.

    The equation has `source_info`, `params`, `outvars`, and tracers as `in_tracers` and as `invars`. Nothing public
    connects tracers to equations.
    """
    return getattr(tracer, "parent", None)


def tracers_read(eqn: Any) -> Sequence[Any]:
    """Returns the tracers that the equation of a tracer reads; see `parent_of`."""
    return eqn.in_tracers


def source_of(tracer: Any) -> Any:
    """Returns the value that a tracer stands for: of an outer function, if it is closed over; or of all of a `vmap`."""
    while hasattr(tracer, "batch_dim"):
        tracer = tracer.val
    return tracer.get_referent() if hasattr(tracer, "parent") else tracer


def is_constant(x: Any) -> bool:
    """Whether `x` is an array or a number, or a tracer of a number."""
    return not isinstance(x, jax.core.Tracer) or isinstance(variable_of(x), Literal)


def variable_of(x: Any) -> Any:
    """Returns the variable or the literal that a tracer stands for; what is no tracer as it is."""
    source = source_of(x)
    return getattr(source, "val", source) if isinstance(source, jax.core.Tracer) else source


def argument_names(tracers: Sequence[Any], like: Any) -> list[str]:
    """Returns the names, as JAX's errors write them, of those tracers that are arguments in the trace of `like`."""
    frame = getattr(source_of(like)._trace, "frame", None)
    names = {} if frame is None else dict(zip(frame.invars, frame.debug_info.arg_names or (), strict=False))
    return [names[x.val] for x in tracers if getattr(x, "val", None) in names]


def operands_of(eqn: Any) -> list[Any]:
    """Returns the variables and literals that an equation reads, while it is traced or afterwards."""
    return [variable_of(x) for x in eqn.invars]


def zero_cotangent(aval: Any) -> Any:
    """Returns a cotangent for the pullback of `jax.vjp` that is known to be zero."""
    return ad.Zero(aval.to_tangent_aval())


def has_effects(jaxpr: Jaxpr) -> bool:
    """Whether an open jaxpr has an effect, such as a print or a write to a reference. To name a mesh axis is none."""
    from jax._src.core import NamedAxisEffect

    return any(not isinstance(effect, NamedAxisEffect) for effect in jaxpr.effects)


def split_known(
    eqn: JaxprEqn, known: Sequence[bool], selects: Callable[..., bool]
) -> tuple[list[JaxprEqn], list[JaxprEqn], list[Any], list[Any]] | None:
    """Splits the selected ops in an equation that depend on known operands alone from the others.

    Args:
        eqn: an equation that holds jaxprs.
        known: whether each operand is known.
        selects: selects ops by primitive, types and parameters, as the policies of `jax.checkpoint` do.

    Returns:
        The equations that compute the selected ops, and those of the rest; the results of `eqn` that the former
        compute; and the variables of theirs that the latter may read. None if JAX cannot split it.
    """
    rule = partial_eval.partial_eval_jaxpr_custom_rules.get(eqn.primitive)
    if rule is None:
        return None
    first, rest, unknown, is_computed, saved = rule(selects, [not x for x in known], [True] * len(known), eqn)
    results = [(var, computed) for var, out, computed in zip(eqn.outvars, unknown, is_computed, strict=True) if not out]
    saved = [*saved, *[var for var, computed in results if not computed]]
    return [*filter(None, [first])], [*filter(None, [rest])], [var for var, _ in results], saved


def without_dead_code(program: Any) -> Any:
    """Returns a closed jaxpr without what its results do not depend on; it keeps its inputs and constants."""
    opened, _ = open_jaxpr(program)
    live = partial_eval.dce_jaxpr(opened, True, True)[0]
    return program.replace(jaxpr=live) if opened is not program else live


class CustomRule(NamedTuple):
    """The derivative rule of a `custom_jvp`, a `custom_vjp` or a `HiPrim`.

    Attributes:
        name: the name of the function that has it.
        symbolic_zeros: whether it gets symbolic zeros.
        n_closed_over: how many of the first operands are values that the function closes over.
        optimize_remat: whether `jax.checkpoint` runs the function itself where no derivative is read.
    """

    name: str
    symbolic_zeros: bool
    n_closed_over: int
    optimize_remat: bool = False


def custom_rule(eqn: JaxprEqn) -> CustomRule:
    """Describes the derivative rule of an equation, for a call of a function with this rule in its place."""
    primitive = hi_primitive(eqn)
    if primitive is None:
        name = open_jaxpr(eqn.params["call_jaxpr"])[0].debug_info.func_name
        return CustomRule(name, eqn.params["symbolic_zeros"], eqn.params["num_consts"])
    primitive = of_one(primitive)
    params = primitive.params
    if "traced" not in params:  # of a primitive of the user, which learns which operands are differentiated if it can
        # `shard_map` takes no symbolic zeros outside `jit`, nor up to JAX 0.11 does `jax.checkpoint` with this flag.
        refuses = jax.sharding.get_abstract_mesh().manual_axes or getattr(jax.config, "jax_custom_vjp3", False)
        return CustomRule(type(primitive).__name__, not refuses, 0)
    # Of `jax.custom_jvp` and `jax.custom_vjp`, what the function closes over is the first argument since JAX 0.11.
    # Since 0.12, a second argument is for rules that JAX makes.
    is_first = {"with_logs", "jvp_rule"} & params.keys()
    n = 2 if hasattr(primitive, "drop_fwd_consts") else 1 if is_first else 0
    n_closed_over = len(jax.tree.leaves(primitive.in_avals[:n]))
    return CustomRule(
        params["traced"].fun_name, params["symbolic_zeros"], n_closed_over, params.get("opt_remat", False)
    )


def closed_over_error() -> type[Exception]:
    """The error of JAX where a value that a `custom_vjp` closes over would be differentiated."""
    from jax._src.interpreters.ad import CustomVJPException

    return CustomVJPException


def define_vjp(function: Any, forward: Callable, backward: Callable, **options: bool) -> None:
    """Gives a `jax.custom_vjp` its rules; `backward` returns cotangents, and logs, which JAX 0.10 does not have."""
    if hasattr(function, "defvjp_with_logs"):
        function.defvjp_with_logs(forward, backward, **options)
    else:
        function.defvjp(forward, lambda *args: backward(*args)[0], **options)


def pull_with_logs(pullback: Any, cotangents: Any) -> tuple[Sequence[Any], Any]:
    """Applies a pullback of `jax.vjp`; returns the cotangents, and what the backward pass logs."""
    return pullback.with_logs(cotangents) if hasattr(pullback, "with_logs") else (pullback(cotangents), None)


def lowering_platforms(ctx: Any) -> Sequence[str]:
    """Returns the platforms that a program is lowered for, given the context of a lowering rule."""
    return ctx.module_context.platforms


def automatic_devices(ctx: Any) -> int:
    """Returns over how many devices the compiler splits arrays, given the context of a lowering rule."""
    context = ctx.module_context.axis_context
    mesh = getattr(context, "mesh", None)  # of `shard_map`, whose manual axes split no array
    if mesh is None:
        return getattr(context, "num_devices", None) or 1
    return math.prod(n for name, n in mesh.shape.items() if name not in context.manual_axes)


def lowered_once(ctx: Any, key: Any, lower: Callable[[], Any]) -> Any:
    """Returns `lower()`, or what it returned for an equal key in the block that is lowered now."""
    from jax.interpreters import mlir

    cache, block = ctx.module_context.cached_primitive_lowerings, mlir.ir.InsertionPoint.current.block
    if key not in cache or cache[key][0] != block:  # a value of another block may not be visible here
        cache[key] = block, lower()
    return cache[key][1]


def stored_order(ctx: Any, aval: Any, value: Any) -> tuple[int, ...] | None:
    """Returns the axes of a value that is lowered as those of the array that it transposes, the outermost first.

    None where a program should not fix an order: JAX exports no constraint on a layout. Before JAX 0.12, a sharded
    weight with a constraint would be gathered twice.
    """
    module = ctx.module_context
    is_partitioned = jax.__version_info__ < (0, 12) and getattr(module.axis_context, "num_devices", 1) != 1
    if module.lowering_parameters.for_export or is_partitioned:
        return None
    axes = list(range(aval.ndim))
    while getattr(value.owner, "name", "") in ("stablehlo.transpose", "stablehlo.convert"):
        op = value.owner
        if op.name == "stablehlo.transpose":
            axes = [op.attributes["permutation"][axis] for axis in axes]
        (value,) = op.operands
    return tuple(sorted(axes, key=axes.__getitem__))


SITE_PACKAGES = re.compile(r".*[/\\](site|dist)-packages[/\\]")

# Where JAX cannot differentiate an op, and does not raise `NotImplementedError`: a loop, a callback, an FFI call, an op
# in the forward pass of a `custom_vjp`, a solver without a transpose.
_NO_DERIVATIVE = re.compile(
    "Reverse-mode differentiation does not work|callbacks do not support (JVP|transpose)|cannot be differentiated"
    "|does not support reverse-mode autodiff|can't apply forward-mode autodiff|transpose_solve required"
)


def has_no_derivative(error: Exception) -> bool:
    """Whether JAX or a library raised because it does not differentiate an op, and not the code of the user."""
    from jax._src.source_info_util import is_user_filename  # neither JAX's, nor Python's, nor this package's

    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    others = [file for file in files if is_user_filename(file)]
    if others:  # such as `equinox.nondifferentiable`
        return all(map(SITE_PACKAGES.match, others))
    return isinstance(error, NotImplementedError) or _NO_DERIVATIVE.search(str(error)) is not None


# A name stack as text, such as `transpose(jvp(net))/layer`: `jvp(encoder)/dense` is `encoder/dense`, differentiated.
_TRANSFORM = re.compile(r"\w+\(|\)")

# An equation that `jax.checkpoint` recomputes or transposes has its path twice, `transpose(jvp(net))/jvp(net)/layer`,
# in its own name stack or together with that of the equation around it.
_REPEATED = re.compile(r"transpose\(jvp\(.*?\)\)(?:/[^()/]+)*/(?=jvp\([^)])")

_OF_JAX = re.compile(r"^$|->|^checkpoint$|^rematted_computation$")  # `->` is in the name of an einsum


def scopes_of(name_stack: Any) -> list[str]:
    """Returns the named scopes of an equation, the outermost first, without those that JAX adds."""
    names = _TRANSFORM.sub("", _REPEATED.sub("", str(name_stack))).split("/")
    return [name for name in names if not _OF_JAX.search(name)]


def is_of_derivative(name_stack: Any) -> bool:
    """Whether an equation is part of a program that JAX differentiates."""
    return "jvp(" in str(name_stack)


def spans_of(eqn: JaxprEqn) -> list[tuple[str, int, int, int, int]]:
    """Returns the file, first line and column, and last line and column of the expressions that an equation comes from.

    The innermost is first. JAX's public summary has only where an expression starts.
    """
    try:
        from jax._src.source_info_util import user_frames

        frames = list(user_frames(eqn.source_info.traceback))
        return [(x.file_name, x.start_line, x.start_column, x.end_line, x.end_column) for x in frames]
    except (ImportError, AttributeError, TypeError):
        return []


def is_backward(name_stack: Any) -> bool:
    """Whether an equation is part of a backward pass."""
    return "transpose(" in str(name_stack)


def is_recomputed(name_stack: Any) -> bool:
    """Whether `jax.checkpoint` made an equation, which computes the forward pass again."""
    return "rematted_computation" in str(name_stack)
