"""The rule by which a loss scale adapts, its state, and the numbers that it takes."""

import contextlib
import dataclasses
import math
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.ad_checkpoint import checkpoint_name

from jmp_amp import _jaxpr as jx
from jmp_amp._calls import check_type, quote, warn
from jmp_amp._loss_scale._gradients import NEXT_SCALE, UNSCALE, with_overwritten, without_overwritten
from jmp_amp._loss_scale._scaled_grads import SCALE, check_scaled
from jmp_amp._trees import multiply_wide

# Between these bounds, a scale and its reciprocal are normal float32 numbers; devices flush subnormals to zero.
SMALLEST_SCALE = 2.0**-126
LARGEST_SCALE = 2.0**126

NEVER = np.iinfo(np.int32).max  # the hysteresis that is left before a static scale backs off


class LossScaleState(NamedTuple):
    """State of a `LossScale`; every leaf is a strongly typed array.

    Attributes:
        loss_scale: float32[], multiplies the loss of the next step.
        growth_tracker: int32[], finite steps since the last overflow or change of the scale; negative during a delay.
        hysteresis_tracker: int32[], overflows left until the scale backs off; at 0 or 1, the next overflow backs off,
            and at 2^31 - 1, none ever does: the scale is static.
        last_finite: bool[], whether the gradients of the last step were finite; true before the first step.
        notfinite_count: int32[], consecutive steps, up to the last one, whose gradients were not finite.
        total_notfinite: int32[], all steps so far whose gradients were not finite.

    Examples:
        >>> import jmp_amp as amp
        >>> rule = amp.LossScale(growth_interval=2)
        >>> state = rule.update(rule.init(), True)
        >>> state.growth_tracker.item(), state.total_notfinite.item()
        (1, 0)
    """

    loss_scale: jax.Array
    growth_tracker: jax.Array
    hysteresis_tracker: jax.Array
    last_finite: jax.Array
    notfinite_count: jax.Array
    total_notfinite: jax.Array


