"""What is said of an op: where it stands, in which dtypes it runs, and why."""

from typing import NamedTuple


class OpSite(NamedTuple):
    """An op of the program at one place in the code.

    Attributes:
        direction: `"forward"`, `"backward"`, or `"recomputed"` for the backward pass.
        module: the named scopes around it, such as the modules of Flax and Haiku.
        source: the file and line that it comes from, and the function there.
        primitive: its name in a jaxpr.
        op_class: the class of the primitive, see `autocast`.
        why: a key of `REASONS`.
        inputs: the dtypes of its floating operands, as they come.
        compute: the dtype that these are cast to.
        output: the dtype of its result.
        runs: how often it runs; a `while_loop` counts as one iteration, and of a `cond` each branch counts.
        flops: floating-point operations of all runs, of products and convolutions only.
        bytes: the size of the results of all runs.
    """

    direction: str
    module: str
    source: str
    primitive: str
    op_class: str
    why: str
    inputs: tuple[str, ...]
    compute: str
    output: str
    runs: int
    flops: int
    bytes: int


REASONS = {
    "rule": "the class of its primitive",
    "bias": "a bias does not widen the product that it is added to, nor a scalar an array",
    "angle": "sines and cosines are all that reads it",
    "distance": "a term of a squared distance, which cancels with the others",
    "decomposition": "a matrix that is decomposed, or what a solver reads",
    "loop": "it decides when a loop ends",
    "constant": "it reads a constant, or what came of one, that the low dtype cannot hold",
    "readers": "all that reads its result reads float32, with which it fuses",
    "precision": "the program asks for float32 arithmetic by `precision`",
    "region": "the code says so: `full_precision` or `precision(dtype)`",
    "pattern": "a pattern in `rules` matches its scope",
    "override": "`rules` gives its primitive another class",
    "traced": "it, or an operand of it, was traced in another dtype than float32",
    "unknown": "no rule for this primitive: it runs in the dtypes that it was traced in",
    "derivative": "it is what JAX makes of the forward pass",
}
