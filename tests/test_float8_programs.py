"""Each small program of `benchmarks/programs.py` with all its products on float8 operands, however small they are."""

import dataclasses

import conformance
import pytest
from conformance import examine
from programs import PROGRAMS

import jmp_amp as amp
from jmp_amp._formats import FORMATS, Float8

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("users_code")]
ANY_SIZE = Float8(multiple=1, min_rows=0, min_size=0, min_weight=0)

ILL_CONDITIONED = {
    "binary cross entropy on logits": "multiplies the rounding errors of a product by 30",
    "scan of a recurrent cell": "its errors grow from step to step",
    "sort and top k": "the order of near values changes, and the gradient with it",
}

# Of these, errors of gradients are up to 0.45: that of a logarithm is the reciprocal of small results of a product, and
# in that of a penalty the rounding errors of several products add up.
LARGE = {"epsilon of 1e 12 in a logarithm": 0.5, "gradient penalty": 0.5}


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_runs_and_stays_near_float32(name, monkeypatch):
    monkeypatch.setenv("JMP_AMP_EMULATE_FLOAT8", "1")
    monkeypatch.setitem(FORMATS, "float8", dataclasses.replace(FORMATS["float8"], float8=ANY_SIZE))
    monkeypatch.setattr(conformance, "TOLERANCE", LARGE.get(name, 0.25))  # float8_e4m3 rounds by up to 6 percent
    try:
        answers, message = examine(PROGRAMS[name], lambda fun: amp.autocast(fun, "float8"))
    except ImportError as error:
        pytest.skip(f"needs {error.name}")
    runs, _, _, is_finite, same_types, is_close = answers
    assert runs, message
    assert is_finite
    assert same_types
    assert is_close or name in ILL_CONDITIONED