@dataclasses.dataclass(frozen=True)
class LossScale:
    """The rule by which a loss scale adapts.

    A step is finite if all its gradients are finite; otherwise it is an overflow. A finite step adds one to the growth
    tracker. When the tracker reaches `growth_interval`, the scale is multiplied by `growth_factor`, unless the result
    would exceed `max_scale`, and the tracker is reset. An overflow resets the tracker and uses up one unit of
    hysteresis. When no hysteresis is left, the scale is multiplied by `backoff_factor` and clamped to `min_scale`.

    The scale is never 0, `inf` or NaN; if a restored state holds such a scale, the next step replaces it by
    `init_scale`. If `min_scale` equals `max_scale`, the scale never changes, even if `set_loss_scale` has set it to
    another value. The arithmetic is float32, and exact for powers of two.

    A `LossScale` is configuration: frozen, hashable and never part of a pytree. Its state is a `LossScaleState`.

    Args:
        init_scale: multiplies the loss of the first step.
        growth_factor: multiplies the scale after `growth_interval` finite steps; greater than 1.
        backoff_factor: multiplies the scale on overflow; between 0 and 1.
        growth_interval: number of finite steps between growths.
        min_scale: lower bound of the scale; at least 2^-126, the smallest normal float32.
        max_scale: upper bound of the scale; at most 2^126, the largest power of two with a normal float32 reciprocal.
        hysteresis: the scale backs off at this overflow and at the ones after it; earlier overflows are only skipped.
        consecutive_hysteresis: refill the hysteresis at every finite step, so that only consecutive overflows count.
            By default, the hysteresis is refilled when the scale grows.
        overflow_delay: number of finite steps that do not count towards growth at the start and after an overflow.
        growth_delay: number of finite steps that do not count towards the next growth after a growth.
        clamp_growth: set the scale to `max_scale` if a growth would exceed it. By default, the scale does not grow.

    Raises:
        TypeError: a value is not a number, or a number of steps is not an integer.
        ValueError: a value is out of range; the message names it.

    Examples:
        >>> import jmp_amp as amp
        >>> rule = amp.LossScale(init_scale=4.0, growth_interval=2)
        >>> state = rule.init()
        >>> for finite in (True, True, False):
        ...     state = rule.update(state, finite)
        ...     print(float(state.loss_scale), int(state.growth_tracker))
        4.0 1
        8.0 0
        4.0 0

    References:
        Micikevicius et al., [Mixed Precision Training](https://arxiv.org/abs/1710.03740), 2018. The defaults are those
        of torch's `GradScaler`, with the upper bound of apex, 2^24, and the lower bound of DeepSpeed, 1.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 1.0
    max_scale: float = 2.0**24
    hysteresis: int = 1
    consecutive_hysteresis: bool = False
    overflow_delay: int = 0
    growth_delay: int = 0
    clamp_growth: bool = False

    def __post_init__(self) -> None:
        for name in ("init_scale", "growth_factor", "backoff_factor", "min_scale", "max_scale"):
            object.__setattr__(self, name, to_number(name, getattr(self, name)))
        for name, minimum in {"growth_interval": 1, "hysteresis": 1, "overflow_delay": 0, "growth_delay": 0}.items():
            object.__setattr__(self, name, to_count(name, getattr(self, name), minimum))
        for name, number in {"consecutive_hysteresis": "hysteresis", "clamp_growth": "max_scale"}.items():
            check_type(name, getattr(self, name), bool, f"pass a number as `{number}`")
        if self.growth_factor <= 1:
            raise ValueError(f"`growth_factor` must be greater than 1, got {self.growth_factor}")
        if self.backoff_factor >= 1:
            raise ValueError(f"`backoff_factor` must be less than 1, got {self.backoff_factor}")
        if not self.min_scale <= self.init_scale <= self.max_scale:
            raise ValueError(
                "a loss scale requires min_scale <= init_scale <= max_scale, got "
                f"min_scale={self.min_scale}, init_scale={self.init_scale}, max_scale={self.max_scale}"
            )

    @property
    def is_static(self) -> bool:
        """Whether the scale never changes, because `min_scale` equals `max_scale`."""
        return self.min_scale == self.max_scale

    def init(self) -> LossScaleState:
        """Returns the state before the first step."""
        return LossScaleState(
            loss_scale=checkpoint_name(jnp.asarray(self.init_scale, jnp.float32), SCALE),  # does nothing
            growth_tracker=jnp.asarray(-self.overflow_delay, jnp.int32),
            hysteresis_tracker=jnp.asarray(NEVER if self.is_static else self.hysteresis, jnp.int32),
            last_finite=jnp.asarray(True),
            notfinite_count=jnp.asarray(0, jnp.int32),
            total_notfinite=jnp.asarray(0, jnp.int32),
        )

    def scale(self, state: LossScaleState, tree: Any) -> Any:
        """Returns a loss, or a tree of losses, multiplied by the scale.

        Low-precision leaves are cast to float32 before the multiplication: a float16 loss of 1 times 2^16 is `inf`.

        Args:
            state: holds the scale.
            tree: arrays of any shape; leaves that are neither floating nor complex pass through.

        Returns:
            The scaled tree in float32; wider leaves keep their dtype.
        """
        warn_if_constant(state, tree)
        return multiply_wide(tree, state.loss_scale)

    def unscale(self, state: LossScaleState, tree: Any, *, implementation: str | None = None) -> tuple[Any, jax.Array]:
        """Returns unscaled gradients, and whether all of them are finite.

        The check applies to the unscaled gradients, so it also detects gradients that overflow while they are unscaled.

        Args:
            state: holds the scale that multiplied the loss.
            tree: gradients of any shape; leaves that are neither floating nor complex pass through.
            implementation: the implementation of both, as in `pallas_kernels.unscale_check`.

        Returns:
            The unscaled tree in float32 (wider leaves keep their dtype), and bool[], whether every leaf is finite.
        """
        from pallas_kernels import unscale_check

        scale = checked_scale(state, tree, None, "move it behind `LossScale.unscale`", self, may_be="number")
        leaves, factor = without_overwritten(tree), 1 / scale
        with jx.marked(UNSCALE):
            unscaled_grads, is_finite, _ = unscale_check(leaves, factor, implementation=implementation)
        return with_overwritten(tree, unscaled_grads), is_finite

    def update(self, state: LossScaleState, finite: jax.typing.ArrayLike) -> LossScaleState:
        """Returns the state for the next step.

        Args:
            state: holds the scale of this step.
            finite: bool[], whether the gradients of this step were finite; must be the same on every device.

        Raises:
            TypeError: `state` is not a `LossScaleState`, or `finite` is not a bool.
        """
        check_type("state", state, LossScaleState, "`dynamic_loss_scale` holds it as `opt_state.loss_scale`")
        is_finite = to_flag("finite", finite)
        tracker = optax.safe_increment(state.growth_tracker)
        grows = is_finite & (tracker >= self.growth_interval)
        hysteresis = jnp.minimum(state.hysteresis_tracker, self.hysteresis)  # another rule may have allowed more
        overflows_left = jnp.maximum(hysteresis - 1, 0)
        refills = grows | (is_finite & self.consecutive_hysteresis)
        hysteresis = jnp.where(is_finite, jnp.where(refills, self.hysteresis, hysteresis), overflows_left)
        scale = state.loss_scale
        if not self.is_static:
            grown, ceiling = scale * self.growth_factor, jnp.maximum(scale, self.max_scale)
            grown = jnp.where(grown <= self.max_scale, grown, ceiling if self.clamp_growth else scale)
            backed_off = jnp.maximum(scale * self.backoff_factor, self.min_scale)
            after_overflow = jnp.where(overflows_left == 0, backed_off, scale)
            with jx.marked(NEXT_SCALE):
                scale = jnp.where(is_finite, jnp.where(grows, grown, scale), after_overflow)
        return LossScaleState(
            loss_scale=jnp.where(is_scale(state.loss_scale), scale, self.init_scale),
            growth_tracker=jnp.where(is_finite, jnp.where(grows, -self.growth_delay, tracker), -self.overflow_delay),
            hysteresis_tracker=jnp.full_like(hysteresis, NEVER) if self.is_static else hysteresis,
            last_finite=is_finite,
            notfinite_count=jnp.where(is_finite, 0, optax.safe_increment(state.notfinite_count)),
            total_notfinite=jnp.where(is_finite, state.total_notfinite, optax.safe_increment(state.total_notfinite)),
        )

    @classmethod
    def static(cls, scale: float) -> Self:
        """A constant scale; overflows are still detected and skipped."""
        return cls(init_scale=scale, min_scale=scale, max_scale=scale)

    @classmethod
    def none(cls) -> Self:
        """No scaling, for bfloat16 and float32; overflows are still detected and skipped."""
        return cls.static(1.0)

    @classmethod
    def torch(cls, **overrides: Any) -> Self:
        """The rule of `torch.amp.GradScaler`."""
        return cls(**{"min_scale": SMALLEST_SCALE, "max_scale": LARGEST_SCALE} | overrides)

    @classmethod
    def apex(cls, **overrides: Any) -> Self:
        """The rule of apex's `amp.LossScaler`: torch's rule, clamped to at most 2^24."""
        return cls(**{"min_scale": SMALLEST_SCALE, "clamp_growth": True} | overrides)

    @classmethod
    def deepspeed(cls, **overrides: Any) -> Self:
        """The rule of DeepSpeed's ZeRO `DynamicLossScaler`.

        It tolerates one overflow between growths. The first growth after the start or an overflow takes one step more
        than later growths.
        """
        preset = {"growth_interval": 1000, "max_scale": LARGEST_SCALE, "hysteresis": 2, "overflow_delay": 1}
        return cls(**preset | overrides)

    @classmethod
    def deepspeed_consecutive(cls, **overrides: Any) -> Self:
        """DeepSpeed's rule with `consecutive_hysteresis`: only consecutive overflows use up hysteresis."""
        return cls.deepspeed(**{"consecutive_hysteresis": True} | overrides)

    @classmethod
    def megatron(cls, **overrides: Any) -> Self:
        """The rule of Megatron-LM's `DynamicGradScaler`."""
        preset = {"init_scale": 2.0**32, "growth_interval": 1000, "max_scale": LARGEST_SCALE, "hysteresis": 2}
        return cls(**preset | overrides)

    @classmethod
    def keras(cls, **overrides: Any) -> Self:
        """The rule of Keras' `LossScaleOptimizer`."""
        return cls.torch(**{"init_scale": 2.0**15} | overrides)

    @classmethod
    def flax(cls, **overrides: Any) -> Self:
        """The rule of flax's `DynamicScale`, which grows at every (growth_interval + 1)-th finite step."""
        return cls.torch(**{"overflow_delay": 1, "growth_delay": 1} | overrides)

    @classmethod
    def jmp(cls, **overrides: Any) -> Self:
        """The rule of jmp's `DynamicLossScale`, with an initial scale of 2^15; jmp has no default."""
        return cls(**{"init_scale": 2.0**15, "max_scale": LARGEST_SCALE} | overrides)


