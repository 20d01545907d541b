"""The example of GRPO, run through its command line for a few steps."""

import csv
import importlib
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_amp as amp

pytest.importorskip("flax", reason="the decoder is one of Flax NNX")
grpo = importlib.import_module("grpo_float16")

pytestmark = pytest.mark.usefixtures("users_code")
nnx = grpo.nnx


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(grpo, "WIDTH", 32)
    monkeypatch.setattr(grpo, "LAYERS", 1)
    monkeypatch.setattr(grpo, "PROMPTS", 4)


def prompts(size=4):
    return next(grpo.draw_prompts(0, size=size))


@pytest.mark.slow
def test_a_short_run_writes_its_columns_and_its_picture(tmp_path, capsys):
    grpo.main(["--precision", "float32", "float16", "--steps", "3", "--warmup", "3", "--out", str(tmp_path)])
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["run"], row["step"]) for row in rows] == [(run, s) for run in ("float32", "float16") for s in "123"]
    numbers = {"reward", "kl", "clipped", "mismatch_mean", "mismatch_max", "loss_scale", "total_notfinite", "grad_norm"}
    assert rows[0].keys() == {"run", "step"} | numbers
    assert all(math.isfinite(float(row[name])) for row in rows for name in numbers)
    assert {row["run"]: float(row["loss_scale"]) for row in rows} == {"float32": 1, "float16": 2**16}
    assert (tmp_path / "grpo.png").stat().st_size > 10_000
    assert "mismatch" in capsys.readouterr().out


def mismatch(precision):
    """Returns tokens and |log p learner - log p sampler|, with the same weights and key for each precision."""
    model = grpo.Decoder(nnx.Rngs(0))
    rollout = grpo.roll_out(model, model, prompts(), jax.random.key(0), precision)
    assert rollout["log_probs"].dtype == rollout["reference"].dtype == jnp.float32
    return np.asarray(rollout["tokens"]), np.abs(rollout["reference"] - rollout["log_probs"])


@pytest.mark.slow
def test_sampler_and_learner_agree_better_in_float16_than_in_bfloat16():
    tokens, found = zip(*map(mismatch, ("float32", "float16", "bfloat16")), strict=True)
    assert (tokens[0] == tokens[1]).all()
    assert (tokens[0] == tokens[2]).all()
    full, half, brain = (differences.mean() for differences in found)
    assert full < half / 100
    assert 4 < brain / half < 16  # three bits
    assert found[1].max() < found[2].max() / 4


def test_a_completion_is_rewarded_if_all_its_digits_are_in_order():
    given = jnp.asarray(prompts(3))
    right = jnp.sort(given[:, : grpo.DIGITS])
    assert grpo.reward(given, right.at[1, 2].add(1)).tolist() == [1, 0, 1]


@pytest.mark.slow
def test_the_first_step_on_a_rollout_follows_the_policy_gradient():
    model = grpo.Decoder(nnx.Rngs(0))
    rollout = grpo.roll_out(model, model, prompts(), jax.random.key(0), "float32")
    rollout["advantages"] = jax.random.normal(jax.random.key(1), rollout["advantages"].shape)

    def reinforce(model):
        return -jnp.mean(rollout["advantages"] * grpo.completion_log_probs(model, rollout["tokens"]))

    # Where learner and sampler agree, no ratio is clipped and the KL has no gradient.
    found, expected = nnx.jit(
        lambda m: (nnx.grad(grpo.grpo_loss, has_aux=True)(m, rollout)[0], nnx.grad(reinforce)(m))
    )(model)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


@pytest.mark.slow
def test_an_overflow_skips_the_step_and_halves_the_scale_in_the_optimizer():
    model = grpo.Decoder(nnx.Rngs(0))
    optimizer = grpo.make_optimizer(model, "float16", 1e-3)
    rollout = grpo.roll_out(model, model, prompts(), jax.random.key(0), "float16")
    before = jax.tree.map(jnp.copy, jax.tree.leaves(nnx.state(model)))
    grpo.train_step(
        model,
        optimizer,
        rollout | {"advantages": jnp.full((32, 1), jnp.inf)},
        loss_fn=grpo.grpo_loss,
        precision="float16",
    )
    assert amp.get_loss_scale(optimizer) == 2**15
    assert all(np.array_equal(x, y) for x, y in zip(before, jax.tree.leaves(nnx.state(model)), strict=True))


def test_steps_of_zero_are_refused(capsys):
    with pytest.raises(SystemExit):
        grpo.main(["--steps", "0"])
    assert "argument --steps: must be at least 1, got 0" in capsys.readouterr().err
