"""A cure: the cause of a non-finite value, and what to do about it."""

from collections.abc import Callable
from typing import NamedTuple

from jmp_amp.debug._diagnosis import Diagnosis


class Cure(NamedTuple):
    """A row of the table of cures.

    Attributes:
        cause: the name of the cause, such as `"softmax by hand"`.
        applies: whether it is the cause.
        text: the cure, as a text or a function that returns it.
    """

    cause: str
    applies: Callable[[Diagnosis], bool]
    text: str | Callable[[Diagnosis], str]

    def text_for(self, diagnosis: Diagnosis) -> str:
        """Returns the text for one op."""
        return self.text if isinstance(self.text, str) else self.text(diagnosis)


def run_in_float32(d: Diagnosis) -> str:
    """Returns how to run the op in float32."""
    rule = f' or `rules={{"{d.location.scope}": "full"}}`' if d.location.scope else ""
    return (
        f"use `with amp.full_precision():` around that line{rule} if autocast chose {d.result.dtype}, or "
        "`.astype(jnp.float32)` if the code itself casts"
    )
