"""Facts about an equation that do not depend on dtypes. The planner reads them once for each jaxpr."""

from typing import NamedTuple

from jax.extend.core import JaxprEqn, Var

from jmp_amp._autocast._rule import Rule
from jmp_amp._jaxpr import Branches, Call, Loop


class Facts(NamedTuple):
    """Facts about an equation.

    Attributes:
        eqn: the equation.
        rule: the rule of its op.
        structure: how it holds jaxprs; None if it holds none.
        operands: the variables that it reads, each once.
    """

    eqn: JaxprEqn
    rule: Rule
    structure: Call | Branches | Loop | None
    operands: tuple[Var, ...]
