"""Unscales gradients, and checks that they are finite, come from a scaled loss, and match the parameters."""

import collections
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.extend.core import Literal, Var
from jax.tree_util import keystr

from jmp_amp import _jaxpr as jx
from jmp_amp._calls import quote
from jmp_amp._loss_scale._units import Unit, UnitAnalysis
from jmp_amp._trees import is_value, multiply_wide

AxisName = Hashable | tuple[Hashable, ...]
UNSCALE_SCOPE = "amp.unscale"


def unscale(tree: Any, factor: jax.Array) -> Any:
    """Returns the tree with its floating and complex leaves multiplied by `factor`, in float32 or wider.

    Args:
        tree: gradients of any shape; other leaves pass through.
        factor: float32[], the reciprocal of the scale, times the clipping factor if gradients are clipped.
    """
    # A multiplication, because XLA rewrites only some divisions by a scalar as multiplications. Plain JAX instead of a
    # kernel, so that XLA fuses it into the operations that use the result.
    with jax.named_scope(UNSCALE_SCOPE):
        return multiply(tree, factor)


def multiply(tree: Any, factor: jax.Array) -> Any:
    """As `unscale`, for gradients that stay scaled."""
    return with_overwritten(tree, multiply_wide(tree, factor))


def is_overwritten(path: tuple[Any, ...], x: Any) -> bool:
    """Whether a leaf of a tree of gradients is no gradient, but the next state of a float8 module of Flax.

    References:
        `OVERWRITE_WITH_GRADIENT` and `fm32` in `flax.linen.fp8_ops`.
    """
    is_max = getattr(getattr(x, "dtype", None), "name", "").startswith("fp8_meta")
    return is_max or "['_overwrite_with_gradient']" in keystr(path)


def without_overwritten(grads: Any) -> Any:
    """Returns the gradients, with a number in place of each leaf that is none."""
    return jax.tree.map_with_path(lambda path, x: np.int32(0) if is_overwritten(path, x) else x, grads)


def with_overwritten(grads: Any, new: Any) -> Any:
    """Returns `new`, a tree as the gradients, with the leaves of these that are no gradients."""
    return jax.tree.map_with_path(lambda path, x, y: x if is_overwritten(path, x) else y, grads, new)


def check_grads(
    grads: Any, factor: jax.Array, axis_name: AxisName | None, implementation: str | None, by_leaf: bool = False
) -> tuple[jax.Array, jax.Array, Any]:
    """Checks that every gradient is finite after unscaling.

    It reads each gradient once and writes no arrays. Over mapped axes, it adds one scalar collective, or one for each
    leaf, which XLA merges. Under `shard_map`, the type of a leaf contains the axes along which the leaf varies. Such a
    leaf is a shard of one gradient, so its squares are summed over these axes. Without these types (`pmap`, `vmap`,
    `check_vma=False`), each device is assumed to hold a copy of the gradient, and any copy may have overflowed.

    Args:
        grads: scaled gradients of any shape; leaves that are neither floating nor complex are ignored.
        factor: float32[], the reciprocal of the scale.
        axis_name: the mapped axes over which gradients are sharded or differ.
        implementation: as in `pallas_kernels.check_finite`.
        by_leaf: whether to check each leaf separately.

    Returns:
        bool[], whether every unscaled gradient is finite on every device; float32[], the sum of squares of the unscaled
        gradients, -inf if they are not finite; and, with `by_leaf`, a tree of bool[] with the structure of the
        gradients, true for leaves that are not finite.

    Raises:
        ValueError: `axis_name` is no mapped axis, or gradients vary along an axis of `shard_map` that it lacks.
    """
    from pallas_kernels import check_finite

    grads = without_overwritten(grads)
    names = () if axis_name is None else axis_name if isinstance(axis_name, tuple) else (axis_name,)
    is_typed = any(map(_is_typed, names))
    leaves, treedef = jax.tree.flatten(grads)
    varying = frozenset[Any]().union(*map(jx.versions.varying_axes, leaves))
    if missing := sorted(varying - {*names} - jx.versions.varying_axes(factor), key=str):
        raise ValueError(
            f"gradients vary along the mapped axes {missing}, but the loss scale does not, so devices could disagree "
            f"on whether to skip a step; {average_first((*names, *missing))}, or, if the parameters are sharded along "
            f"these axes, pass `axis_name={_as_argument((*names, *missing))}`"
        )

    def sum_of_squares(part: list[Any]) -> jax.Array:
        """Returns the sum of squares of some of the leaves on all devices; NaN if one is not finite."""
        total = jnp.float32(0)
        by_axes = collections.defaultdict(list)
        for x in part:
            by_axes[tuple(name for name in names if is_typed and name in jx.versions.varying_axes(x))].append(x)
        for axes, group in by_axes.items():
            _, squares = check_finite(group, factor, implementation=implementation)
            total += lax.psum(squares, axes) if axes else squares
        if names and not is_typed:
            overflows = lax.psum(jnp.isnan(total).astype(jnp.float32), names)
            total = jnp.where(overflows > 0, jnp.nan, total)
        return total

    with jax.debug_nans(False):  # a NaN marks an overflow here
        sums = [sum_of_squares(part) for part in ([[x] for x in leaves] if by_leaf else [leaves])]
        flags = jax.tree.unflatten(treedef, map(jnp.isnan, sums)) if by_leaf else None
        total = sum(sums, jnp.float32(0))
        # Outside this block, `jax.debug_nans` would raise on a NaN. Here, the replacement fuses into the sum.
        total = jnp.where(jnp.isnan(total), -jnp.inf, total)
        return total >= 0, total, flags


