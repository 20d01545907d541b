"""How the readers of a value read it, as a set of bits: why a product is float32 for its readers."""


class Reads:
    """How the readers of a value read it; several are joined by `|`. Plain integers, since there are many."""

    NOBODY = 0
    OTHERWISE = 1 << 0  # in a way that is none of these
    RETURNED = 1 << 1  # by the caller of the program, in float32
    ANGLE = 1 << 2  # as an angle: one of 100 is off by 0.03 rad in float16, and by 0.25 in bfloat16
    DISTANCE = 1 << 3  # as a term of a difference that cancels: of a squared distance, or of a variance
    MATRIX = 1 << 4  # as a matrix to decompose, or as an operand of a solver
    RANGE = 1 << 5  # as the operand of a logarithm, which small and large values reach
    EDGE = 1 << 6  # near the edge of the domain of a function, whose slope is infinite there
    ROOT = 1 << 7  # as the operand of a square root
    FACTOR = 1 << 8  # as a factor of an accumulator, in every iteration of a loop
    GATE = 1 << 9  # as such a factor, where the result is a term of the next value of an accumulator
    GATE_IS_MADE_OF_IT = 1 << 10  # as `z` in a gate `1 - z` or `exp(-z)`
    TERM = 1 << 11  # as a term of the next value of an accumulator
    RECURRENCE = 1 << 12  # as the next value of a recurrence by products
    DECIDES = 1 << 13  # to decide when a loop ends

    OTHERS = OTHERWISE | RETURNED
    LINEAR = ANGLE | DISTANCE | MATRIX | RANGE | EDGE  # which sums and products pass on
    SENSITIVE = LINEAR | DECIDES  # those that float32 is for
