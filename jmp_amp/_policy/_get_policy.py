"""Policies by name, and the strings that describe them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jmp_amp._policy._dtypes import ALLOWED_DTYPES, FLOAT8, parse_dtype
from jmp_amp._policy._policy import Policy

_FIELDS = {key: name for name in ("params", "compute", "output") for key in (name, name[0])}

NAMED_POLICIES = {
    "mixed_float16": Policy("float32", "float16", "float32"),
    "mixed_bfloat16": Policy("float32", "bfloat16", "float32"),
    "mixed_float8": Policy("float32", "float8", "float32"),
    "float32": Policy("float32", "float32", "float32"),
    "float16": Policy("float16", "float16", "float16"),
    "bfloat16": Policy("bfloat16", "bfloat16", "bfloat16"),
    "O0": Policy("float32", "float32", "float32"),
    "O1": Policy("float32", "float16", "float32"),
    "O2": Policy("float16", "float16", "float32"),
    "O3": Policy("float16", "float16", "float16"),
}


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
    | `O2`, for use with `master_weights` | float16 | float16 | float32 |
    | `float32`, `O0` | float32 | float32 | float32 |
    | `float16`, `O3`; a single dtype sets all three | float16 | float16 | float16 |

    Dtypes are `f16` or `fp16`, `bf16`, `f32` or `fp32`, `f64` or `fp64`, their full names, `half` (`half_dtype()`) and
    `full` (float32). Whitespace around the parts is ignored. `params` defaults to float32.

    Args:
        name: The string. A `Policy` is returned unchanged.

    Raises:
        ValueError: If a key, a dtype or a name is unknown, or a key occurs twice.
        TypeError: If `name` is neither a string nor a policy.

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
            f"get_policy: expected a string or a `Policy`, got `{name!r}` of type `{type(name).__name__}`; "
            "to build a policy from dtypes, call `Policy(...)`."
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
            raise _policy_error(part, name, f"unknown key `{key}`" if equals else "no `=`")
        if _FIELDS[key] in given:
            raise _policy_error(part, name, f"`{_FIELDS[key]}` given twice")
        is_format = _FIELDS[key] == "compute" and value in FLOAT8
        given[_FIELDS[key]] = value if is_format else _parse_value(value, part, name)
    params = given.get("params", jnp.dtype(jnp.float32))
    compute = given.get("compute", params)
    return Policy(params, compute, given.get("output", FLOAT8.get(str(compute), compute)))


def _parse_value(value: str, part: str, name: str) -> np.dtype:
    try:
        return parse_dtype(value)
    except ValueError:
        raise _policy_error(part, name, f"unknown dtype `{value}`") from None


def _policy_error(part: str, name: str, fact: str) -> ValueError:
    names = ", ".join(f"`{known}`" for known in NAMED_POLICIES)
    return ValueError(
        f"get_policy: {fact} in `{part}` of the policy `{name}`. "
        "Allowed: `params=..,compute=..,output=..` (or `p`, `c`, `o`; each at most once), a single dtype for all "
        f"three, or a name. Dtypes: {ALLOWED_DTYPES}. Names: {names}."
    )
