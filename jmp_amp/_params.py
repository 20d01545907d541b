"""Low-precision parameters: casts of parameters, and the transformation that trains them."""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import keystr
from jax.typing import DTypeLike

from jmp_amp import _jaxpr as jx
from jmp_amp._calls import quote, with_inner_state
from jmp_amp._loss_scale import check_inner, is_frozen
from jmp_amp._policy import Policy, get_policy
from jmp_amp._trees import cast_floating, is_inexact, wide_dtype

T = TypeVar("T")

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")  # RMSNorm_0 has the words RMS and Norm
_NORM = re.compile(r"[a-z]*norms?|normali[sz](e|er|ation)|bn|ln|gn")


def is_norm(path: tuple[Any, ...], leaf: Any) -> bool:
    """Whether a leaf belongs to a normalization layer, judged by the names on its path.

    Args:
        path: the keys from the root of the tree to the leaf, as in `jax.tree_util.tree_map_with_path`.
        leaf: unused.

    Returns:
        True if a name on the path has a word, in any case, that is `norm`, ends in `norm` (`layernorm`), or is
        `normalization`, `normalizer`, `bn`, `gn` or `ln`. Words end at digits, capitals and other characters:
        `LayerNorm_0`, `bn2` and `ln_f` match, `normal_head` does not.

    Examples:
        >>> import jax
        >>> import jmp_amp as amp
        >>> params = {"LayerNorm_0": {"scale": 1.0}, "ln_f": 1.0, "normal_head": 1.0}
        >>> jax.tree.leaves(jax.tree_util.tree_map_with_path(amp.is_norm, params))
        [True, True, False]
    """
    words = (word.lower() for key in path for word in _WORD.findall(keystr((key,), simple=True)))
    return any(map(_NORM.fullmatch, words))


def cast_params(params: T, policy: Policy | str, *, keep: Callable[[tuple[Any, ...], Any], bool] = is_norm) -> T:
    """Casts parameters to the `param_dtype` of a policy, except those of normalization layers.

    The statistics and scales of norms need a wider range than float16 has, and they are few, so apex's O2 also keeps
    them in float32. Train the result with `low_precision_params`.

    Args:
        params: any tree. Floating JAX and numpy arrays are cast; all other leaves are returned unchanged.
        policy: a policy, or a string that `get_policy` accepts: `"O2"`, `"p=bf16"`.
        keep: `keep(path, leaf)` is True for leaves that are returned unchanged. Pass it if your norms have other
            names, or if the tree has no names, such as a list of weights.

    Returns:
        A tree of the same structure and shapes.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> params = {"dense": {"w": jnp.ones((2, 2))}, "norm": {"scale": jnp.ones(2)}}
        >>> jax.tree.map(lambda x: str(x.dtype), amp.cast_params(params, "O2"))
        {'dense': {'w': 'float16'}, 'norm': {'scale': 'float32'}}

    References:
        `keep_batchnorm_fp32` of apex's `amp.initialize`.
    """
    dtype = get_policy(policy).param_dtype
    return jax.tree_util.tree_map_with_path(lambda path, x: x if keep(path, x) else cast_floating(x, dtype), params)


@with_inner_state
class LowPrecisionParamsState(NamedTuple):
    """State of `low_precision_params`.

    Attributes:
        masters: float32 copies of the parameters whose dtype is narrower than float32; `optax.MaskedNode` in place of
            all other parameters, which need no copy. None with `masters=False`. A class that refuses such leaves is
            replaced by a node with the same paths. The state of `remainder=True` has `remainders` in this place, the
            lower 16 bits of the copies for bfloat16 parameters, as uint16; there `masters` reads the same.
        step: int32[], the number of steps so far. `seed` and `step` determine the random bits of the next step. None
            unless `rounding="stochastic"`.
        inner_state: the state of the wrapped transformation, initialized with float32 parameters.

    Examples:
        >>> import jax.numpy as jnp, optax
        >>> import jmp_amp as amp
        >>> state = amp.low_precision_params(optax.sgd(0.1)).init({"w": jnp.ones(2, jnp.float16)})
        >>> state.masters["w"].dtype
        dtype('float32')
    """

    masters: Any
    step: jax.Array | None
    inner_state: optax.OptState

    def with_float32(self, params: optax.Params) -> "LowPrecisionParamsState":
        """Returns the state with float32 masters in place of remainders, for a run with `remainder=False`."""
        pairs = zip(_flatten(params)[0], _flatten(self.masters)[0], strict=True)
        masters = [m if is_frozen(m) else _master(p, m) for p, m in pairs]
        return LowPrecisionParamsState(jx.with_leaves(params, masters, is_frozen), self.step, self.inner_state)

    def with_remainders(self, params: optax.Params) -> tuple[optax.Params, "RemaindersState"]:
        """Returns parameters and state for a run with `remainder=True`; these are the same masters, bit for bit.

        A bfloat16 parameter whose master is halfway between two numbers may become the other one.
        """
        leaves, tree = _flatten(params)
        upper, lower = _split(leaves, _flatten(self.masters)[0])
        moved = tree.unflatten([x if _is_bfloat16(p) else p for p, x in zip(leaves, upper, strict=True)])
        return moved, RemaindersState(jx.with_leaves(params, lower, is_frozen), self.step, self.inner_state)


