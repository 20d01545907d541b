"""Policies: the dtypes of parameters, computation and outputs, and the strings that describe them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
from jax.typing import DTypeLike

from jmp_amp._calls import quote, shorten
from jmp_amp._formats import ALLOWED_DTYPES, FLOAT32, FORMATS, parse_compute_dtype, parse_dtype
from jmp_amp._trees import cast_floating

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
        param_dtype: the dtype of the parameters that the optimizer updates.
        compute_dtype: the dtype of parameters and inputs during the computation. As an argument, also the name of a
            format that `autocast` takes, such as `"float8"`, whose other ops run in bfloat16.
        output_dtype: the dtype of the outputs.
        rules: overrides for `autocast`, as pairs; see `with_rules`. `str(policy)` does not contain them.
        compute_format: the `dtype` of `autocast` for this policy: the name of the format, or of `compute_dtype`.

    Raises:
        ValueError: a dtype is not floating, or its name is unknown.
        TypeError: a value is neither a dtype nor a string.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> policy = amp.Policy(param_dtype="float32", compute_dtype=jnp.float16, output_dtype="f32")
        >>> print(policy)
        params=float32,compute=float16,output=float32
        >>> tree = policy.cast_to_compute({"w": jnp.ones((2, 2)), "step": jnp.zeros((), jnp.int32)})
        >>> tree["w"].dtype, tree["step"].dtype
        (dtype('float16'), dtype('int32'))
        >>> policy = amp.Policy("float32", "float8", "float32")
        >>> policy.compute_dtype, policy.compute_format
        (dtype(bfloat16), 'float8')

    References:
        `Policy` of jmp 0.0.4.
    """

    param_dtype: np.dtype
    compute_dtype: np.dtype
    output_dtype: np.dtype
    rules: tuple[tuple[Any, Any], ...] = ()
    compute_format: str = ""

    # An explicit `__init__`, so that type checkers accept any dtype-like and infer `np.dtype` for the attributes.
    def __init__(
        self,
        param_dtype: DTypeLike,
        compute_dtype: DTypeLike,
        output_dtype: DTypeLike,
        rules: tuple[tuple[Any, Any], ...] = (),
        compute_format: str = "",
    ) -> None:
        compute, name = parse_compute_dtype(compute_dtype, compute_format)
        params, output = parse_dtype(param_dtype, "param_dtype"), parse_dtype(output_dtype, "output_dtype")
        for field, value in zip(dataclasses.fields(self), (params, compute, output, tuple(rules), name), strict=True):
            object.__setattr__(self, field.name, value)

    def __str__(self) -> str:
        return f"params={self.param_dtype},compute={self.compute_format},output={self.output_dtype}"

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


_FIELDS = {key: name for name in ("params", "compute", "output") for key in (name, name[0])}

NAMED_POLICIES = {
    **{f"mixed_{name}": Policy("float32", name, "float32") for name, form in FORMATS.items() if form.is_low},
    "O0": Policy("float32", "float32", "float32"),
    "O1": Policy("float32", "float16", "float32"),
    "O2": Policy("float16", "float16", "float32"),
    "O3": Policy("float16", "float16", "float16"),
}
_POLICY = re.compile(r"mixed_\w+|O\d|.*=.*")


def is_policy(value: Any) -> bool:
    """Whether a value is a policy, or the string of one that is not the name of a dtype."""
    return isinstance(value, Policy) or (isinstance(value, str) and _POLICY.fullmatch(value.strip()) is not None)


def get_policy(name: str | Policy) -> Policy:
    """Returns the policy for a string.

    | string | params | compute | output |
    |---|---|---|---|
    | `params=f32,compute=f16,output=bf16`, or `p=`, `c=`, `o=` | float32 | float16 | bfloat16 |
    | `c=f16`; `output` defaults to `compute` | float32 | float16 | float16 |
    | `p=f16`; `compute` defaults to `params` | float16 | float16 | float16 |
    | `mixed_float16`, `O1` | float32 | float16 | float32 |
    | `mixed_bfloat16` | float32 | bfloat16 | float32 |
    | `mixed_float8`, or `p=f32,c=float8,o=f32` | float32 | bfloat16, float8 in products with a weight | float32 |
    | `O2`, for use with `low_precision_params` | float16 | float16 | float32 |
    | `float32`, `O0` | float32 | float32 | float32 |
    | `float16`, `O3`; a single dtype sets all three | float16 | float16 | float16 |

    Dtypes are `f16` or `fp16`, `bf16`, `f32` or `fp32`, `f64` or `fp64`, their full names, `half` (bfloat16 on a TPU,
    else float16) and `full` (float32). Whitespace around the parts is ignored. `params` defaults to float32.

    Args:
        name: the string. A `Policy` is returned unchanged.

    Raises:
        ValueError: a key, a dtype or a name is unknown, or a key occurs twice.
        TypeError: `name` is neither a string nor a policy.

    Examples:
        >>> import jmp_amp as amp
        >>> print(amp.get_policy("c=f16, o=f32"))
        params=float32,compute=float16,output=float32
        >>> amp.get_policy("O1") == amp.get_policy("mixed_float16")
        True

    References:
        The grammar is that of jmp 0.0.4. The `mixed_*` names are those of Keras's policies, whose layers return the
        compute dtype. `O0` to `O3` are the values of apex's `opt_level`.
    """
    if isinstance(name, Policy):
        return name
    if not isinstance(name, str):
        raise TypeError(
            f"a policy must be a string or a `Policy`, got `{quote(name)}` of type `{type(name).__name__}`; to build a "
            "policy from dtypes, call `Policy(...)`"
        )
    text = name.strip()
    if text in NAMED_POLICIES:
        return NAMED_POLICIES[text]
    if "=" not in text:
        dtype = _parse_value(text, text, name)
        return Policy(dtype, dtype, dtype)
    given: dict[str, Any] = {}
    for part in map(str.strip, text.split(",")):
        key, equals, value = map(str.strip, part.partition("="))
        if not equals or key not in _FIELDS:
            raise _policy_error(part, name, f"unknown key `{shorten(key)}`" if equals else "no `=`")
        if _FIELDS[key] in given:
            raise _policy_error(part, name, f"`{_FIELDS[key]}` given twice")
        is_format = _FIELDS[key] == "compute" and value in FORMATS
        given[_FIELDS[key]] = value if is_format else _parse_value(value, part, name)
    params = given.get("params", FLOAT32)
    policy = Policy(params, given.get("compute", params), FLOAT32)
    return policy.with_output_dtype(given.get("output", policy.compute_dtype))


def _parse_value(value: str, part: str, name: str) -> np.dtype:
    try:
        return parse_dtype(value)
    except ValueError:
        raise _policy_error(part, name, f"unknown dtype `{shorten(value)}`") from None


def _policy_error(part: str, name: str, fact: str) -> ValueError:
    return ValueError(
        f"{fact} in `{shorten(part)}` of the policy `{shorten(name)}`; allowed: `params=..,compute=..,output=..` (or "
        f"`p`, `c`, `o`; each at most once), a single dtype for all three, or a name. Dtypes: {ALLOWED_DTYPES}. For "
        f"`compute` also {_quoted(FORMATS)}. Names: {_quoted(NAMED_POLICIES)}"
    )


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
