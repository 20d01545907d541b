"""The converted programs of `benchmarks/adopters.py` train as in float32, and the page shows their conversions."""

from pathlib import Path

import adopters
import jax
import numpy as np
import pytest

PAGE = Path(__file__).parents[1] / "docs/adopters.md"
QUICK = {"two_towers"}


@pytest.fixture(autouse=True)
def promotion():
    """That of JAX, and not of these tests."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.parametrize("name", adopters.CONVERSIONS)
def test_the_page_shows_the_conversion(name):
    shown = PAGE.read_text().partition(f"\n## {name}\n\n```diff\n")[2].partition("\n```")[0]
    assert shown.splitlines() == adopters.diff(name), "run `python benchmarks/adopters.py --out docs/adopters.md`"


def test_each_program_has_a_conversion():
    assert {path.stem for path in adopters.FOLDER.glob("*.py")} == set(adopters.CONVERSIONS)


@pytest.mark.parametrize(
    "name", [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in adopters.CONVERSIONS]
)
def test_a_converted_program_starts_as_in_float32_and_trains(name):
    library = name.partition("_")[0]
    if library in ("flax", "equinox", "haiku"):
        pytest.importorskip(library)
    found = adopters.run(name, steps=12)
    for dtype, rtol in (("float16", 0.01), ("bfloat16", 0.06)):
        np.testing.assert_allclose(found[dtype][0], found["float32"][0], rtol)
        assert found[dtype][-1] < found[dtype][0]  # also after steps that are skipped


@pytest.mark.slow
def test_the_rule_keeps_what_a_rotation_does_not_change():
    change = adopters.rotations(steps=20)
    for dtype in ("float16", "bfloat16"):
        assert change["float32", False] < 1e-5
        assert change[dtype, True] < change[dtype, False] / 3
