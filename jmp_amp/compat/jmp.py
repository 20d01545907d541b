"""jmp 0.0.4's public surface: `import jmp_amp.compat.jmp as jmp` runs programs that were written for jmp.

Loss scales have jmp's leaves, so that its checkpoints restore; errors have its classes, and `str(policy)` its names.
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

from jmp_amp import _policy
from jmp_amp._loss_scale import map_wide
from jmp_amp._policy import all_finite, cast_to_full, cast_to_half, half_dtype

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

# jmp's private modules have it too.
dtype_to_names = {
    jnp.float16: ("f16", "float16"),
    jnp.bfloat16: ("bf16", "bfloat16"),
    jnp.float32: ("full", "f32", "float32"),
    jnp.float64: ("f64", "float64"),
}


class Policy(_policy.Policy):
    """`jmp_amp.Policy` whose string has jmp's names.

    Examples:
        >>> import jmp_amp.compat.jmp as jmp
        >>> print(jmp.Policy("float32", "float16", "float32"))
        p=full,c=f16,o=full
    """

    def __str__(self) -> str:
        dtypes = {"p": self.param_dtype, "c": self.compute_dtype, "o": self.output_dtype}
        return ",".join(f"{key}={dtype_to_names.get(dtype.type, (dtype,))[0]}" for key, dtype in dtypes.items())


def get_policy(policy_name: str) -> Policy:
    """Returns the policy that a string describes.

    Args:
        policy_name: such as `"c=f16"`; the strings of `jmp_amp.get_policy`, jmp's among them.

    Raises:
        ValueError: a key or a dtype is unknown.

    Examples:
        >>> import jmp_amp.compat.jmp as jmp
        >>> print(jmp.get_policy("c=f16"))
        p=full,c=f16,o=f16
    """
    try:
        policy = _policy.get_policy(policy_name)
    except ValueError as error:
        fact = str(error).removeprefix("get_policy: ")
        raise ValueError(fact[0].upper() + fact[1:]) from None  # jmp's begins with "Unknown dtype"
    return Policy(policy.param_dtype, policy.compute_dtype, policy.output_dtype, policy.rules)


def select_tree(pred: Any, a: T, b: T) -> T:
    """Returns `a` where `pred` is true, else `b`.

    Args:
        pred: bool[].
        a: a tree of arrays.
        b: a tree of the same structure, shapes and dtypes.

    Raises:
        AssertionError: `pred` is not a boolean scalar.
        TypeError: two leaves differ in shape or dtype.
        ValueError: the structures differ.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jmp_amp.compat.jmp as jmp
        >>> jmp.select_tree(jnp.bool_(True), {"w": 1.0}, {"w": 2.0})["w"].item()
        1.0
    """
    if not isinstance(pred, bool) and (getattr(pred, "shape", None), getattr(pred, "dtype", None)) != ((), jnp.bool_):
        raise _no_boolean_scalar("pred", pred)
    return _policy.select_tree(pred, a, b)


def _no_boolean_scalar(name: str, value: Any) -> AssertionError:
    got = f"{value.dtype}{list(value.shape)}" if hasattr(value, "dtype") else repr(value)
    return AssertionError(
        f"expected boolean scalar for `{name}`, got {got}; make it one with `all_finite` or `jnp.all`"
    )


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


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class DynamicLossScale(_Scaling):
    """Scales by as much as gradients stand.

    Its leaves are those of jmp, at the same paths: `loss_scale`, then `counter`. The rest is static under `jit`.

    Args:
        loss_scale: floating [], multiplies the loss; its dtype stays.
        counter: int32[], finite steps since the scale last moved.
        period: after so many finite steps the scale grows.
        factor: the scale grows and falls by it.
        min_loss_scale: the scale never falls below it; a number, or an array of known value.

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
    min_loss_scale: Any = dataclasses.field(default_factory=lambda: np.float32(1))

    def __post_init__(self) -> None:
        for name in ("loss_scale", "min_loss_scale"):
            value = getattr(self, name)
            # JAX also builds trees of other things than arrays.
            dtype = getattr(value, "dtype", type(value) if isinstance(value, int | float) else None)
            if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
                warnings.warn(f"Expected floating type for {name}, got {dtype}", stacklevel=3)
        if not isinstance(self.min_loss_scale, jax.core.Tracer):
            # An array could not be compared under `jit`; a scalar of NumPy can, and has a dtype as well.
            object.__setattr__(self, "min_loss_scale", np.asarray(self.min_loss_scale)[()])

    def tree_flatten(self) -> tuple[tuple[Any, Any], tuple[Any, Any, Any]]:
        """Returns the leaves, and what is static."""
        if isinstance(self.min_loss_scale, jax.core.Tracer):
            raise TypeError(
                f"`min_loss_scale` is static, but was computed in a traced function: {self.min_loss_scale}; "
                "pass a number, such as `min_loss_scale=0.5`"
            )
        return (self.loss_scale, self.counter), (self.period, self.factor, self.min_loss_scale)

    @classmethod
    def tree_unflatten(cls, static: tuple[Any, Any, Any], leaves: tuple[Any, Any]) -> "DynamicLossScale":
        """Returns the scale with these leaves."""
        return cls(*leaves, *static)

    def adjust(self, grads_finite: Any) -> "DynamicLossScale":
        """Returns the scale for the next step.

        Args:
            grads_finite: bool[], whether the gradients of this step were finite.

        Raises:
            AssertionError: `grads_finite` is not a scalar.
            TypeError: `grads_finite` is floating.
        """
        if getattr(grads_finite, "shape", ()) != ():
            raise _no_boolean_scalar("grads_finite", grads_finite)
        scale, counter = jnp.asarray(self.loss_scale), jnp.asarray(self.counter)
        if not jnp.issubdtype(scale.dtype, jnp.floating):
            scale = scale.astype(jnp.float32)
        grown = scale * self.factor
        grown = jnp.where((counter == self.period - 1) & jnp.isfinite(grown), grown, scale)
        # With a floor of 0 the scale still stays a normal number, whose reciprocal is finite.
        floor = jnp.maximum(jnp.asarray(self.min_loss_scale, scale.dtype), jnp.finfo(scale.dtype).tiny)
        counter = ((counter + 1) % self.period).astype(counter.dtype)
        return dataclasses.replace(
            self,
            loss_scale=jax.lax.select(grads_finite, grown, jnp.maximum(floor, scale / self.factor)),
            counter=jax.lax.select(grads_finite, counter, jnp.zeros_like(counter)),
        )


LossScale = NoOpLossScale | StaticLossScale | DynamicLossScale
