"""The public API of jmp 0.0.4: programs written for jmp run with `import jmp_amp.compat.jmp as jmp`.

Loss scales have the same leaves as in jmp, so checkpoints of jmp can be restored. Errors have the same classes, and
`str(policy)` uses the same names.

Three bugs of jmp are fixed: `DynamicLossScale.min_loss_scale` survives `jax.tree.map` and `jit`, low-precision losses
are cast to float32 before they are scaled, and the scale neither falls to 0 nor grows to infinity.
"""

import dataclasses
from typing import Any, ClassVar, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr

from jmp_amp import _policy
from jmp_amp._calls import quote, warn
from jmp_amp._formats import half_dtype
from jmp_amp._trees import all_finite, cast_floating, is_value, multiply_wide

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

# jmp has it too, in a private module.
dtype_to_names = {
    jnp.float16: ("f16", "float16"),
    jnp.bfloat16: ("bf16", "bfloat16"),
    jnp.float32: ("full", "f32", "float32"),
    jnp.float64: ("f64", "float64"),
}


class Policy(_policy.Policy):
    """A `jmp_amp.Policy` whose string uses the dtype names of jmp.

    Examples:
        >>> import jmp_amp.compat.jmp as jmp
        >>> print(jmp.Policy("float32", "float16", "float32"))
        p=full,c=f16,o=full
    """

    def __str__(self) -> str:
        dtypes = {"p": self.param_dtype, "c": self.compute_dtype, "o": self.output_dtype}
        return ",".join(f"{key}={dtype_to_names.get(dtype.type, (dtype,))[0]}" for key, dtype in dtypes.items())


def get_policy(policy_name: str) -> Policy:
    """Returns the policy for a string.

    Args:
        policy_name: a string such as `"c=f16"`; all strings of jmp and of `jmp_amp.get_policy` are allowed.

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
        fact = str(error)
        raise ValueError(fact[0].upper() + fact[1:]) from None  # the message of jmp begins with "Unknown dtype"
    return Policy(**vars(policy))


def cast_to_half(tree: T) -> T:
    """Casts the floating arrays of a tree to `half_dtype()`.

    Args:
        tree: any pytree. Floating JAX and numpy arrays of any shape are cast; other leaves are unchanged.

    Returns:
        A tree of the same structure and shapes.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jmp_amp.compat.jmp as jmp
        >>> half = jmp.cast_to_half({"w": jnp.ones(3), "step": jnp.zeros((), jnp.int32)})
        >>> half["w"].dtype == jmp.half_dtype(), half["step"].dtype
        (True, dtype('int32'))
    """
    return cast_floating(tree, half_dtype())


def cast_to_full(tree: T) -> T:
    """Casts the floating arrays of a tree to float32, both narrower and wider ones.

    Args:
        tree: any pytree. Floating JAX and numpy arrays of any shape are cast; other leaves are unchanged.

    Returns:
        A tree of the same structure and shapes.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jmp_amp.compat.jmp as jmp
        >>> jmp.cast_to_full({"w": jnp.ones(3, jnp.bfloat16)})["w"].dtype
        dtype('float32')
    """
    return cast_floating(tree, jnp.float32)


def select_tree(pred: Any, a: T, b: T) -> T:
    """Returns `a` if `pred` is true, else `b`.

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
        raise _boolean_scalar_error("pred", pred)
    return jax.tree.map_with_path(lambda path, x, y: _selected(pred, keystr(path), x, y), a, b)


def _selected(pred: Any, path: str, x: Any, y: Any) -> Any:
    """Returns one of two leaves of `select_tree`; leaves that are neither arrays nor numbers must be equal."""
    if is_value(x) and is_value(y):
        aval_x, aval_y = jax.typeof(x), jax.typeof(y)
        if (aval_x.shape, aval_x.dtype) == (aval_y.shape, aval_y.dtype):
            return jax.lax.select(pred, x, y)
        raise TypeError(
            f"`a{path}` is `{aval_x}` but `b{path}` is `{aval_y}`; leaves must have the same shape and dtype: cast or "
            "reshape one of them"
        )
    if not is_value(x) and not is_value(y) and x == y:
        return x
    raise TypeError(
        f"cannot select between `a{path}`, which is `{x!r:.160}`, and `b{path}`, which is `{y!r:.160}`; leaves that "
        "are neither arrays nor numbers must be equal: remove them from the trees, or make them equal"
    )


def _boolean_scalar_error(name: str, value: Any) -> AssertionError:
    """Returns the error for an argument that is not a boolean scalar."""
    got = f"{value.dtype}{list(value.shape)}" if hasattr(value, "dtype") else quote(value)
    return AssertionError(f"expected boolean scalar for `{name}`, got {got}; compute it with `all_finite` or `jnp.all`")


