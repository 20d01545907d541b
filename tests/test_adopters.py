"""The converted programs of `benchmarks/adopters.py` train as in float32, and the page shows their conversions."""

from pathlib import Path

import adopters
import numpy as np
import pytest

PAGE = Path(__file__).parents[1] / "docs/adopters.md"
QUICK = {"two_towers", "neural_sde"}


@pytest.mark.parametrize("name", adopters.CONVERSIONS)
def test_the_page_shows_the_conversion(name):
    shown = PAGE.read_text().partition(f"\n## {name}\n\n```diff\n")[2].partition("\n```")[0]
    assert shown.splitlines() == adopters.diff(name), "run `python benchmarks/adopters.py --out docs/adopters.md`"


def test_each_program_has_a_conversion():
    assert {path.stem for path in adopters.FOLDER.glob("*.py")} == set(adopters.CONVERSIONS)


@pytest.mark.parametrize(
    "name", [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in adopters.CONVERSIONS]
)
def test_the_first_steps_are_those_of_float32(name):
    library = name.partition("_")[0]
    if library in ("flax", "equinox", "haiku"):
        pytest.importorskip(library)
    found = adopters.run(name, steps=3)
    for dtype, rtol in (("float16", 0.01), ("bfloat16", 0.06)):
        np.testing.assert_allclose(found[dtype], found["float32"], rtol, err_msg=dtype)


@pytest.mark.slow
def test_the_rule_keeps_what_a_rotation_does_not_change():
    change = adopters.rotations(steps=20)
    for dtype in ("float16", "bfloat16"):
        assert change["float32", False] < 1e-5 < change[dtype, False]
        assert change[dtype, True] < 1e-5