@with_inner_state
class RemaindersState(NamedTuple):
    """State of `low_precision_params(remainder=True)`: a checkpoint of it is none of float32 masters, nor the reverse.

    Attributes:
        remainders: as `masters` of `LowPrecisionParamsState`, with uint16 for bfloat16 parameters.
        step: None.
        inner_state: as in `LowPrecisionParamsState`.
    """

    remainders: Any
    step: jax.Array | None
    inner_state: optax.OptState

    @property
    def masters(self) -> Any:
        """The remainders."""
        return self.remainders

    def with_float32(self, params: optax.Params) -> LowPrecisionParamsState:
        """Returns the state with float32 masters in place of remainders, for a run with `remainder=False`."""
        return LowPrecisionParamsState(*self).with_float32(params)


def low_precision_params(
    inner: optax.GradientTransformation,
    *,
    masters: bool = True,
    remainder: bool = False,
    rounding: str = "nearest",
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    """Wraps a transformation so that it updates float16 or bfloat16 parameters in float32.

    Use it when the parameters of the model themselves are low precision. `inner` receives float32 gradients and
    parameters, and keeps its state in float32. The new parameters are rounded to their dtype:

    - With masters, which is the default, the optimizer state holds float32 copies of the parameters, the master
      weights. `inner` receives and updates these, and the new parameters are the new masters, rounded to nearest.
      Updates that are too small for the dtype accumulate in the masters.
    - `remainder=True` saves 2 bytes for each bfloat16 parameter, and trains the same masters: their upper 16 bits are
      the parameter, so the state holds the lower 16 bits only. The parameter is rounded to nearest, and away from 0
      halfway between two numbers, so that both together are the master, bit for bit. If one step shrinks a parameter
      more than 32768-fold, the master becomes the parameter, an error of 2**-24 times the old one.
    - `masters=False` saves 4 bytes for each parameter. `inner` receives the parameters themselves, cast to float32.
      Rounding to nearest loses updates of less than half a unit in the last place.
    - `masters=False, rounding="stochastic"` rounds up or down at random, to each of the two neighbours with a
      probability proportional to the distance from the other one, so updates are exact on average. Values that the
      dtype can represent do not change.

    A finite value beyond the largest finite number of the dtype (65504 for float16) becomes that number, and an
    infinite value becomes infinite. `inner` receives parameters of float32 and wider dtypes unchanged.

    The returned updates are float32: the difference between the new and the old parameter. Hence
    `optax.apply_updates` returns exactly the rounded values. If one step shrinks a float16 parameter more than
    8192-fold (bfloat16: 65536-fold), the new parameter can differ from its rounded value by 2**-24 times the old
    parameter; with masters, the next step corrects it.

    With masters, if you modify the model's parameters yourself, the next step overwrites them with the masters. Replace
    an infinite or NaN parameter by a finite number first, because `optax.apply_updates` adds.

    A parameter is frozen if its gradient is None or `optax.MaskedNode`: `inner` receives that placeholder, the
    updates contain it, and the master does not change.

    Inside `shard_map` all devices draw the same random bits, so replicas stay equal. Backends that flush subnormal
    float32 values to zero, such as CPUs, also flush bfloat16 parameters and updates below 1.2e-38: without masters, a
    parameter below 1.5e-36 cannot change by one unit in the last place there.

    Args:
        inner: any optax transformation.
        masters: whether the optimizer state holds float32 copies of the low-precision parameters.
        remainder: whether it holds their lower 16 bits only, for bfloat16 parameters.
        rounding: `"nearest"`, or, without masters, `"stochastic"`.
        seed: seeds the random bits of stochastic rounding.

    Returns:
        An optax transformation whose `update` needs `params`. Wrap it in `dynamic_loss_scale`:
        `dynamic_loss_scale(low_precision_params(optax.adamw(1e-3)))`.

    Raises:
        TypeError: `inner` is not an optax transformation.
        ValueError: `rounding` is unknown, or `"stochastic"` with masters; `remainder` without masters; or `update` is
            called without `params`.

    Examples:
        >>> import jax.numpy as jnp, optax
        >>> import jmp_amp as amp
        >>> tx = amp.low_precision_params(optax.sgd(1e-4))
        >>> params = {"w": jnp.ones(2, jnp.float16)}
        >>> state = tx.init(params)
        >>> for _ in range(10):  # float16 has no number between 1 - 2**-11 and 1
        ...     updates, state = tx.update({"w": jnp.ones(2, jnp.float16)}, state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> print(params["w"], state.masters["w"])
        [0.999 0.999] [0.99899983 0.99899983]
        >>> params = {"w": jnp.ones(1000, jnp.bfloat16)}
        >>> for rounding in ("nearest", "stochastic"):  # bfloat16 has no number between 1 - 2**-8 and 1
        ...     tx = amp.low_precision_params(optax.sgd(2.0**-10), masters=False, rounding=rounding)
        ...     updates, _ = tx.update({"w": jnp.ones(1000)}, tx.init(params), params)
        ...     print(bool((optax.apply_updates(params, updates)["w"] < 1).any()))
        False
        True

    References:
        Micikevicius et al., [Mixed Precision Training](https://arxiv.org/abs/1710.03740), 2018, section 3.1, and apex's
        O2 have masters; apex's O3 has none. Remainders: `store_param_remainders` of apex's `DistributedFusedAdam`.
        Stochastic rounding: Gupta et al., [Deep Learning with Limited Numerical
        Precision](https://arxiv.org/abs/1502.02551), 2015.
    """
    check_inner(inner, "low_precision_params")
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f'`rounding` must be "nearest" or "stochastic", got {quote(rounding)}')
    if masters and rounding == "stochastic":
        raise ValueError(
            'masters hold each update in full, so parameters are rounded to nearest, got `rounding="stochastic"`; '
            "write `masters=False` to keep no masters"
        )
    if remainder and not masters:
        raise ValueError("`remainder=True` stores masters in 16 bits, got `masters=False`; leave one of them out")
    inner, make_state = optax.with_extra_args_support(inner), RemaindersState if remainder else LowPrecisionParamsState

    def init(params: optax.Params) -> LowPrecisionParamsState | RemaindersState:
        full = _upcast(params)
        leaves, stored = _flatten(params)[0], _flatten(full)[0]
        stored = _split(leaves, stored)[1] if remainder else stored
        held = jx.with_leaves(params, _masters(leaves, stored), is_frozen) if masters else None
        step = jnp.zeros((), jnp.int32) if rounding == "stochastic" else None
        return make_state(held, step, inner.init(full))

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, LowPrecisionParamsState | RemaindersState]:
        if params is None:
            raise ValueError("`low_precision_params` needs the parameters: call `tx.update(grads, opt_state, params)`")
        # Lists, because a class of the user may take no keys or halves of masters as its leaves.
        grads, tree = _flatten(updates)
        parts = [_flatten(part)[0] for part in tree.flatten_up_to(params)]  # a frozen part may have several leaves
        leaves = [g if is_frozen(g) else part[0] for g, part in zip(grads, parts, strict=True)]
        full = _upcast(leaves)
        if masters:
            masters_before, tree_of_masters = _flatten(state.masters)
            rest = iter(masters_before)
            held = [[next(rest) for _ in part] for part in parts]
            if isinstance(state, RemaindersState):
                _check_remainders(leaves, held)
            full = [_master(p, m[0]) if _is_low_precision(p) else p for p, m in zip(leaves, held, strict=True)]
        full_params = tree.unflatten(full)
        full_updates, inner_state = inner.update(_upcast(updates), state.inner_state, full_params, **extra_args)
        new_full = tree.flatten_up_to(optax.apply_updates(full_params, full_updates))
        full_updates = tree.flatten_up_to(full_updates)
        keys, step = [], state.step
        if step is not None:
            keys = [optax.tree.split_key_like(jax.random.fold_in(jax.random.key(seed), step), new_full)]
            step = optax.safe_increment(step)
        nearest, stored = _split(leaves, new_full) if remainder else (new_full, new_full)
        new_updates = jax.tree.map(_rounded_update, leaves, nearest, full_updates, *keys)
        new_masters = None
        if masters:
            stored = _masters(leaves, jax.tree.map(_reached, leaves, new_updates, nearest, stored))
            held = [old if is_frozen(g) else [new] for g, old, new in zip(grads, held, stored, strict=True)]
            new_masters = tree_of_masters.unflatten([x for part in held for x in part])
        return tree.unflatten(new_updates), make_state(new_masters, step, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _check_remainders(params: Sequence[Any], held: Sequence[Sequence[Any]]) -> None:
    wrong = {str(m[0].dtype) for p, m in zip(params, held, strict=True) if _is_bfloat16(p) and m[0].dtype != jnp.uint16}
    if wrong:
        raise ValueError(
            f"remainders of bfloat16 parameters are uint16, got {', '.join(wrong)}; restore a checkpoint in the form "
            "that it was saved in, and convert it by `with_float32` or `with_remainders`"
        )


def _rounded_update(param: Any, full: Any, full_update: Any, key: Any = None) -> Any:
    """Returns the float32 difference between the rounded new parameter and the old one.

    Args:
        param: the old parameter.
        full: the new parameter, in float32 if `param` is low precision.
        full_update: the update of the inner transformation, which is returned for parameters of float32 and wider.
        key: a PRNG key rounds stochastically, None to nearest.
    """
    if not _is_low_precision(param):
        return full_update
    new = round_to_nearest(full, param.dtype) if key is None else round_stochastically(full, param.dtype, key)
    # No finite update can make an infinite parameter finite, but adding -inf would turn it into NaN.
    old = jnp.where(jnp.isfinite(param), _upcast(param), 0)
    # The difference of equal values must be -0: adding +0 would turn a parameter of -0 into +0.
    return -(old - _upcast(new))


def _halves(master: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns float32 values as bfloat16 parameters and uint16 remainders; `_master` joins them again, bit for bit.

    Rounding halfway values to even would lose which of two values it was. Rounded away from 0, a value went up if and
    only if its remainder is 2**15 or more. Values that would go up to infinity become the largest one that does not.
    """
    bits = jax.lax.bitcast_convert_type(master, jnp.uint32)
    bits = jnp.where(jnp.isnan(master), jnp.uint32(0x7FC00000), bits)  # others could round to infinity
    magnitude, sign = bits & 0x7FFFFFFF, bits >> 31 << 31
    bits = sign | jnp.where(magnitude < 0x7F800000, jnp.minimum(magnitude, 0x7F7F7FFF), magnitude)
    upper = (bits + 0x8000 >> 16).astype(jnp.uint16)
    return jax.lax.bitcast_convert_type(upper, jnp.bfloat16), bits.astype(jnp.uint16)


def _master(param: jax.Array, stored: jax.Array) -> jax.Array:
    """Returns a float32 master, from its two halves if they are stored so."""
    if stored.dtype != jnp.uint16:
        return stored
    upper, lower = (jax.lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) for x in (param, stored))
    went_up = (lower >= 0x8000) & (upper & 0x7FFF > 0)  # a parameter that the user has set to 0 did not
    return jax.lax.bitcast_convert_type((upper - went_up.astype(jnp.uint32) << 16) + lower, jnp.float32)


def _split(params: Sequence[Any], masters: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Returns the upper and the lower halves of the masters of bfloat16 parameters, and other masters twice."""
    pairs = zip(params, masters, strict=True)
    halves = [_halves(master) if _is_bfloat16(param) else (master, master) for param, master in pairs]
    return [upper for upper, _ in halves], [lower for _, lower in halves]


def _reached(param: jax.Array, update: jax.Array, upper: jax.Array, lower: jax.Array) -> jax.Array:
    """Returns the lower half of a master; 0 if the update, in float32, does not lead to the parameter beside it."""
    if lower.dtype != jnp.uint16:
        return lower
    reached = (_upcast(param) + update).astype(param.dtype)  # as `optax.apply_updates` adds
    new, wanted = (jax.lax.bitcast_convert_type(x, jnp.uint16) for x in (reached, upper))
    return jnp.where(new == wanted, lower, jnp.uint16(0))


def _masters(params: Any, full: Any) -> Any:
    """Returns the leaves of `full` whose parameter is low precision, and `optax.MaskedNode` for the others."""
    return jax.tree.map(lambda p, x: x if _is_low_precision(p) else optax.MaskedNode(), params, full)


def _flatten(tree: Any) -> tuple[list[Any], Any]:
    """Returns the leaves of a tree, with what takes the place of frozen ones, and its structure."""
    return jax.tree.flatten(tree, is_leaf=is_frozen)


def _upcast(tree: Any) -> Any:
    """Casts the low-precision leaves of a tree to float32."""
    return jax.tree.map(lambda x: x.astype(jnp.float32) if _is_low_precision(x) else x, tree)


def _is_bfloat16(x: Any) -> bool:
    return is_inexact(x) and jnp.result_type(x) == jnp.bfloat16


def _is_low_precision(x: Any) -> bool:
    """Whether a leaf is floating, with a dtype narrower than float32."""
    return is_inexact(x) and wide_dtype(jnp.result_type(x)) != jnp.result_type(x)


def round_to_nearest(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Rounds to the nearest number of `dtype`; finite values beyond its largest finite number become that number.

    Examples:
        >>> print(round_to_nearest(jnp.float32([0.1, 1e5, jnp.inf]), jnp.float16))
        [1.00e-01 6.55e+04      inf]
    """
    return _saturate(x, dtype).astype(dtype)


def round_stochastically(x: jax.Array, dtype: DTypeLike, key: jax.Array) -> jax.Array:
    """Rounds to one of the two neighbours in `dtype` at random, so that the expected result is the exact value.

    The probability of each neighbour is proportional to the distance from the other one, exact to 2**-31. Values that
    `dtype` can represent, infinities and NaN do not change. Finite values beyond the largest finite number of `dtype`
    become that number.

    Args:
        x: float32 array of any shape.
        dtype: float16 or bfloat16.
        key: a PRNG key for the random bits, 32 for each value.

    Returns:
        An array of `dtype`, with the shape of `x`.

    Examples:
        >>> rounded = round_stochastically(jnp.full(1000, 1 + 2.0**-10), jnp.bfloat16, jax.random.key(0))
        >>> print(rounded.min(), rounded.max())
        1 1.00781
    """
    info = jnp.finfo(dtype)
    x = _saturate(x, dtype)
    # Integer arithmetic throughout, because many backends flush subnormal float32 values to zero, and the subnormals of
    # bfloat16 are among them.
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    biased_exponent, fraction = bits >> 23 & 0xFF, bits & 0x7FFFFF
    significand = jnp.where(biased_exponent > 0, fraction | 1 << 23, fraction)
    # Binade 0 starts at the smallest normal number of `dtype`, so the binades of its subnormals are negative.
    binade = jnp.maximum(biased_exponent, 1).astype(jnp.int32) - (127 + info.minexp)
    dropped = (23 - info.nmant + jnp.maximum(-binade, 0)).astype(jnp.uint32)
    # Far below the smallest number of `dtype`, only the first 31 dropped bits affect the result.
    significand >>= jnp.clip(dropped, 31, 62) - 31
    dropped = jnp.minimum(dropped, 31)
    noise = jax.random.bits(key, x.shape, jnp.uint32) >> 32 - dropped
    # A carry out of the significand increments the exponent, which is correct: the value reached the next binade.
    magnitude = (jnp.maximum(binade, 0).astype(jnp.uint32) << info.nmant) + (significand + noise >> dropped)
    rounded = (bits >> 31 << info.bits - 1 | magnitude).astype(jnp.uint16)
    return jnp.where(jnp.isfinite(x), jax.lax.bitcast_convert_type(rounded, dtype), x.astype(dtype))


def _saturate(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    largest = float(jnp.finfo(dtype).max)
    return jnp.where(jnp.isfinite(x) & (jnp.abs(x) > largest), jnp.copysign(largest, x), x)