def check_rule(value: Any) -> None:
    """Raises TypeError unless `value` is a `LossScale`; apex's `loss_scale` is `"dynamic"` or a number."""
    cure = "pass `LossScale.static(scale)` for a fixed scale, or `LossScale.none()` for no scaling"
    if isinstance(value, str | int | float):
        with contextlib.suppress(ValueError):
            cure = f"pass `LossScale.static({float(value)})` for a fixed scale, or leave it out for a dynamic one"
        if value == "dynamic":
            cure = "leave it out, or pass `LossScale.apex()`, apex's rule: a `LossScale` is dynamic unless it is static"
    check_type("loss_scale", value, LossScale, cure)


def is_scale(value: Any) -> Any:
    """Whether a float32 number and its reciprocal, or each of an array, are positive and normal."""
    return (value >= SMALLEST_SCALE) & (value <= LARGEST_SCALE)


def is_concrete(value: Any) -> bool:
    """Whether the host can read a number or an array; a traced one is data, so it is not checked."""
    return not isinstance(value, jax.core.Tracer) and getattr(value, "is_fully_addressable", True)


def warn_if_constant(source: Any, traced: Any) -> None:
    """Warns if `jax.jit` compiles a program here in which the scale of a state is a constant.

    Args:
        source: a `LossScaleState`, or a scale; a number, or the scale of a static rule, is meant to be constant.
        traced: what the scale multiplies or divides, or is to be computed from these.
    """
    scale = source.loss_scale if isinstance(source, LossScaleState) else source
    if isinstance(scale, jax.core.Tracer) or not isinstance(scale, jax.Array | np.ndarray):
        return
    if not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(traced)) or not jx.versions.is_compiled():
        return
    if not (isinstance(source, LossScaleState) and np.all(np.asarray(source.hysteresis_tracker) == NEVER)):
        warn(
            "`jax.jit` compiles the loss scale of a state as a constant here, so it will not follow the state, and "
            "gradients will be wrong by a factor; make the state an argument of the jitted function, "
            "`step = jax.jit(lambda opt_state, *args: amp.value_and_grad(fun, opt_state=opt_state)(*args))`, or pass a "
            "scale that never changes as a Python number"
        )