def average_first(axes: Sequence[Any]) -> str:
    """Returns the cure for gradients, or what is computed from them, that vary along mapped axes."""
    return f"average the gradients first, `grads = jax.lax.pmean(grads, {_as_argument(axes)})`"


def _as_argument(axes: Sequence[Any]) -> str:
    return repr(axes[0] if len(axes) == 1 else tuple(axes))


def _is_typed(name: Any) -> bool:
    """Returns whether the types of arrays contain the mapped axes along which they vary."""
    try:
        return bool(jx.versions.varying_axes(lax.axis_index(name)))
    except NameError:  # JAX's error for an unbound axis
        raise ValueError(
            f"`axis_name` must name axes of `shard_map`, `pmap` or `vmap` around `update`, got {quote(name)}, which is "
            "none here; leave out `axis_name` under plain `jit`, which sees whole arrays, with or without sharding"
        ) from None


def differentiated(params: Any) -> Any:
    """Returns the tree that the gradients are of: the fast parameters of `optax.LookaheadParams`."""
    return params.fast if isinstance(params, optax.LookaheadParams) else params


def check_leaves(grads: Any, params: Any) -> None:
    """Raises ValueError unless every gradient has a parameter of its shape at the same path, and vice versa.

    Frozen and static leaves have no gradient, so `params` may hold anything at the paths where `grads` holds None or
    `optax.MaskedNode`. Per-example gradients may have a leading axis, which all of them must share.
    """
    params = differentiated(params)
    grads_by_path, params_by_path = _leaves_by_path(grads), _leaves_by_path(params)
    for path, x in grads_by_path.items():
        if is_value(x) and not is_value(params_by_path.get(path)):
            extra = f"have a leaf `{keystr(path)}` that" if path else "are a single array, which"
            raise ValueError(
                f"the gradients {extra} the parameters do not have; pass `tx.update` gradients with respect to the "
                "same tree as `params`"
            )
    shapes = [(jnp.shape(x), jnp.shape(params_by_path[path])) for path, x in grads_by_path.items() if is_value(x)]
    if any(shape[1:] != want for shape, want in shapes) or len({shape[:1] for shape, _ in shapes}) > 1:
        check_shapes("gradient", grads, params, "reduce or index it to the shape of the parameter")
    for path, x in params_by_path.items():
        if is_value(x) and not any(path[:i] in grads_by_path for i in range(len(path) + 1)):
            raise ValueError(
                f"the parameter `{keystr(path)}` has no gradient; differentiate with respect to it, or, "
                "if it is frozen, replace it with None in both the gradients and the parameters"
            )


