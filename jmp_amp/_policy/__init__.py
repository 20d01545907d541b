"""Policies (the dtypes of parameters, computation and outputs), and casts, checks and selection of trees."""

from jmp_amp._policy._cast import cast_floating, cast_to_full, cast_to_half, half_dtype, wide_dtype
from jmp_amp._policy._dtypes import parse_dtype
from jmp_amp._policy._finite import all_finite, is_inexact
from jmp_amp._policy._get_policy import NAMED_POLICIES, get_policy
from jmp_amp._policy._policy import Policy
from jmp_amp._policy._select import is_value, select_tree

__all__ = [
    "NAMED_POLICIES",
    "Policy",
    "all_finite",
    "cast_floating",
    "cast_to_full",
    "cast_to_half",
    "get_policy",
    "half_dtype",
    "is_inexact",
    "is_value",
    "parse_dtype",
    "select_tree",
    "wide_dtype",
]
