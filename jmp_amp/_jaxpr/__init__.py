"""Reads and runs jaxprs; nothing here knows of precision."""

from jmp_amp._jaxpr import _versions as versions
from jmp_amp._jaxpr._children import restored, with_leaves
from jmp_amp._jaxpr._dataflow import Backward, Forward
from jmp_amp._jaxpr._hoist import hoist, run_loop
from jmp_amp._jaxpr._source import (
    SHARED,
    Frame,
    Site,
    direction_of,
    frames_of,
    lines_of,
    marked,
    marks_in,
    scope_path,
    site_of,
)
from jmp_amp._jaxpr._structures import (
    HIGHER_ORDER,
    Body,
    Branches,
    Call,
    HigherOrder,
    Loop,
    Structure,
    entries,
    equations_in,
    holds,
    inner_jaxprs,
    run_inline,
    runs_of,
    structure_of,
)
from jmp_amp._jaxpr._trace import (
    Cache,
    apply,
    apply_as_traced,
    as_type,
    bind,
    combine,
    dtype_of,
    evaluate,
    is_floating,
    is_inexact,
    is_reference,
    live_equations,
    nbytes_of,
    retyped,
    shape_of,
    split_arrays,
    trace_call,
    tracers_behind,
    with_dtype,
)
from jmp_amp._jaxpr._versions import (
    api_boundary,
    in_scopes_of,
    is_backward,
    is_of_derivative,
    open_jaxpr,
    spans_of,
    trace,
)
