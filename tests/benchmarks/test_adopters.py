"""The converted programs of `benchmarks/adopters.py` train as in float32, and the page shows their conversions."""

from pathlib import Path

import adopters
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import ad
from jaxprs import equations

import jmp_amp as amp

PAGE = Path(__file__).parents[2] / "docs/adopters.md"
QUICK = "two_towers", {"float16": 0.01}


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


ALL = {"float16": 0.01, "bfloat16": 0.06}


@pytest.mark.parametrize(
    ("name", "tolerances"), [QUICK, *(pytest.param(x, ALL, marks=pytest.mark.slow) for x in adopters.CONVERSIONS)]
)
def test_a_converted_program_starts_as_in_float32_and_trains(name, tolerances):
    library = name.partition("_")[0]
    if library in ("flax", "equinox", "haiku"):
        pytest.importorskip(library)
    found = adopters.run(name, steps=12, dtypes=tolerances)
    for dtype, rtol in tolerances.items():
        np.testing.assert_allclose(found[dtype][0], found["float32"][0], rtol)
        assert found[dtype][-1] < found[dtype][0]  # also after steps that are skipped


@pytest.mark.slow
def test_the_rule_keeps_what_a_rotation_does_not_change():
    change = adopters.rotations(steps=20)
    for dtype in ("float16", "bfloat16"):
        assert change["float32", False] < 1e-5
        assert change[dtype, True] < change[dtype, False] / 3


# As that of kfac_jax: it reads the result, the inputs and the parameters of a layer, and returns the result.
layer_tag_p = Primitive("layer_tag")
layer_tag_p.def_impl(lambda out, *inputs, **meta: out)
layer_tag_p.def_abstract_eval(lambda out, *inputs, **meta: out)
ad.primitive_jvps[layer_tag_p] = lambda primals, tangents, **meta: (layer_tag_p.bind(*primals, **meta), tangents[0])


def tagged(p, x):
    out = layer_tag_p.bind(x @ p["w"] + p["b"], x, p["w"], p["b"], meta="dense")
    layer_tag_p.bind(out, x, meta="loss")  # nothing reads it
    return jnp.mean(jnp.tanh(out) ** 2)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8"])
def test_a_tag_of_a_layer_has_the_parameters_and_the_input_as_without_autocast(dtype):
    args = {"w": jnp.ones((16, 16)), "b": jnp.zeros(16)}, jnp.ones((4, 16))
    jaxpr = jax.make_jaxpr(jax.value_and_grad(amp.autocast(tagged, dtype)))(*args)
    layer, loss = (eqn for eqn in jaxpr.eqns if eqn.primitive is layer_tag_p)
    b, w, x = jaxpr.jaxpr.invars
    assert layer.invars[1:] == [x, w, b]
    assert layer.params == {"meta": "dense"}
    assert loss.invars == [layer.outvars[0], x]
    assert {var.aval.dtype for eqn in (layer, loss) for var in (*eqn.invars, *eqn.outvars)} == {np.dtype("float32")}
    products = [eqn for eqn in equations(amp.autocast(tagged, dtype), *args) if "dot_general" in eqn.primitive.name]
    assert [var.aval.dtype.itemsize for eqn in products for var in eqn.invars] == [2, 2]


def test_explain_names_the_tags():
    report = amp.explain(tagged, "bfloat16")({"w": jnp.ones((16, 16)), "b": jnp.zeros(16)}, jnp.ones((4, 16)))
    assert report.summary()["unknown"] == ["layer_tag"]
    assert "Primitives without a rule: layer_tag." in str(report)
    assert len(report.select(primitive="layer_tag", direction="forward").rows) == 2


def test_the_page_has_the_section_about_kfac():
    assert PAGE.read_text().endswith(adopters.KFAC), "run `python benchmarks/adopters.py --out docs/adopters.md`"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of kfac_jax
@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="kfac_jax 0.0.8 does not import with JAX 0.11")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_kfac_finds_layers_that_are_registered(dtype):
    pytest.importorskip("kfac_jax", reason="needs kfac_jax, whose dependencies are a nightly build and no part of CI")
    loss, blocks = adopters.run_kfac("float32", registers=False, steps=3)
    low, of_low = adopters.run_kfac(dtype, registers=True, steps=3)
    assert of_low == blocks
    assert "NaiveDiagonal" in adopters.run_kfac(dtype, registers=False, steps=1)[1]
    np.testing.assert_allclose(low, loss, rtol=2e-2)