def check_shapes(name: str, tree: Any, params: Any, cure: str) -> None:
    """Raises ValueError if a leaf of a tree of gradients or updates has another shape than its parameter."""
    params_by_path = _leaves_by_path(params)
    for path, x in _leaves_by_path(tree).items():
        param: Any = params_by_path.get(path)
        if is_value(x) and is_value(param) and jnp.shape(x) != jnp.shape(param):
            raise ValueError(
                f"the {name} at `{keystr(path)}` has shape {jnp.shape(x)}, but its parameter has shape "
                f"{jnp.shape(param)}; {cure}"
            )


def is_frozen(x: Any) -> bool:
    """Returns whether `x` takes the place of a gradient that a frozen parameter does not have."""
    return x is None or isinstance(x, optax.MaskedNode)


def _leaves_by_path(tree: Any) -> dict[tuple[Any, ...], Any]:
    return dict(jax.tree.leaves_with_path(tree, is_leaf=is_frozen))


def check_scaled(grads: Any, scale: Any = None) -> None:
    """Raises ValueError if the traced program shows that `grads` are not the gradients of a loss times `scale`.

    The gradients are wrong if they come from `unscale`, also through a chain of transformations. If `scale` is traced,
    they are also wrong if the backward pass of a loss is behind them, and nothing that may be a scale of all of it. A
    step may be split into `jit`s, so any argument that can hold the scale may be the scale. The check inspects only the
    first leaves, and passes whatever it cannot prove wrong.
    """
    leaves = jax.tree.leaves_with_path(grads)[:4]
    for path, x in leaves:
        if _is_unscaled(x):
            raise ValueError(
                f"the gradient at `{keystr(path)}` was already unscaled: `unscale_and_check` is in front of another "
                "one or of `dynamic_loss_scale`; keep only one, inside `dynamic_loss_scale` if there is one"
            )
    if isinstance(scale, jax.core.Tracer) and leaves and not _may_depend_on([x for _, x in leaves], scale):
        raise ValueError(
            f"the gradient at `{keystr(leaves[0][0])}` does not depend on the loss scale, so it must not be divided by "
            "it; write `amp.value_and_grad(loss_fn, opt_state=opt_state)`, disable loss scaling with "
            "`dynamic_loss_scale(inner, LossScale.none())`, or pass the factor of the loss as "
            "`tx.update(..., loss_scale=number)`"
        )


def _is_unscaled(grad: Any) -> bool:
    """Whether a gradient is the result of `unscale`, or of transformations of it.

    A gradient is not if it was differentiated after that, as where a loss reads updated parameters. It may not be if an
    argument is behind both the unscaled gradients and what was done to them: that may have scaled them again.
    """
    tracers = jx.tracers_behind(grad, enters=lambda eqn: not (_is_unscale(eqn) or _differentiates(eqn)))
    unscaled = [x for x in tracers if (eqn := jx.versions.parent_of(x)) is not None and _is_unscale(eqn)]
    return bool(unscaled) and _arguments(tracers).isdisjoint(_arguments(jx.tracers_behind(*unscaled)))


def _may_depend_on(grads: Sequence[Any], scale: Any) -> bool:
    """Whether gradients may be those of a loss times the scale, or of no loss at all."""
    first, behind_scale = grads[0], jx.tracers_behind(scale)
    if not _arguments(behind_scale):
        return True  # a constant, as `set_loss_scale` writes; the gradient may depend on an equal one
    if _arguments(jx.tracers_behind(first, enters=lambda eqn: not _differentiates(eqn))):
        return True  # an argument that changed the gradient after the backward pass
    ids, behind = {id(x) for x in behind_scale}, jx.tracers_behind(first)
    if any(id(x) in ids for x in behind):
        return True
    eqns = {id(eqn): eqn for x in behind if (eqn := jx.versions.parent_of(x)) is not None}
    are_constant = set(_has_constant_factors(eqns.values(), {}))
    candidates = [x for x in behind if _can_be_scale(x)]
    if False in are_constant:  # the loss may compute its factor from any argument
        arguments = [x for x in behind if jx.versions.parent_of(x) is None]
        if any(jx.shape_of(x) == () and not jx.is_inexact(x) for x in arguments):
            return True
        candidates += filter(jx.is_floating, arguments)
    return not are_constant or any(_multiplies_all(x, grads) for x in candidates)


