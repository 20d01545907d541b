"""The loss scale: a frozen configuration whose methods are pure functions over an immutable state."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import optax

from jmp_amp._loss_scale._arguments import NO_CEILING, NO_FLOOR, to_count, to_flag, to_number
from jmp_amp._loss_scale._deepspeed import arguments
from jmp_amp._loss_scale._unscale import map_wide, unscale_and_look


class LossScaleState(NamedTuple):
    """What a loss scale remembers between steps; every leaf is a strongly typed array.

    Attributes:
        loss_scale: float32[], multiplies the loss of the next step.
        growth_tracker: int32[], clean steps since the scale last changed or an overflow was seen.
        hysteresis_tracker: int32[], overflows that are still tolerated before the scale backs off, this one included.
        last_finite: bool[], whether the gradients of the last step were finite; true before the first.
        notfinite_count: int32[], steps in a row, up to the last one, whose gradients were not finite.
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

    A finite step adds one to the growth tracker; when the tracker reaches `growth_interval`, the scale is multiplied
    by `growth_factor`, unless the result would pass `max_scale`, and the tracker starts again. An overflow resets the
    tracker and uses up one unit of hysteresis; with none left, the scale is multiplied by `backoff_factor`, though
    never to less than `min_scale`. The scale is therefore never 0, `inf` or NaN; where a state from elsewhere holds
    such a scale, the next one is `init_scale`. With `min_scale` equal to `max_scale` the scale never moves, wherever it
    was set. All arithmetic is float32; with powers of two it is exact.

    The object is configuration: frozen, hashable, never part of a pytree. What changes is in `LossScaleState`.

    Args:
        init_scale: multiplies the loss of the first step.
        growth_factor: multiplies the scale after `growth_interval` clean steps; greater than 1.
        backoff_factor: multiplies the scale on overflow; between 0 and 1.
        growth_interval: clean steps between growths.
        min_scale: the scale never falls below it; at least 2^-126, the smallest normal float32.
        max_scale: the scale never grows above it; at most 2^126, whose reciprocal float32 still holds.
        hysteresis: the scale backs off from this overflow on; the ones before are skipped at the same scale.
        consecutive_hysteresis: refill the hysteresis at every clean step, so that only overflows in a row count;
            otherwise it is refilled when the scale grows.
        overflow_delay: clean steps that are not counted after an overflow, and at the start.
        growth_delay: clean steps that are not counted after a growth.
        clamp_growth: a growth that would pass `max_scale` ends there, instead of not taking place.

    Raises:
        TypeError: a value is not a number, or not an integer where steps are counted.
        ValueError: a value is out of its range; the message names it.

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
        of torch's `GradScaler` with apex's ceiling of 2^24 and DeepSpeed's floor of 1.
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
        for name, least in _COUNTS.items():
            object.__setattr__(self, name, to_count(name, getattr(self, name), least))
        for name, cure in _FLAGS.items():
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"`{name}` must be a bool, got {getattr(self, name)!r}; {cure}")
        if self.growth_factor <= 1:
            raise ValueError(f"`growth_factor` must be greater than 1, got {self.growth_factor}")
        if self.backoff_factor >= 1:
            raise ValueError(f"`backoff_factor` must be less than 1, got {self.backoff_factor}")
        if not self.min_scale <= self.init_scale <= self.max_scale:
            raise ValueError(
                "a loss scale needs min_scale <= init_scale <= max_scale, got "
                f"min_scale={self.min_scale}, init_scale={self.init_scale}, max_scale={self.max_scale}"
            )

    @property
    def is_static(self) -> bool:
        """Whether the scale never moves: `min_scale` is `max_scale`."""
        return self.min_scale == self.max_scale

    def init(self) -> LossScaleState:
        """Returns the state before the first step."""
        return LossScaleState(
            loss_scale=jnp.asarray(self.init_scale, jnp.float32),
            growth_tracker=jnp.asarray(-self.overflow_delay, jnp.int32),
            hysteresis_tracker=jnp.asarray(self.hysteresis, jnp.int32),
            last_finite=jnp.asarray(True),
            notfinite_count=jnp.asarray(0, jnp.int32),
            total_notfinite=jnp.asarray(0, jnp.int32),
        )

    def scale(self, state: LossScaleState, tree: Any) -> Any:
        """Multiplies a loss, or a tree of them, by the scale.

        Low-precision leaves become float32 first: a float16 loss of 1 times 2^16 would be `inf`.

        Args:
            state: the state whose `loss_scale` multiplies.
            tree: arrays of any shape; leaves that are not floating or complex pass through.

        Returns:
            The tree in float32 (wider leaves keep their dtype).
        """
        return map_wide(lambda x: x * state.loss_scale.astype(x.dtype), tree)

    def unscale(self, state: LossScaleState, tree: Any, *, implementation: str | None = None) -> tuple[Any, jax.Array]:
        """Divides gradients by the scale that made them, and checks the result.

        The check follows the division, so gradients that only overflow when they are unscaled are seen too.

        Args:
            state: the state whose `loss_scale` scaled the loss.
            tree: gradients of any shape; leaves that are not floating or complex pass through.
            implementation: what reads and writes them, see `pallas_kernels.unscale_check`.

        Returns:
            The tree in float32 (wider leaves keep their dtype), and bool[], whether all of it is finite.
        """
        return unscale_and_look(tree, 1 / state.loss_scale, implementation)

    def update(self, state: LossScaleState, finite: jax.typing.ArrayLike) -> LossScaleState:
        """Moves the state on by one step.

        Args:
            state: the state that scaled this step.
            finite: bool[], whether the step's gradients were finite, the same on every device.

        Returns:
            The state for the next step.

        Raises:
            TypeError: `state` is no `LossScaleState`, or `finite` no bool.
        """
        if not isinstance(state, LossScaleState):
            raise TypeError(
                f"`state` must be a `LossScaleState`, got {type(state).__name__}; "
                "in the state of `dynamic_loss_scale` it is `opt_state.loss_scale`"
            )
        finite = to_flag("finite", finite)
        tracker = optax.safe_increment(state.growth_tracker)
        grow = finite & (tracker >= self.growth_interval)
        tolerated = jnp.maximum(state.hysteresis_tracker - 1, 0)
        refill = grow | (finite & self.consecutive_hysteresis)

        grown = state.loss_scale * self.growth_factor
        most = jnp.maximum(state.loss_scale, self.max_scale) if self.clamp_growth else state.loss_scale
        grown = jnp.where(grown <= self.max_scale, grown, most)
        backed_off = jnp.maximum(state.loss_scale * self.backoff_factor, self.min_scale)
        overflowed = jnp.where(tolerated == 0, backed_off, state.loss_scale)
        scale = jnp.where(finite, jnp.where(grow, grown, state.loss_scale), overflowed)
        scale = state.loss_scale if self.is_static else scale
        is_scale = (state.loss_scale >= NO_FLOOR) & (state.loss_scale <= NO_CEILING)
        return LossScaleState(
            loss_scale=jnp.where(is_scale, scale, self.init_scale),
            growth_tracker=jnp.where(finite, jnp.where(grow, -self.growth_delay, tracker), -self.overflow_delay),
            hysteresis_tracker=jnp.where(
                finite, jnp.where(refill, self.hysteresis, state.hysteresis_tracker), tolerated
            ),
            last_finite=finite,
            notfinite_count=jnp.where(finite, 0, optax.safe_increment(state.notfinite_count)),
            total_notfinite=jnp.where(finite, state.total_notfinite, optax.safe_increment(state.total_notfinite)),
        )

    @classmethod
    def static(cls, scale: float) -> Self:
        """A scale that never moves; overflows are still found and skipped."""
        return cls(init_scale=scale, min_scale=scale, max_scale=scale)

    @classmethod
    def none(cls) -> Self:
        """No scaling, as bfloat16 and float32 need none; overflows are still found and skipped."""
        return cls.static(1.0)

    @classmethod
    def torch(cls, **overrides: Any) -> Self:
        """The rule of `torch.amp.GradScaler`."""
        return cls(**{"min_scale": NO_FLOOR, "max_scale": NO_CEILING} | overrides)

    @classmethod
    def apex(cls, **overrides: Any) -> Self:
        """The rule of apex's `amp.LossScaler`: torch's with a ceiling of 2^24, at which a growth ends."""
        return cls(**{"min_scale": NO_FLOOR, "clamp_growth": True} | overrides)

    @classmethod
    def deepspeed(cls, **overrides: Any) -> Self:
        """The rule of DeepSpeed's ZeRO `DynamicLossScaler`.

        It tolerates one overflow between growths, and the first growth after the start or an overflow takes one step
        more than those that follow.
        """
        theirs = {"growth_interval": 1000, "max_scale": NO_CEILING, "hysteresis": 2, "overflow_delay": 1}
        return cls(**theirs | overrides)

    @classmethod
    def deepspeed_consecutive(cls, **overrides: Any) -> Self:
        """DeepSpeed's rule with `consecutive_hysteresis`: only overflows in a row use the hysteresis up."""
        return cls.deepspeed(**{"consecutive_hysteresis": True} | overrides)

    @classmethod
    def from_deepspeed(cls, config: Mapping[str, Any]) -> Self:
        """The rule that a DeepSpeed config asks for.

        Args:
            config: the whole config, of which the section `fp16` is read: `enabled`, `loss_scale` (0 is dynamic),
                `initial_scale_power`, `loss_scale_window`, `hysteresis`, `consecutive_hysteresis` and `min_loss_scale`,
                with DeepSpeed's defaults, and as DeepSpeed reads them: `"128"` is a number, `16.0` an integer, `"true"`
                a bool, `"auto"` the default (not for `enabled`). What is not used, such as the window of a static
                scale, may be out of range. What `auto_cast` and `fp16_master_weights_and_grads` ask for is not the
                scale's affair. Without the section, or where it is not enabled, nothing is scaled.

        Raises:
            TypeError: the config or its section is no mapping (load a file with `json` first), or a key of the section
                is no string.
            ValueError: the section was passed in place of the config, a name is unknown, or a value is out of its
                range; the message names `fp16.<key>`.

        Examples:
            >>> import jmp_amp as amp
            >>> rule = amp.LossScale.from_deepspeed({"fp16": {"enabled": True, "initial_scale_power": 12}})
            >>> rule == amp.LossScale.deepspeed(init_scale=2.0**12)
            True
        """
        return cls.deepspeed(**arguments(config))

    @classmethod
    def megatron(cls, **overrides: Any) -> Self:
        """The rule of Megatron-LM's `DynamicGradScaler`."""
        theirs = {
            "init_scale": 2.0**32,
            "growth_interval": 1000,
            "max_scale": NO_CEILING,
            "hysteresis": 2,
        }
        return cls(**theirs | overrides)

    @classmethod
    def keras(cls, **overrides: Any) -> Self:
        """The rule of Keras' `LossScaleOptimizer`."""
        return cls.torch(**{"init_scale": 2.0**15} | overrides)

    @classmethod
    def flax(cls, **overrides: Any) -> Self:
        """The rule of flax's `DynamicScale`, which grows on every (growth_interval + 1)-th clean step."""
        return cls.torch(**{"overflow_delay": 1, "growth_delay": 1} | overrides)

    @classmethod
    def jmp(cls, **overrides: Any) -> Self:
        """The rule of jmp's `DynamicLossScale`; jmp leaves the initial scale to the user, here it is 2^15."""
        return cls(**{"init_scale": 2.0**15, "max_scale": NO_CEILING} | overrides)


_FLAGS = {
    "consecutive_hysteresis": "the number of overflows goes into `hysteresis`",
    "clamp_growth": "the ceiling goes into `max_scale`",
}
_COUNTS = {"growth_interval": 1, "hysteresis": 1, "overflow_delay": 0, "growth_delay": 0}
