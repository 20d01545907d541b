"""Policies: the dtypes of parameters, computation and outputs, and the strings that name them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jmp_amp._policy._cast import cast_floating, half_dtype

T = TypeVar("T")

# The floating dtypes of the installed JAX, float8 and its kin included, by their own names.
_FLOATING = {name: jnp.dtype(value) for name, value in vars(jnp).items() if re.fullmatch(r"b?float\d\w*", name)}

# jmp's other names. "half" is asked for when it is used: importing must not start a backend.
_SHORT = {"f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64", "full": "float32"}

_DTYPES_TEXT = (
    "`f16`, `bf16`, `f32`, `f64`, `float16`, `bfloat16`, `float32`, `float64`, `half`, `full`, "
    "or the full name of another floating dtype of JAX, such as `float8_e4m3fn`"
)


def parse_dtype(value: DTypeLike, field: str = "dtype") -> np.dtype:
    """Returns the floating dtype that a user means.

    Args:
        value: A string, in which digits count bits (`"f16"` is float16, where numpy reads 16 bytes), or
            whatever numpy takes for a dtype: `jnp.float16`, `np.dtype("float16")`, an array's `dtype`.
            Another byte order than the machine's is dropped.
        field: The argument's name, for the message.

    Raises:
        ValueError: If `value` is a string or a dtype, but no floating dtype of JAX.
        TypeError: If `value` is neither.
    """
    # The type comes first: numpy calls its float16 equal to the string "half".
    if isinstance(value, str) and value == "half":
        return half_dtype()
    name = _SHORT.get(value, value) if isinstance(value, str) else _numpy_name(value, field)
    if name not in _FLOATING:
        raise ValueError(f"`{field}` must be a floating dtype, got `{name}`; allowed: {_DTYPES_TEXT}.")
    return _FLOATING[name]


def _numpy_name(value: DTypeLike, field: str) -> str:
    try:
        if value is not None:  # which numpy takes for float64
            return np.dtype(value).name
    except (TypeError, ValueError):
        pass
    raise TypeError(
        f"`{field}` must be a floating dtype, got `{value!r}` of type `{type(value).__name__}`; "
        f"allowed: a dtype such as `jnp.float16`, or a string: {_DTYPES_TEXT}."
    )


@dataclasses.dataclass(frozen=True)
class Policy:
    """The dtypes in which parameters are kept, computation runs and outputs leave.

    It is frozen and hashable, and no pytree: use it as a static argument. `str(policy)` reads
    `"params=float32,compute=float16,output=float32"`, which `get_policy` takes back.

    The `cast_to_*` methods cast floating JAX and numpy arrays, tracers included, of any shape. Integers,
    bools, PRNG keys, complex numbers, `None`, Python numbers and objects that are no arrays come back as
    they are, and so does an array that has the dtype already.

    Attributes:
        param_dtype: Dtype of the parameters, as the optimizer keeps them.
        compute_dtype: Dtype of the computation, for parameters and inputs alike.
        output_dtype: Dtype of the results.
        rules: Overrides for `autocast`, as pairs; see `with_rules`. They are not part of the string.

    Raises:
        ValueError: If a dtype is not floating or its name is unknown.
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

    # Written out, so that type checkers let any dtype-like in and see dtypes on the attributes.
    def __init__(
        self,
        param_dtype: DTypeLike,
        compute_dtype: DTypeLike,
        output_dtype: DTypeLike,
        rules: tuple[tuple[Any, Any], ...] = (),
    ) -> None:
        object.__setattr__(self, "param_dtype", parse_dtype(param_dtype, "param_dtype"))
        object.__setattr__(self, "compute_dtype", parse_dtype(compute_dtype, "compute_dtype"))
        object.__setattr__(self, "output_dtype", parse_dtype(output_dtype, "output_dtype"))
        object.__setattr__(self, "rules", tuple(rules))

    def __str__(self) -> str:
        return f"params={self.param_dtype},compute={self.compute_dtype},output={self.output_dtype}"

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
        """Returns the same policy with another `output_dtype`.

        Examples:
            >>> import jmp_amp as amp
            >>> print(amp.get_policy("float16").with_output_dtype("f32"))
            params=float16,compute=float16,output=float32
        """
        return dataclasses.replace(self, output_dtype=parse_dtype(dtype, "output_dtype"))

    def with_rules(self, rules: Mapping[Any, Any]) -> Policy:
        """Returns the same policy with more overrides for `autocast`, which documents them.

        Examples:
            >>> import jax
            >>> import jmp_amp as amp
            >>> policy = amp.get_policy("mixed_float16").with_rules({jax.lax.tanh_p: "full"})
            >>> policy.rules
            ((tanh, 'full'),)
        """
        return dataclasses.replace(self, rules=tuple({**dict(self.rules), **rules}.items()))


