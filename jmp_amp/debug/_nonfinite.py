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
        cause: the name of the cause, such as `"softmax by hand"`.
        cure: suggested fixes.
        finite_in_float32: whether all results are finite if the program runs in float32, so that low precision is the
            cause; None if that is not known.
        in_float32: the same as a sentence, which names the op that is not finite in float32 if it is another one.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> report = amp.debug.first_nonfinite(lambda x: jnp.log(x - 1))(jnp.ones(2))
        >>> report.primitive, report.result.infs, report.operands[0].zeros
        ('log', 2, 2)
        >>> report.cause, report.finite_in_float32
        ('log of 0', False)
    """

    primitive: str
    source: str
    library: str
    scope: str
    backward: bool
    iteration: tuple[int, ...]
    operands: tuple[Values, ...]
    result: Values
    cause: str
    cure: str
    finite_in_float32: bool | None = None
    in_float32: str = ""

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
        if self.in_float32:
            lines.append(f"  float32  {self.in_float32}")
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
