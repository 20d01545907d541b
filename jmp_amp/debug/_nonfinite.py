"""`NonFinite`: the report of `first_nonfinite`."""

import dataclasses

from jmp_amp.debug._location import Location
from jmp_amp.debug._values import Values


@dataclasses.dataclass(frozen=True)
class NonFinite:
    """The op that made the results of a program non-finite; `first_nonfinite` returns it. `print` shows a paragraph.

    Attributes:
        primitive: the name of the op in the jaxpr; `"argument"` if an argument is non-finite, and `"constant"` if the
            results contain an infinity that no op produced.
        source: the line of the user's code, `"model.py:12 (attention)"`, or the path of the argument, `"params['w']"`.
        library: the innermost line of library code that the user's line calls; empty if the user's line is innermost.
        scope: the named scopes around the op, such as Flax and Haiku modules: `"decoder/attention"`.
        backward: whether the op belongs to a backward pass; `source` is then the corresponding forward line.
        iteration: the index of the iteration of each loop around the op, outermost first; for a `scan`, the index along
            the scanned axis.
        operands: the floating-point operands.
        result: the first non-finite result.
        cure: suggested fixes.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> report = amp.debug.first_nonfinite(lambda x: jnp.log(x - 1))(jnp.ones(2))
        >>> report.primitive, report.result.infs, report.operands[0].zeros
        ('log', 2, 2)
    """

    primitive: str
    source: str
    library: str
    scope: str
    backward: bool
    iteration: tuple[int, ...]
    operands: tuple[Values, ...]
    result: Values
    cure: str

    def __str__(self) -> str:
        match self.primitive:
            case "argument":
                head = f"`{self.source}` is not finite: {self.result}"
            case "constant":
                head = "the results contain an infinite constant that no op produced"
            case _:
                head = f"`{self.primitive}` produced {'NaN' if self.result.nans else 'inf'} {self._where()}"
        lines = [head]
        lines += [f"  operand  {x}" for x in self.operands]
        if self.primitive != "argument":
            lines.append(f"  result   {self.result}")
        return "\n".join([*lines, f"  cure     {self.cure}"])

    def _where(self) -> str:
        where = Location(self.source, self.library, self.scope, self.backward).where
        if self.library:
            where += f", in {self.library}"
        if self.scope:
            where += f", scope {self.scope}"
        if self.iteration:
            where += f", iteration {', '.join(map(str, self.iteration))}"
        return where
