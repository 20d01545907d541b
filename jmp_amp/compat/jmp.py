"""The public API of jmp 0.0.4: programs written for jmp run with `import jmp_amp.compat.jmp as jmp`.

Loss scales have the same leaves as in jmp, so checkpoints of jmp can be restored. Errors have the same classes, and
`str(policy)` uses the same names.

Three bugs of jmp are fixed: `DynamicLossScale.min_loss_scale` survives `jax.tree.map` and `jit`, low-precision losses
are cast to float32 before they are scaled, and the scale neither falls to 0 nor grows to infinity.
"""

from typing import Any, TypeVar

import jax.numpy as jnp

from jmp_amp import _policy
from jmp_amp._policy import all_finite, cast_to_full, cast_to_half, half_dtype
from jmp_amp.compat._jmp_loss_scale import (
    DynamicLossScale,
    NoOpLossScale,
    StaticLossScale,
    boolean_scalar_error,
)

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
        fact = str(error).removeprefix("get_policy: ")
        raise ValueError(fact[0].upper() + fact[1:]) from None  # the message of jmp begins with "Unknown dtype"
    return Policy(policy.param_dtype, policy.compute_dtype, policy.output_dtype, policy.rules)


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
        raise boolean_scalar_error("pred", pred)
    return _policy.select_tree(pred, a, b)


LossScale = NoOpLossScale | StaticLossScale | DynamicLossScale