def _multiplies_all(candidate: Any, grads: Sequence[Any]) -> bool:
    """Whether a traced value may be a factor of all gradients, as one of a single term of the loss is not."""
    analysis = _Factor(1)
    units = {id(_variable(candidate)): analysis.scales[0]._replace(is_data_free=False)}

    def unit_of(atom: Any) -> Unit:
        if isinstance(atom, Var):
            return units.get(id(atom), analysis.unscaled)
        return analysis.constant(atom.val if isinstance(atom, Literal) else atom)

    entered = set()
    for tracer in jx.tracers_behind(*grads):
        eqn = jx.versions.parent_of(tracer)
        if eqn is not None and id(eqn) not in entered and tracer is not candidate:
            entered.add(id(eqn))
            found = analysis.infer_equation(eqn, [unit_of(atom) for atom in jx.versions.operands_of(eqn)])
            units = {id(var): unit for var, unit in zip(eqn.outvars, found, strict=True)} | units
    ends = [unit_of(_variable(x)) for x in grads]
    return all(not unit.origins and unit.powers in (None, analysis.scales[0].powers) for unit in ends)


class _Factor(UnitAnalysis):
    """The power of one value; an origin says that a result is a sum of different powers."""

    def error(self, predicate: str, scaled: Unit) -> str:
        return predicate


def _variable(tracer: Any) -> Any:
    tracer = jx.versions.source_of(tracer)
    return getattr(tracer, "val", tracer)


def _arguments(tracers: Iterable[Any]) -> set[int]:
    """Returns the ids of the tracers that no equation computed."""
    return {id(x) for x in tracers if jx.versions.parent_of(x) is None}


def _can_be_scale(x: Any) -> bool:
    """Whether a tracer is a floating-point scalar that is an argument, or was computed from one outside derivatives."""
    if jx.shape_of(x) != () or not jx.is_floating(x):
        return False
    eqn = jx.versions.parent_of(x)
    return eqn is None or (not _differentiates(eqn) and bool(_arguments(jx.tracers_behind(x))))


def _has_constant_factors(eqns: Iterable[Any], constants: dict[int, Any], is_inside: bool = False) -> Iterator[bool]:
    """Yields, for each backward pass that begins here, whether its first equation reads constants alone.

    This equation reads the cotangent of the loss, which is 1. If a scale multiplies the loss, it also reads that scale.

    Args:
        eqns: equations in the order of the program.
        constants: the values of the variables that are constant, by their ids.
        is_inside: whether the equations are part of a backward pass.
    """
    for eqn in eqns:
        stack = eqn.source_info.name_stack
        is_inner = (is_inside or jx.is_backward(stack)) and not jx.is_recomputed(stack)
        operands = jx.versions.operands_of(eqn)
        values = [x.val if isinstance(x, Literal) else constants.get(id(x)) for x in operands]
        is_constant = not any(value is None for value in values)
        reads_one = any(jx.is_floating(x) and value == 1 for x, value in zip(operands, values, strict=True))
        if is_inner and reads_one and (is_constant or all(jx.shape_of(x) == () for x in operands)):
            yield is_constant
        if is_constant:
            constants |= {id(x): "computed" for x in eqn.outvars}
        structure = jx.structure_of(eqn)
        if isinstance(structure, jx.Loop):  # in every iteration
            inside: list[Any] = [(structure.body, range(structure.consts.start, structure.consts.stop))]
        else:
            inside = [(jaxpr, structure.operands) for jaxpr in structure.jaxprs] if structure else []
        for jaxpr, indices in inside:
            opened, _ = jx.open_jaxpr(jaxpr)
            known = {id(x): values[i] for x, i in zip(opened.invars, indices, strict=False) if values[i] is not None}
            yield from _has_constant_factors(opened.eqns, known, is_inner)


def _is_unscale(eqn: Any) -> bool:
    return UNSCALE_SCOPE in str(eqn.source_info.name_stack).split("/")


def _differentiates(eqn: Any) -> bool:
    """Whether an equation is part of a derivative, or calls a function that computes one."""
    stack = eqn.source_info.name_stack
    inside = (inner for jaxpr in jx.inner_jaxprs(eqn) for inner in jx.open_jaxpr(jaxpr)[0].eqns)
    return jx.is_of_derivative(stack) or jx.is_backward(stack) or any(map(_differentiates, inside))
