"""Against float64, autocast is as accurate as the same model mixed by hand, in loss and in gradients.

The products of public models are in 16 bits, as many as the page says.
"""

import re
from pathlib import Path

import numpy as np
import pytest
from accuracy_models import CASES
from autocast_accuracy import LOW_STREAM, SEEDS, STREAMS, measure, medians
from report import report_section
from shares import DTYPES, TITLE, cases, share

pytestmark = pytest.mark.usefixtures("users_code")

SETS = 5
MODELS = {name: {name: case} for name, case in CASES.items() if "optax" not in name}
SIMILAR = ("smooth_labels", "l2_loss", "log_cosh", "hinge_loss")  # to others, in what they do with the logits
LOSSES = {name: case for name, case in CASES.items() if name not in MODELS and not any(s in name for s in SIMILAR)}
GROUPS = MODELS | {"optax losses": LOSSES}


def is_no_larger(auto, hand, slack):
    """Whether the errors of autocast are no larger than by hand: the medians over 20 seeds, or seed by seed.

    Where both sides are equally accurate but round differently, the ratio of medians over 20 seeds is luck: for a loss
    anything from 0.6 to 1.6, for a gradient (thousands of numbers) 1 up to `slack`. So medians that are larger count
    only where the pairs of errors, of the same seed, agree: three standard deviations more of them are larger than
    smaller. Errors that are not finite are never smaller.
    """
    if np.median(medians(auto) / medians(hand)) <= slack:
        return True
    larger, smaller = np.sum(~(auto <= hand)), np.sum(auto < hand)
    return larger - smaller <= 3 * np.sqrt(larger + smaller)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cases", "options"),
    [*((cases, {}) for cases in GROUPS.values()), *((MODELS[name], LOW_STREAM) for name in STREAMS)],
    ids=[*GROUPS, *(f"{name}, low stream" for name in STREAMS)],
)
def test_errors_are_no_larger_than_by_hand(cases, options):
    too_large = [
        f"{name}, {dtype}, {kind}: {np.median(auto):.2e}, by hand {np.median(hand):.2e}"
        for name, dtype, kind, hand, auto in measure(cases, SETS * SEEDS, **options)
        if not is_no_larger(auto, hand, {"loss": 1.0, "gradient": 1.02}[kind])
    ]
    assert not too_large, "\n".join(too_large)


@pytest.mark.parametrize("factor", [1.0, 1.1, 1.5, np.nan])
def test_a_systematic_error_is_seen(factor):
    # Gradients spread little from seed to seed, so 10 % more are seen.
    hand = 1 + 0.05 * np.random.default_rng(0).standard_normal(SETS * SEEDS)
    auto = factor + 0.05 * np.random.default_rng(1).standard_normal(SETS * SEEDS)
    assert is_no_larger(auto, hand, 1.02) == (factor == 1)


PAGE = Path("docs/benchmarks/autocast_accuracy.md")
_, _, SECTION = PAGE.read_text().partition(f"{TITLE}\n")
SHARES = {name: tuple(map(float, of)) for name, *of in re.findall(r"\| ([^|]+) \| ([\d.]+) \| ([\d.]+) \|", SECTION)}


def test_the_page_has_the_shares_of_all_models():
    assert list(SHARES)[: len(cases())] == list(cases())


@pytest.mark.slow
@pytest.mark.parametrize("name", cases())
def test_no_share_of_products_in_16_bits_falls(name):
    found = [share(*cases()[name](), dtype)[0] for dtype in DTYPES]
    assert all(now >= before - 5e-4 for now, before in zip(found, SHARES[name], strict=True)), (found, SHARES[name])


def test_writing_the_section_leaves_the_others(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\nfirst\n{TITLE}\n\nold\n\n## Other\n\nlast\n")
    report_section(TITLE, ["new"], page)
    report_section(TITLE, ["newer"], page)
    assert page.read_text() == f"# Page\n\nfirst\n\n{TITLE}\n\nnewer\n\n## Other\n\nlast\n"
