"""The table of cures: special ones first, general ones last."""

from collections.abc import Sequence

from jmp_amp.debug._cure import Cure
from jmp_amp.debug._cures_of_functions import CURES_OF_FUNCTIONS
from jmp_amp.debug._cures_of_infinities import CURES_OF_INFINITIES
from jmp_amp.debug._cures_of_overflows import CURES_OF_OVERFLOWS
from jmp_amp.debug._cures_of_zeros import CURES_OF_ZEROS
from jmp_amp.debug._diagnosis import Diagnosis

CURES: Sequence[Cure] = (*CURES_OF_INFINITIES, *CURES_OF_FUNCTIONS, *CURES_OF_ZEROS, *CURES_OF_OVERFLOWS)


def cure_of(diagnosis: Diagnosis) -> Cure:
    """Returns the first cure in the table that applies; the last applies to every op."""
    return next(cure for cure in CURES if cure.applies(diagnosis))
