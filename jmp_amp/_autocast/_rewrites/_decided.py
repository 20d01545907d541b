"""An op that a rewrite may match."""

from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import JaxprEqn

from jmp_amp._autocast._rule import Rule
from jmp_amp._formats import Format


class Decided(NamedTuple):
    """An op of which the dtypes are decided.

    Attributes:
        eqn: the equation.
        rule: the rule of the op.
        format: that of the region.
        reads_full: whether its results are read in float32 only, so that it is evaluated in float32.
        dtypes: the dtypes of its operands, cast or not.
        casts: the dtypes that its operands are cast to by each use of its own; None for all others.
        are_inputs: whether each operand is an input of the program, moved or not.
        weight_grad_dtype: the argument of `autocast`.
    """

    eqn: JaxprEqn
    rule: Rule
    format: Format
    reads_full: bool
    dtypes: tuple[Any, ...]
    casts: tuple[Any, ...]
    are_inputs: tuple[bool, ...]
    weight_grad_dtype: np.dtype | None
