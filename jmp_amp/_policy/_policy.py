"""Policies: the dtypes of parameters, computation and outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
from jax.typing import DTypeLike

from jmp_amp._policy._cast import cast_floating
from jmp_amp._policy._dtypes import FLOAT8, parse_dtype

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Policy:
    """The dtypes of parameters, computation and outputs.

    A policy is frozen, hashable and not a pytree: pass it as a static argument. `str(policy)` is
    `"params=float32,compute=float16,output=float32"`, and `get_policy` parses this string.

    The `cast_to_*` methods cast floating JAX and numpy arrays, including tracers, of any shape. They return all
    other leaves unchanged: integers, bools, PRNG keys, complex numbers, `None`, Python numbers, objects that are
    not arrays, and arrays that already have the dtype.

    Attributes:
        param_dtype: Dtype of the parameters that the optimizer updates.
        compute_dtype: Dtype of parameters and inputs during the computation.
        float8: Whether `autocast` computes products with a weight in float8, as with `dtype="float8"`. The strings
            `"float8_bfloat16"` (or `"float8"`) and `"float8_float16"` for `compute_dtype` set it.
        output_dtype: Dtype of the outputs.
        rules: Overrides for `autocast`, as pairs; see `with_rules`. `str(policy)` does not contain them.

    Raises:
        ValueError: If a dtype is not floating, or its name is unknown.
        TypeError: If a value is neither a dtype nor a string.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> policy = amp.Policy(param_dtype="float32", compute_dtype=jnp.float16, output_dtype="f32")
        >>> print(policy)
        params=float32,compute=float16,output=float32
        >>> tree = policy.cast_to_compute({"w": jnp.ones((2, 2)), "step": jnp.zeros((), jnp.int32)})
        >>> tree["w"].dtype, tree["step"].dtype
        (dtype('float16'), dtype('int32'))

    References:
        `Policy` of jmp 0.0.4.
    """

    param_dtype: np.dtype
    compute_dtype: np.dtype
    output_dtype: np.dtype
    rules: tuple[tuple[Any, Any], ...] = ()
    float8: bool = False

    # An explicit `__init__`, so that type checkers accept any dtype-like and infer `np.dtype` for the attributes.
    def __init__(
        self,
        param_dtype: DTypeLike,
        compute_dtype: DTypeLike,
        output_dtype: DTypeLike,
        rules: tuple[tuple[Any, Any], ...] = (),
        float8: bool = False,
    ) -> None:
        base = FLOAT8.get(compute_dtype) if isinstance(compute_dtype, str) else None
        object.__setattr__(self, "param_dtype", parse_dtype(param_dtype, "param_dtype"))
        object.__setattr__(self, "compute_dtype", parse_dtype(base or compute_dtype, "compute_dtype"))
        object.__setattr__(self, "float8", float8 or base is not None)
        object.__setattr__(self, "output_dtype", parse_dtype(output_dtype, "output_dtype"))
        object.__setattr__(self, "rules", tuple(rules))

    def __str__(self) -> str:
        return f"params={self.param_dtype},compute={self.compute_format},output={self.output_dtype}"

    @property
    def compute_format(self) -> str:
        """The `dtype` of `autocast` for this policy: the name of `compute_dtype`, after `float8_` if that is asked for.

        Examples:
            >>> import jmp_amp as amp
            >>> amp.get_policy("mixed_float8").compute_format
            'float8_bfloat16'
        """
        return f"float8_{self.compute_dtype}" if self.float8 else str(self.compute_dtype)

    def cast_to_param(self, tree: T) -> T:
        """Casts the floating arrays of `tree` to `param_dtype`.

        Examples:
            >>> import jax.numpy as jnp
            >>> import jmp_amp as amp
            >>> amp.get_policy("c=bf16").cast_to_param(jnp.ones(2, jnp.bfloat16)).dtype
            dtype('float32')
        """
        return cast_floating(tree, self.param_dtype)

    def cast_to_compute(self, tree: T) -> T:
        """Casts the floating arrays of `tree` to `compute_dtype`.

        Examples:
            >>> import jax.numpy as jnp
            >>> import jmp_amp as amp
            >>> amp.get_policy("c=bf16").cast_to_compute(jnp.ones(2)).dtype
            dtype(bfloat16)
        """
        return cast_floating(tree, self.compute_dtype)

    def cast_to_output(self, tree: T) -> T:
        """Casts the floating arrays of `tree` to `output_dtype`.

        Examples:
            >>> import jax.numpy as jnp
            >>> import jmp_amp as amp
            >>> amp.get_policy("mixed_float16").cast_to_output(jnp.ones(2, jnp.float16)).dtype
            dtype('float32')
        """
        return cast_floating(tree, self.output_dtype)

    def with_output_dtype(self, dtype: DTypeLike) -> Policy:
        """Returns a copy with another `output_dtype`.

        Examples:
            >>> import jmp_amp as amp
            >>> print(amp.get_policy("float16").with_output_dtype("f32"))
            params=float16,compute=float16,output=float32
        """
        return dataclasses.replace(self, output_dtype=parse_dtype(dtype, "output_dtype"))

    def with_rules(self, rules: Mapping[Any, Any]) -> Policy:
        """Returns a copy with additional overrides for `autocast`; see there for their format.

        Examples:
            >>> import jax
            >>> import jmp_amp as amp
            >>> policy = amp.get_policy("mixed_float16").with_rules({jax.lax.tanh_p: "full"})
            >>> policy.rules
            ((tanh, 'full'),)
        """
        return dataclasses.replace(self, rules=tuple({**dict(self.rules), **rules}.items()))
