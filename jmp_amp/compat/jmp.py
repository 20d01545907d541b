"""jmp 0.0.4's public surface: `import jmp_amp.compat.jmp as jmp` runs programs that were written for jmp.

What jmp gets wrong is right here: a floor of `DynamicLossScale` survives `jax.tree.map` and `jit`, low-precision losses
become float32 before they are scaled, and the scale neither falls to 0 nor grows to infinity.
"""

import dataclasses
import functools
import warnings
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jmp_amp._policy import Policy, get_policy
from jmp_amp._tree import all_finite, cast_to_full, cast_to_half, half_dtype, select_tree
from jmp_amp._unscale import map_wide

__all__ = (
    "DynamicLossScale",
    "LossScale",
    "NoOpLossScale",
    "Policy",
    "StaticLossScale",
    "all_finite",
    "cast_to_full",
    "cast_to_half",
    "get_policy",
    "half_dtype",
    "select_tree",
)

T = TypeVar("T")


@functools.partial(jax.tree_util.register_dataclass, data_fields=(), meta_fields=())
@dataclasses.dataclass(frozen=True)
class NoOpLossScale:
    """Does not scale.

    Examples:
        >>> import jmp_amp.compat.jmp as jmp
        >>> jmp.NoOpLossScale().scale(3.0)
        3.0
    """

    @property
    def loss_scale(self) -> int:
        """What the loss is multiplied by."""
        return 1

    def scale(self, tree: T) -> T:
        """Returns the tree."""
        return tree

    def unscale(self, tree: T) -> T:
        """Returns the tree."""
        return tree

    def adjust(self, grads_finite: Any) -> "NoOpLossScale":
        """Returns the scale for the next step, which is this one."""
        del grads_finite
        return self


class _Scaling:
    loss_scale: Any

    def scale(self, tree: Any) -> Any:
        """Multiplies a loss, or a tree of them, in float32 or wider."""
        scale = jnp.asarray(self.loss_scale, jnp.float32)
        return map_wide(lambda x: x * scale.astype(x.dtype), tree)

    def unscale(self, tree: Any) -> Any:
        """Divides gradients, in float32 or wider."""
        factor = 1 / jnp.asarray(self.loss_scale, jnp.float32)
        return map_wide(lambda x: x * factor.astype(x.dtype), tree)


@functools.partial(jax.tree_util.register_dataclass, data_fields=(), meta_fields=("loss_scale",))
@dataclasses.dataclass(frozen=True)
class StaticLossScale(_Scaling):
    """Scales by a constant.

    Args:
        loss_scale: multiplies the loss; a number, or an array of known value. It is static under `jit`.

    Examples:
        >>> import jmp_amp.compat.jmp as jmp
        >>> print(jmp.StaticLossScale(8).unscale(jmp.StaticLossScale(4).scale(6.0)))
        3.0
    """

    loss_scale: Any

    def __post_init__(self) -> None:
        # An array could not be compared under `jit`.
        object.__setattr__(self, "loss_scale", getattr(self.loss_scale, "item", lambda: self.loss_scale)())

    def adjust(self, grads_finite: Any) -> "StaticLossScale":
        """Returns the scale for the next step, which is this one."""
        del grads_finite
        return self


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("loss_scale", "counter", "min_loss_scale"),
    meta_fields=("period", "factor"),
)
@dataclasses.dataclass(frozen=True)
class DynamicLossScale(_Scaling):
    """Scales by as much as gradients stand.

    Args:
        loss_scale: floating [], multiplies the loss.
        counter: int32[], finite steps since the scale last moved.
        period: after so many finite steps the scale grows.
        factor: the scale grows and falls by it.
        min_loss_scale: floating [], the scale never falls below it.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jmp_amp.compat.jmp as jmp
        >>> loss_scale = jmp.DynamicLossScale(jnp.float32(2**15))
        >>> print(loss_scale.adjust(jnp.bool_(False)).loss_scale)
        16384.0
    """

    loss_scale: Any
    counter: Any = dataclasses.field(default_factory=lambda: np.zeros([], np.int32))
    period: int = 2000
    factor: int = 2
    min_loss_scale: Any = dataclasses.field(default_factory=lambda: np.ones([], np.float32))

    def __post_init__(self) -> None:
        for name in ("loss_scale", "min_loss_scale"):
            value = getattr(self, name)
            # JAX also builds trees of other things than arrays.
            dtype = getattr(value, "dtype", type(value) if isinstance(value, int | float) else None)
            if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
                warnings.warn(f"Expected floating type for {name}, got {dtype}", stacklevel=3)

    def adjust(self, grads_finite: Any) -> "DynamicLossScale":
        """Returns the scale for the next step.

        Args:
            grads_finite: bool[], whether the gradients of this step were finite.
        """
        if jnp.shape(grads_finite) != ():
            raise ValueError(f"`grads_finite` must be a boolean scalar, got shape {jnp.shape(grads_finite)}")
        scale = jnp.asarray(self.loss_scale, jnp.float32)
        grown, counter = scale * self.factor, self.counter + 1
        grow = counter >= self.period
        grown = jnp.where(grow & jnp.isfinite(grown), grown, scale)
        backed_off = jnp.maximum(jnp.asarray(self.min_loss_scale, jnp.float32), scale / self.factor)
        return dataclasses.replace(
            self,
            loss_scale=jnp.where(grads_finite, grown, backed_off),
            counter=jnp.where(jnp.asarray(grads_finite) & ~grow, counter, 0).astype(jnp.int32),
        )


LossScale = NoOpLossScale | StaticLossScale | DynamicLossScale
