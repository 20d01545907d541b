"""The examples that have a twin in float32, run through their command lines for a few steps."""

import importlib.util

import pytest

pytestmark = [
    pytest.mark.usefixtures("users_code"),
    pytest.mark.skipif(
        importlib.util.find_spec("sklearn") is None, reason="the examples train on scikit-learn's digits"
    ),
]
EXAMPLES = {  # what an example needs, and how far the scores of float16 may be from those of float32 after 10 steps
    "cnn_flax_nnx": ("flax", {"accuracy": 0.03}),
    "transformer_flax_linen": ("flax", {"val_loss": 0.02}),
    "vit_equinox": ("equinox", {"accuracy": 0.03}),
    "resnet_haiku": ("haiku", {"accuracy": 0.03}),
    "cnn_keras": ("keras", {"accuracy": 0.03, "accuracy of model.predict": 0.03}),
    "lstm": (None, {"val_loss": 0.02}),
    "neural_ode_diffrax": ("diffrax", {"fit error": 0.01, "rounding error": 0.01, "steps": 20}),
}
SMALLER = {"lstm": {"WIDTH": 32, "EVAL_WINDOWS": 32}}  # constants of an example that takes seconds without


def run(name, library, *argv):
    if library and importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library}")
    return importlib.import_module(name).main(argv)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if library else ()) for name, (library, _) in EXAMPLES.items()]
)
def test_float16_scores_as_float32_does(name, tmp_path, capsys, monkeypatch):
    library, tolerances = EXAMPLES[name]
    for constant, value in SMALLER.get(name, {}).items():
        monkeypatch.setattr(f"{name}.{constant}", value)
    scores = run(name, library, "--steps", "10", "--out", str(tmp_path))
    assert scores["float32"].keys() == scores["float16"].keys() == tolerances.keys()
    for score, tolerance in tolerances.items():
        assert scores["float16"][score] == pytest.approx(scores["float32"][score], abs=tolerance)
    assert (tmp_path / "history.png").stat().st_size > 10_000
    assert "skips" in capsys.readouterr().out


@pytest.mark.slow
def test_a_bayesian_model_with_its_region_in_float32_is_the_one_in_float32(tmp_path):
    scores = run("bayes_numpyro", "numpyro", "--samples", "20", "--out", str(tmp_path))
    assert scores["float16, region"] == scores["float32"] != scores["float16"]
    assert (tmp_path / "posterior.png").stat().st_size > 10_000
