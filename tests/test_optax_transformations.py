"""Optax's transformations train under `dynamic_loss_scale` as without it; the page that lists them is complete."""

import pathlib

import pytest
from optax_transformations import names, verdict

pytestmark = [pytest.mark.usefixtures("users_code"), pytest.mark.filterwarnings("ignore::DeprecationWarning")]
DOCS = pathlib.Path(__file__).parents[1] / "docs"


@pytest.mark.slow
@pytest.mark.parametrize("skip", ["cond", "select"])
@pytest.mark.parametrize("name", names())
@pytest.mark.filterwarnings("ignore:Specifying a key")
def test_a_transformation_trains_as_without_a_loss_scale(name, skip):
    assert verdict(name, skip) == "ok"


def test_the_page_lists_what_was_tried_and_nothing_failed():
    rows = [
        line.split(" | ")
        for line in (DOCS / "benchmarks/optax_transformations.md").read_text().splitlines()
        if line.startswith("| `")
    ]
    listed = {row[0].strip("|` "): row[1:3] for row in rows}
    assert {tuple(verdicts) for verdicts in listed.values()} == {("ok", "ok")}
    assert f"All {len(listed)} transformations of optax" in (DOCS / "optax.md").read_text()
    # A later optax may have more.
    assert {"adam", "lbfgs", "lookahead", "MultiSteps", "contrib.sam"} <= set(listed) & set(names())