def checked_scale(source: Any, grads: Any, params: Any, cure: str, rule: Any = None, may_be: str = "") -> jax.Array:
    """Returns the scale that divides gradients, as float32[].

    Raises ValueError, or warns, if they are not those of a loss that was multiplied by it.

    Args:
        source: the `LossScaleState` of `rule`, or, without a rule, the scale.
        grads: the gradients.
        params: as in `check_scaled`, as are `cure` and `may_be`; the scale of a static rule may be a number.
        cure: likewise.
        rule: that of the state.
        may_be: likewise.
    """
    scale = to_scale(source) if rule is None else source.loss_scale
    warn_if_constant(source, grads)
    is_static = rule is not None and rule.is_static
    checked = 1.0 if is_static and rule.init_scale == 1 else source if rule is None else scale
    check_scaled(grads, checked, params, cure, "number" if is_static else may_be)
    return scale


def to_number(name: str, value: Any) -> float:
    """Returns a user's number as a float, and raises ValueError unless `is_scale` holds."""
    try:
        if isinstance(value, bool | np.bool_ | str | bytes):
            raise TypeError
        number = float(value)
    except OverflowError:
        number = math.inf
    except TypeError:
        raise TypeError(f"`{name}` must be a number, got {quote(value)} of type {type(value).__name__}") from None
    if not is_scale(number):
        raise ValueError(
            f"`{name}` must be a number from 2^-126 to 2^126, so that float32 holds its reciprocal, got {quote(value)}"
        )
    return number


def to_count(name: str, value: Any, minimum: int) -> int:
    """Returns `value` as a number of steps that fits in int32."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"`{name}` must be an integer, got {quote(value)} of type {type(value).__name__}")
    if not minimum <= value <= np.iinfo(np.int32).max:
        raise ValueError(f"`{name}` must be an integer from {minimum} to 2^31 - 1, got {quote(value)}")
    return int(value)


def to_scale(value: Any) -> jax.Array:
    """Returns a user's loss scale as float32[]."""
    if type(value) not in (int, float) and getattr(value, "shape", None) != ():
        raise TypeError(
            f"`loss_scale` must be a scalar, got {type(value).__name__}; read it with `amp.get_loss_scale(opt_state)`"
        )
    if is_concrete(value):
        to_number("loss_scale", value)
    return jnp.asarray(value, jnp.float32)


def to_flag(name: str, value: Any) -> jax.Array:
    """Returns a user's flag as bool[]."""
    if getattr(value, "dtype", type(value)) not in (bool, jnp.bool_):
        raise TypeError(f"`{name}` must be a bool, got {quote(value)}; `amp.all_finite(grads)` returns one")
    return jnp.asarray(value)
