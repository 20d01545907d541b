"""Facts about an equation that depend neither on dtypes nor on other equations. The planner reads them once."""

from typing import NamedTuple

from jax.extend.core import JaxprEqn, Var

from jmp_amp._autocast._rule import Rule
from jmp_amp._jaxpr import Structure


class Facts(NamedTuple):
    """Facts about an equation.

    Attributes:
        eqn: the equation.
        rule: the rule of its op.
        structure: how it holds jaxprs; None if it holds none.
        operands: the variables that it reads, each once.
        sources: what each operand was before it was only moved; None for a literal.
        op: a number for the primitive, its parameters and the types of its operands and results: the same op of another
            layer has the same. None if it holds jaxprs or what cannot be hashed.
    """

    eqn: JaxprEqn
    rule: Rule
    structure: Structure | None
    operands: tuple[Var, ...]
    sources: tuple[Var | None, ...]
    op: int | None

    @property
    def enters(self) -> Structure | None:
        """How analyses enter its jaxprs: a solver is one op to them."""
        return None if self.rule.reads else self.structure

    @property
    def is_with_itself(self) -> bool:
        """Whether it has two operands that are the same array, moved or not."""
        return len(self.sources) == 2 and self.sources[0] is not None and self.sources[0] is self.sources[1]

    @property
    def is_square(self) -> bool:
        """Whether its result is the square of an array, element by element."""
        name = self.eqn.primitive.name
        is_power = name == "integer_pow" and self.eqn.params["y"] == 2
        return is_power or name == "square" or (name == "mul" and self.is_with_itself)

    @property
    def multiplies_slices(self) -> bool:
        """Whether it multiplies different parts of one array."""
        return self.rule.scales and self.is_with_itself and self.eqn.invars[0] is not self.eqn.invars[1]