class _Constant:
    """`adjust` of `NoOpLossScale` and `StaticLossScale`."""

    def adjust(self, grads_finite: Any) -> Self:
        """Returns the same loss scale."""
        return self


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class NoOpLossScale(_Constant):
    """A loss scale of 1, which changes nothing.

    Examples:
        >>> import jmp_amp.compat.jmp as jmp
        >>> jmp.NoOpLossScale().scale(3.0)
        3.0
    """

    loss_scale: ClassVar[int] = 1
    """The factor of the loss."""

    def scale(self, tree: T) -> T:
        """Returns the tree unchanged."""
        return tree

    unscale = scale


class _Scaling:
    """`scale` and `unscale` of `StaticLossScale` and `DynamicLossScale`."""

    loss_scale: Any

    def scale(self, tree: Any) -> Any:
        """Multiplies a loss, or a tree of losses, by the scale, in float32 or wider."""
        return multiply_wide(tree, jnp.asarray(self.loss_scale, jnp.float32))

    def unscale(self, tree: Any) -> Any:
        """Divides a tree of gradients by the scale, in float32 or wider."""
        return multiply_wide(tree, 1 / jnp.asarray(self.loss_scale, jnp.float32))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class StaticLossScale(_Constant, _Scaling):
    """A constant loss scale.

    Args:
        loss_scale: the factor of the loss, a number or a concrete array. It is static under `jit`.

    Examples:
        >>> import jmp_amp.compat.jmp as jmp
        >>> print(jmp.StaticLossScale(8).unscale(jmp.StaticLossScale(4).scale(6.0)))
        3.0
    """

    loss_scale: Any

    def __post_init__(self) -> None:
        # `jit` compares static values, and the comparison of arrays returns an array.
        object.__setattr__(self, "loss_scale", getattr(self.loss_scale, "item", lambda: self.loss_scale)())


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class DynamicLossScale(_Scaling):
    """A loss scale that grows after `period` finite steps and shrinks after each step that is not finite.

    The leaves have the same paths as in jmp: `loss_scale`, then `counter`. The other fields are static under `jit`.

    Args:
        loss_scale: floating [], the factor of the loss. `adjust` preserves its dtype.
        counter: int32[], the number of finite steps since the scale last changed.
        period: the number of finite steps after which the scale grows.
        factor: the scale is multiplied by `factor` to grow, and divided by `factor` to shrink.
        min_loss_scale: the lower bound of the scale, a number or a concrete array.

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
            # JAX also unflattens trees with leaves that are not arrays.
            dtype = getattr(value, "dtype", type(value) if isinstance(value, int | float) else None)
            if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
                warn(f"Expected floating type for {name}, got {dtype}")
        if not isinstance(self.min_loss_scale, jax.core.Tracer):
            # `jit` compares static values: a numpy scalar can be compared, and keeps its dtype.
            object.__setattr__(self, "min_loss_scale", np.asarray(self.min_loss_scale)[()])

    def tree_flatten(self) -> tuple[tuple[Any, Any], tuple[Any, Any, Any]]:
        """Returns the leaves and the static fields."""
        if isinstance(self.min_loss_scale, jax.core.Tracer):
            raise TypeError(
                f"`min_loss_scale` is static, so it cannot be a tracer, got {self.min_loss_scale}; "
                "pass a number, such as `min_loss_scale=0.5`"
            )
        return (self.loss_scale, self.counter), (self.period, self.factor, self.min_loss_scale)

    @classmethod
    def tree_unflatten(cls, static: tuple[Any, Any, Any], leaves: tuple[Any, Any]) -> "DynamicLossScale":
        """Returns the loss scale with these leaves and static fields."""
        return cls(*leaves, *static)

    def adjust(self, grads_finite: Any) -> "DynamicLossScale":
        """Returns the loss scale for the next step.

        Args:
            grads_finite: bool[], whether the gradients of this step are finite.

        Raises:
            AssertionError: `grads_finite` is not a scalar.
            TypeError: `grads_finite` is floating.
        """
        if getattr(grads_finite, "shape", ()) != ():
            raise _boolean_scalar_error("grads_finite", grads_finite)
        scale, counter = jnp.asarray(self.loss_scale), jnp.asarray(self.counter)
        if not jnp.issubdtype(scale.dtype, jnp.floating):
            scale = scale.astype(jnp.float32)
        grown = scale * self.factor
        grown = jnp.where((counter == self.period - 1) & jnp.isfinite(grown), grown, scale)
        # Even if `min_loss_scale` is 0, the scale must remain a normal number, so that its reciprocal is finite.
        floor = jnp.maximum(jnp.asarray(self.min_loss_scale, scale.dtype), jnp.finfo(scale.dtype).tiny)
        counter = ((counter + 1) % self.period).astype(counter.dtype)
        return dataclasses.replace(
            self,
            loss_scale=jax.lax.select(grads_finite, grown, jnp.maximum(floor, scale / self.factor)),
            counter=jax.lax.select(grads_finite, counter, jnp.zeros_like(counter)),
        )


LossScale = NoOpLossScale | StaticLossScale | DynamicLossScale