_KEYS = {key: name for name in ("params", "compute", "output") for key in (name, name[0])}

NAMED_POLICIES = {
    "mixed_float16": Policy("float32", "float16", "float32"),
    "mixed_bfloat16": Policy("float32", "bfloat16", "float32"),
    "float32": Policy("float32", "float32", "float32"),
    "float16": Policy("float16", "float16", "float16"),
    "bfloat16": Policy("bfloat16", "bfloat16", "bfloat16"),
    "O0": Policy("float32", "float32", "float32"),
    "O1": Policy("float32", "float16", "float32"),
    "O2": Policy("float16", "float16", "float32"),
    "O3": Policy("float16", "float16", "float16"),
}


def get_policy(name: str | Policy) -> Policy:
    """Returns the policy that a string describes.

    | string | params | compute | output |
    |---|---|---|---|
    | `params=f32,compute=f16,output=bf16`, or `p=`, `c=`, `o=` | float32 | float16 | bfloat16 |
    | `c=f16`; `output` follows `compute` | float32 | float16 | float16 |
    | `p=f16`; `compute` follows `params` | float16 | float16 | float16 |
    | `mixed_float16`, `O1` | float32 | float16 | float32 |
    | `mixed_bfloat16` | float32 | bfloat16 | float32 |
    | `O2`, for use with `master_weights` | float16 | float16 | float32 |
    | `float32`, `O0` | float32 | float32 | float32 |
    | `float16`, `O3`; any one dtype stands for all three | float16 | float16 | float16 |

    Dtypes are `f16`, `bf16`, `f32`, `f64`, their full names, `half` (what `half_dtype()` gives) and `full`
    (float32). White space around the parts is ignored.

    Args:
        name: The string. A `Policy` comes back as it is.

    Raises:
        ValueError: If a key, a dtype or a name is unknown, or a key is given twice.
        TypeError: If `name` is neither a string nor a policy.

    Examples:
        >>> import jmp_amp as amp
        >>> print(amp.get_policy("c=f16, o=f32"))
        params=float32,compute=float16,output=float32
        >>> amp.get_policy("O1") == amp.get_policy("mixed_float16")
        True

    References:
        The grammar is jmp 0.0.4's, `mixed_*` are named after Keras's policies (whose layers return the
        compute dtype) and `O0` to `O3` after apex's `opt_level`.
    """
    if isinstance(name, Policy):
        return name
    if not isinstance(name, str):
        raise TypeError(
            f"get_policy: expected a string or a `Policy`, got `{name!r}` of type `{type(name).__name__}`; "
            "build one from dtypes with `Policy(...)`."
        )
    text = name.strip()
    if text in NAMED_POLICIES:
        return NAMED_POLICIES[text]
    if "=" not in text:
        dtype = _parse_value(text, text, name)
        return Policy(dtype, dtype, dtype)
    given: dict[str, np.dtype] = {}
    for part in map(str.strip, text.split(",")):
        key, equals, value = map(str.strip, part.partition("="))
        if not equals or key not in _KEYS:
            raise _bad_part(part, name, f"unknown key `{key}`" if equals else "no `=`")
        if _KEYS[key] in given:
            raise _bad_part(part, name, f"`{_KEYS[key]}` given twice")
        given[_KEYS[key]] = _parse_value(value, part, name)
    params = given.get("params", jnp.dtype(jnp.float32))
    compute = given.get("compute", params)
    return Policy(params, compute, given.get("output", compute))


def _parse_value(value: str, part: str, name: str) -> np.dtype:
    try:
        return parse_dtype(value)
    except ValueError:
        raise _bad_part(part, name, f"unknown dtype `{value}`") from None


def _bad_part(part: str, name: str, fact: str) -> ValueError:
    names = ", ".join(f"`{known}`" for known in NAMED_POLICIES)
    return ValueError(
        f"get_policy: {fact} in `{part}` of the policy `{name}`. "
        "Allowed: `params=..,compute=..,output=..` (or `p`, `c`, `o`; each at most once), one dtype for all "
        f"three, or a name. Dtypes: {_DTYPES_TEXT}. Names: {names}."
    )
