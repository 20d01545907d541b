"""Reads and runs jaxprs; nothing here knows of precision."""

from jmp_amp._jaxpr._atoms import dtype_of, is_floating, is_inexact, shape_of
from jmp_amp._jaxpr._evaluate import apply_as_traced, evaluate, evaluate_steps, with_last_reads
from jmp_amp._jaxpr._frames import Frame, frames_of
from jmp_amp._jaxpr._higher_order import HIGHER_ORDER, holds_jaxprs, inner_jaxprs, structure_of
from jmp_amp._jaxpr._scopes import is_backward, is_recomputed, marked, marks_in, scope_path
from jmp_amp._jaxpr._structures import Branches, Call, Loop, Structure
from jmp_amp._jaxpr._tracing import (
    as_type,
    bind,
    equations_behind,
    flat_call,
    has_no_derivative,
    retyped,
    split_arrays,
    trace,
    with_dtype,
)
from jmp_amp._jaxpr._versions import (
    INLINE,
    api_boundary,
    apply,
    context_of,
    is_differentiated,
    is_same_value,
    open_jaxpr,
    varying_axes,
    zero_cotangent,
)

__all__ = [
    "HIGHER_ORDER",
    "INLINE",
    "Branches",
    "Call",
    "Frame",
    "Loop",
    "Structure",
    "api_boundary",
    "apply",
    "apply_as_traced",
    "as_type",
    "bind",
    "context_of",
    "dtype_of",
    "equations_behind",
    "evaluate",
    "evaluate_steps",
    "flat_call",
    "frames_of",
    "has_no_derivative",
    "holds_jaxprs",
    "inner_jaxprs",
    "is_backward",
    "is_differentiated",
    "is_floating",
    "is_inexact",
    "is_recomputed",
    "is_same_value",
    "marked",
    "marks_in",
    "open_jaxpr",
    "retyped",
    "scope_path",
    "shape_of",
    "split_arrays",
    "structure_of",
    "trace",
    "varying_axes",
    "with_dtype",
    "with_last_reads",
    "zero_cotangent",
]
