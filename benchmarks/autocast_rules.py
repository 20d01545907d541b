"""What each rule of autocast bought: bytes and memory of the models of `autocast_cost.py` with one rule left out.

python benchmarks/autocast_rules.py [--out docs/benchmarks/autocast_rules.md]
"""

import contextlib
from unittest import mock

import gpu_aot  # first: it sets the platform
import jax
import jax.numpy as jnp
import models
from autocast_cost import autocast, measure
from report import arguments, head, report, row

from jmp_amp._autocast import _api, _options, _rewrites
from jmp_amp._ops import RULES, ResultKind, Rule

CASES = {
    "GPT-2, 4 layers": lambda low: models.gpt_case(low, layers=4),
    "encoder, scanned": lambda low: models.encoder_case(low),
    "ResNet, 7 blocks": lambda low: models.resnet_case(low, blocks=(3, 4)),
    "LSTM, 512 steps": lambda low: models.lstm_case(low),
}


@contextlib.contextmanager
def patched(module, name, value):
    """Replaces a table of autocast, and forgets the plans that were made by the other one."""
    with mock.patch.object(module, name, value):
        _api.planner_of.cache_clear()
        yield
    _api.planner_of.cache_clear()


def changed(change):
    """Changes every rule of the table."""

    def each(rule):
        return change(rule) if isinstance(rule, Rule) else lambda params, avals: change(rule(params, avals))

    return patched(_options, "RULES", {name: each(rule) for name, rule in RULES.items()})


def without_biases(rule):
    """A sum whose operands are never biases."""
    return rule._replace(kind=ResultKind.DIFFERENCE) if rule.kind is ResultKind.SUM else rule


def without_rewrite(left_out):
    rewrites = tuple(rewrite for rewrite in _rewrites._REWRITES if rewrite is not left_out)
    return patched(_rewrites, "_REWRITES", rewrites)


WITHOUT = {
    "nothing": contextlib.nullcontext,
    "biases are part of the layer": lambda: changed(without_biases),
    "what only float32 ops read is float32": lambda: changed(lambda rule: rule._replace(fuses=False)),
    "what a product reads of a norm is stored in float16": lambda: changed(lambda rule: rule._replace(stores=False)),
    "the label's logit is not scattered": lambda: without_rewrite(_rewrites._label_logit),
    "a bias is broadcast after its cast": lambda: without_rewrite(_rewrites._cast_bias),
    '`save="matmuls"`': contextlib.nullcontext,
}

WHY = """What each rule of autocast saves: bytes and memory of four models with one rule left out at a time.

Each cell is bytes moved / temporary memory, x by hand."""
NOTES = """
Each row leaves one rule out of `autocast`. The row "nothing" is autocast with all rules. The difference between a
figure and that of "nothing" is the saving of the rule.
"""


def table():
    """Yields the lines of a Markdown table, a row a rule; bytes moved and temporary memory, x by hand."""
    yield from head("without", *CASES)
    by_hand = {name: measure(*case(jnp.float16)) for name, case in CASES.items()}
    for rule, left_out in WITHOUT.items():
        cells = []
        for name, case in CASES.items():
            options = {"save": "all"} if "save" in rule else {}
            with left_out():
                figures = measure(*autocast(case, **options))
            cells.append(" / ".join(f"{x / hand:.3f}" for x, hand in zip(figures, by_hand[name], strict=True)))
        yield row(rule, *cells)


def main():
    options = arguments(__doc__).parse_args()
    assert gpu_aot
    by = f"Compiled for one NVIDIA H200 with JAX {jax.__version__}, by `benchmarks/autocast_rules.py`."
    report("Ablation of the rules", f"{WHY}\n\n{by}", table(), NOTES, options.out)


if __name__ == "__main__":
    main()
