"""`autocast`: the function transformation."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, ParamSpec, Protocol, TypedDict, TypeVar, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jmp_amp import _jaxpr as jx
from jmp_amp._attention import Found, Scope, check_kernel, with_kernel
from jmp_amp._autocast._higher_order import plan_higher_order
from jmp_amp._autocast._options import Options, parse_rules
from jmp_amp._autocast._plan import Plan, Region
from jmp_amp._autocast._planner import Planner
from jmp_amp._autocast._values import Stream, Use, unknown
from jmp_amp._calls import quote, shorten, transformation, warn
from jmp_amp._cast_inputs import note_refusal
from jmp_amp._formats import FLOAT32, FORMATS, Format, parse_format
from jmp_amp._modules import with_modules
from jmp_amp._ops import RULES, Demand, OpClass
from jmp_amp._policy import Policy, get_policy, is_policy

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])


_NAME = "autocast (see docs/sharp-bits.md)"  # in JAX's errors about a trace, which may be raised when it is over


class AutocastOptions(TypedDict, total=False):
    """The options of `autocast` that other functions take, too."""

    rules: Mapping[Any, Any] | None
    save: str
    weight_grad_dtype: Any
    residual_stream: str
    attention: str | Callable[..., Any] | None


class _Options(AutocastOptions, total=False):
    enabled: bool


@overload
def autocast(
    fun: None = None, dtype: Any = ..., **options: Unpack[_Options]
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
@overload
def autocast(fun: Callable[P, R], dtype: Any = ..., **options: Unpack[_Options]) -> Callable[P, R]: ...
@transformation
def autocast(
    fun: Callable | None = None,
    dtype: Any = None,
    *,
    rules: Mapping[Any, Any] | None = None,
    save: str = "matmuls",
    weight_grad_dtype: Any = None,
    residual_stream: str = "float32",
    attention: str | Callable[..., Any] | None = None,
    enabled: bool = True,
) -> Any:
    """Returns `fun` with each of its ops run in the precision that suits it.

    Matrix products and convolutions run in `dtype`. Exponentials, logarithms, sums, norms and losses run in float32.
    All other ops run in the dtypes of their operands. `fun` needs no change: `autocast` traces it once, at its own
    dtypes, and evaluates the trace with the operands of each op cast by the class of the op. `jit`, `grad`, `vmap`,
    `scan` and `jax.checkpoint` work inside it and around it.

    `autocast` casts only values that were traced in float32. Integers, float64, complex and float8 values, ops that
    `fun` casts to 16 bits, and products with `precision=HIGHEST` stay as they are. A bias does not widen the product
    that it is added to. A constant that `dtype` cannot hold (-1e9 in a mask) makes its op float32. Sums that `fun`
    writes itself are float32: scatter-adds, and carries of loops that accumulate. Values that decide when a
    `while_loop` ends are not cast.

    Args:
        fun: a function of pytrees that JAX can trace. Arrays among the arguments are traced; all other leaves (Python
            numbers, strings, None, static fields) are passed on as they are. Flax NNX modules, among the arguments or
            as `fun`, are updated in place, as without autocast. Leave it out to use `autocast` as a decorator.
        dtype: `"float16"`, `"bfloat16"`, or `"float32"`, which returns `fun` as it is. `"float8"` is bfloat16 in which
            large products with a weight (an input of `fun`) read float8 operands, each with a scale of its own; also
            `"float8_bfloat16"` and `"float8_float16"`. Devices without such units run the base dtype and warn. Or a
            policy, as a `Policy` or as its string, such as `"O2"`: ops compute in its `compute_dtype`, and floating
            results are cast to its `output_dtype`. If its `param_dtype` is float16 or bfloat16, arguments of that dtype
            are parameters: `fun` is traced as if they were float32, and each op casts them to its own dtype. The
            default is `"float16"`; the name of a dtype is one here, and no policy.
        rules: overrides, added to those of a policy. A primitive maps to a class, `{lax.tanh_p: "full"}`; the others
            are "lower", "promote", "follow" and "original". This also registers a primitive of your own. A pattern of
            named scopes, such as the modules of Flax and Haiku, maps to "full" or a compute dtype:
            `{"*/LayerNorm_*": "full", "decoder/*": "bfloat16"}`. `*` matches any characters, `?` one, and `[12]` one of
            those in brackets, or itself. A pattern may start at any scope and holds for everything in it. The last
            pattern that matches counts; a region in the code takes precedence.
        save: what the backward pass of a `scan` keeps where the program does not say it. A `jax.checkpoint` in the body
            of the scan or around the scan says it, and then `save` has no effect. `"matmuls"` keeps the results of
            products, convolutions, linear algebra and custom kernels, and computes other ops again. These are cheap but
            not free, and a scanned transformer takes a third of the memory. `"all"` keeps what JAX keeps.
        weight_grad_dtype: `"float32"` computes the gradients of weights (inputs of `fun` that are operands of
            products) with float32 results, so that they cannot overflow in float16. Such a product has no forward-mode
            derivative (`jax.jvp`). None computes them in the compute dtype.
        residual_stream: `"low"` stores the residual stream in the compute dtype: sums of layer outputs, embeddings and
            positions that a norm reads, sums with the result of a norm that a product reads (a ResNet has these), and
            the carries of scans over layers. On an H200 it saves 4 to 8% of the bytes of a transformer and 1 to 5% of
            its memory. In float16 the sums overflow above 65504. `"float32"` gives such a sum the widest dtype of its
            terms, as PyTorch and JAX do. States, losses, and sums that `fun` returns stay float32.
        attention: what computes the attention of `fun`, which needs no change: `"cudnn"` or another `implementation`
            of `jax.nn.dot_product_attention`, or a function with its signature. Every `softmax(scale * q @ k.T + bias,
            masked) @ v` whose weights nothing else reads becomes one call of it, in `dtype` in both passes. A function
            gets query, key and value of shape (batch, length, heads, features), and `bias`, `mask`, `scale` and
            `is_causal`; `local_window_size` and `key_value_seq_lengths` only where the program has them. Regions and
            `rules` keep their say. Attention that the kernel refuses as it is traced stays as it is written, with a
            warning, and so does, on a CPU, what JAX does not lower for one; `explain` says why any other does. None
            leaves attention as it is written.
        enabled: False returns `fun` as it is.

    Returns:
        A function with the signature of `fun`. Its results have the shapes and dtypes of those of `fun`. Products
        accumulate in float32 on hardware that does so (every GPU and TPU matrix unit); sums accumulate in float32.

    Raises:
        TypeError: `fun` is not callable, a rule is for neither a primitive nor a string, or `attention` is neither a
            string nor a function.
        ValueError: `dtype` is not one of these, the value of a rule is not a dtype or a class that its primitive can
            have, or `attention` is not an implementation that JAX has. A pattern that matches no scope warns and lists
            the scopes.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> @amp.autocast
        ... def layer(w, b, x):
        ...     return jax.nn.relu(x @ w + b)
        >>> layer(jnp.ones((8, 3)), jnp.zeros(3), jnp.ones((4, 8))).dtype
        dtype('float32')
        >>> jax.make_jaxpr(layer)(jnp.ones((8, 3)), jnp.zeros(3), jnp.ones((4, 8))).eqns[2].outvars[0].aval
        ShapedArray(float16[4,3])

    References:
        The op classes are those of PyTorch's `torch.autocast`.
    """
    options: dict[str, Any] = {"rules": rules, "save": save, "weight_grad_dtype": weight_grad_dtype}
    options |= {"residual_stream": residual_stream, "attention": attention}
    if fun is None:
        return Decorator(autocast, dtype=dtype, enabled=enabled, **options)
    check_function(fun)
    settings = parse_settings(dtype, **options)
    if not enabled or (settings.format is FORMATS["float32"] and settings.policy is None and not rules):
        return fun
    autocasted = autocast_with(fun, settings)
    autocasted.autocast_of = fun, settings  # type: ignore[attr-defined] # for `explain`
    return autocasted


class Mark(Protocol):
    """A context manager that is also a decorator."""

    def __enter__(self) -> None: ...
    def __exit__(self, *exception: Any) -> bool | None: ...
    def __call__(self, fun: F, /) -> F: ...


def precision(dtype: Any) -> Mark:
    """Makes a region inside `autocast` compute in `dtype`. It is a context manager and a decorator.

    Outside `autocast` it has no effect. Regions nest, and the innermost counts, in the functions that it calls and in
    the backward pass, too.

    Args:
        dtype: as for `autocast`, or the dtype. With float32 every op of the region runs in the dtypes that it was
            traced in. With `"float8"` products with a weight are float8 at every size. `"bfloat16_x3"`, `"bfloat16_x6"`
            and `"tensorfloat32"` are float32 whose products run on matrix units: as 3 or 6 products of bfloat16
            parts, with errors of 4e-6 or as float32, or with operands of 11 bits. Products whose `precision` the
            program sets keep theirs.

    Raises:
        ValueError: another dtype.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> @amp.autocast
        ... def product(x):
        ...     with amp.precision("bfloat16"):
        ...         return x @ x.T
        >>> print(product(jnp.full((1, 8), 500.0)))  # float16 ends at 65504
        [[1.998848e+06]]
    """
    return jx.marked(parse_format(dtype).name)


@overload
def full_precision(fun: None = None) -> Mark: ...
@overload
def full_precision(fun: F) -> F: ...
def full_precision(fun: F | None = None) -> F | Mark:
    """Makes a region inside `autocast` run in the dtypes that it was traced in.

    It is a context manager, `with full_precision():`, and a decorator, `@full_precision`. On a function it replaces
    torch's `custom_fwd(cast_inputs=torch.float32)` and `custom_bwd`: inputs are cast back to the traced dtypes, and the
    backward pass runs in the same dtypes.

    Raises:
        TypeError: `fun` is not a function, such as a dtype: `precision(dtype)` takes one.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> @amp.autocast
        ... def gram(x):
        ...     with amp.full_precision():
        ...         return x @ x.T
        >>> print(gram(jnp.full((1, 8), 150.0)))
        [[180000.]]
    """
    region = precision("float32")
    if fun is None:
        return region
    if _is_dtype(fun) or not callable(fun):
        raise TypeError(
            f"`full_precision` takes a function or no argument, got {quote(fun)}; write `with amp.full_precision():`, "
            'or `@amp.full_precision` over a function; a region of another dtype is `with amp.precision("bfloat16"):`'
        )
    return region(fun)


class Settings(NamedTuple):
    """The arguments of `autocast`, parsed."""

    policy: Policy | None
    format: Format
    options: Options
    attention: str | Callable[..., Any] | None


def parse_settings(
    dtype: Any = None,
    rules: Mapping[Any, Any] | None = None,
    save: str = "matmuls",
    weight_grad_dtype: Any = None,
    residual_stream: str = "float32",
    attention: str | Callable[..., Any] | None = None,
) -> Settings:
    """Checks the arguments of `autocast`; it documents them."""
    policy = get_policy(dtype) if is_policy(dtype) else None
    form = parse_format(policy.compute_format if policy else "float16" if dtype is None else dtype)
    overrides = parse_rules({**dict(policy.rules if policy else ()), **(rules or {})})
    for name in overrides.primitives.keys() & (jx.HIGHER_ORDER.keys() - RULES.keys()):
        raise ValueError(
            f"`{name}` holds a program and has no class itself: give one to the primitives in it, or put it into a "
            "`jax.named_scope` and give a dtype to that: {'my_scope': 'full'}"
        )
    if save not in ("all", "matmuls"):
        raise ValueError(f'`save` must be "all" or "matmuls", got {quote(save)}')
    if weight_grad_dtype is not None and parse_format(weight_grad_dtype) is not FORMATS["float32"]:
        raise ValueError(f"`weight_grad_dtype` must be float32 or None, got {quote(weight_grad_dtype)}")
    if residual_stream not in ("float32", "low"):
        raise ValueError(f'`residual_stream` must be "float32" or "low", got "{shorten(str(residual_stream))}"')
    check_kernel(attention)
    options = Options(overrides, save == "matmuls", weight_grad_dtype is not None, residual_stream == "low")
    return Settings(policy, form, options, attention)


def check_function(fun: Any) -> None:
    """Raises TypeError unless `fun` is a function; scalar types such as `jnp.float16` are callable, but dtypes."""
    if isinstance(fun, Policy) or _is_dtype(fun):
        option = "policy" if isinstance(fun, Policy) else quote(fun) if isinstance(fun, str) else "dtype"
        raise TypeError(
            f"`autocast` takes a function, got {quote(fun)}; write `amp.autocast(fun, {option})`, or "
            f"`@amp.autocast(dtype={option})` over the function (it transforms a function, so it has no `with` block)"
        )
    if not callable(fun):
        raise TypeError(f"`autocast` takes a function, got {type(fun).__name__}")


def _is_dtype(value: Any) -> bool:
    """Returns whether `value` is a dtype, a scalar type (which is callable) or a string."""
    is_scalar_type = isinstance(value, type(jnp.float16)) or (isinstance(value, type) and issubclass(value, np.generic))
    return is_scalar_type or isinstance(value, str | np.dtype)


class Decorator(functools.partial):
    """The decorator that `autocast()` returns; entering it as a context manager raises TypeError."""

    def __enter__(self) -> NoReturn:
        raise TypeError(
            "`autocast` transforms a function, so it has no `with` block; write `fun = amp.autocast(fun, ...)`, or put "
            "`@amp.autocast(...)` over the function. Inside that function, `with amp.full_precision():` and "
            "`with amp.precision(dtype):` are regions of another precision"
        )

    def __exit__(self, *exception: Any) -> None:
        pass


@functools.lru_cache(maxsize=64)
def planner_of(options: Options) -> Planner:
    """Returns the planner for these options, the same for equal ones: it keeps the plans of the jaxprs that JAX keeps.

    So, outside `jit`, a second call compiles nothing, and plans only what is traced anew.
    """
    return Planner(plan_higher_order, options)


@dataclasses.dataclass(frozen=True)
class _Scope(Scope):
    """The region of an equation, which says whether a kernel of attention may take its place."""

    planner: Planner
    region: Region
    format: Format

    def inside(self, eqn: JaxprEqn) -> "_Scope":
        """Returns the scope of the equations in the jaxprs of an equation."""
        return _Scope(self.planner, self.planner.enter(self.region, eqn), self.format)

    def why_not(self, eqn: JaxprEqn) -> str:
        """Returns why an equation does not run in the format of the whole program; empty if it does."""
        if self.inside(eqn).region.format is not self.format:
            return "a region or a rule gives it another precision"
        if eqn.primitive is not lax.dot_general_p:
            return ""
        dtypes = [jx.dtype_of(x) for x in (*eqn.invars, *eqn.outvars)]
        is_low = self.planner.rule_of(eqn).op_class is OpClass.LOWER and self.format.takes(dtypes)
        return "" if is_low else "its products do not run in the compute dtype: see their rows"


def autocast_with(fun: Callable, settings: Settings, planned: Callable = lambda plan, found: None) -> Callable:
    """Returns `fun` under autocast; each call passes its plan, and the attention that it found, to `planned`."""
    return with_modules(fun, functools.partial(_autocasted, settings=settings, planned=planned))


def _autocasted(fun: Callable, settings: Settings, planned: Callable[..., Any]) -> Callable:
    policy, form, options, attention = settings
    stored = FLOAT32 if policy is None else policy.param_dtype

    def as_float32(x: Any) -> Any:
        """Returns the type of float32 for a parameter of a low `param_dtype`, as which it is traced."""
        is_low = stored.itemsize == 2 and getattr(x, "dtype", None) == stored
        return jx.with_dtype(x, FLOAT32) if is_low else x

    @functools.wraps(fun, updated=())
    def autocasted(*args: Any, **kwargs: Any) -> Any:
        # The function is traced at each call, as by `jax.grad`: a kept trace would go stale with its closures.
        try:
            closed, arrays, rebuild = jx.trace_call(fun, args, kwargs, jax.Ref, cast=as_float32, name=_NAME)
        except Exception as error:
            if form.is_low:
                note_refusal(error, form.dtype)
            raise
        jaxpr, _ = jx.open_jaxpr(closed)
        demand = Demand.RETURNED if policy is None or policy.output_dtype == FLOAT32 else Demand.ANY
        use = Use(demand, Stream.RETURNED if options.has_low_stream else Stream.NONE)
        values = tuple(map(unknown, map(jax.typeof, arrays)))
        region = Region(form, "", "", *jx.versions.are_running("ad_checkpoint", "api.linear_transpose"))
        found: Sequence[Found] = ()
        if attention is not None and form.is_low:
            closed, found = with_kernel(closed, attention, form.dtype, _Scope(planner_of(options), region, form))
        plan = planner_of(options).plan(closed, values, (use,) * len(jaxpr.outvars), region)
        planned(plan, found)
        _warn(plan, options, found)
        out = rebuild([jx.as_type(x, var.aval) for x, var in zip(plan(*arrays), jaxpr.outvars, strict=True)])
        return out if policy is None else policy.cast_to_output(out)

    return autocasted


def _warn(plan: Plan, options: Options, found: Sequence[Found]) -> None:
    """Warns of what a kernel refuses, of patterns that match no scope, and of products that stay as traced."""
    for warning in dict.fromkeys([each.warning for each in found if each.warning]):
        warn(warning)
    matched = {pattern for scope in plan.scopes for pattern in options.overrides.matching(scope)}
    for pattern in options.overrides.scopes.keys() - matched:
        scopes = sorted(filter(None, plan.scopes))
        shown = ", ".join(scopes[:20]) + (f" and {len(scopes) - 20} more" if len(scopes) > 20 else "")
        warn(f"the rule for `{shorten(pattern)}` matches no scope of the function; its scopes are: {shown or 'none'}")
    for name in sorted(plan.opaque):
        warn(
            f"autocast has no rule for `{name}`, so the products in it stay as they were traced; cast its operands in "
            "the function, or report it with the program"
        )
