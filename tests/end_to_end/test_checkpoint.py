"""Checkpoints: what was saved and restored trains on as if nothing had happened."""

import contextlib
import functools
import io
import os
import pathlib
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

import checkpoint_worker
import jax
import jax.numpy as jnp
import many_devices as many
import numpy as np
import optax
import pytest
from checkpoint_worker import SAVED, STEPS, bits, checkpoints, restore, runs, save, state_form, state_of, train
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from overflowing_run import RULE, loss_fn

import jmp_amp as amp

pytestmark = pytest.mark.usefixtures("users_code")
PAGE = pathlib.Path(__file__).parents[2] / "docs" / "checkpoints.md"


@contextlib.contextmanager
def worker(command, folder, **kwargs):
    """Starts it, with its complaints in a log, and leaves nothing of it behind."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    args = [sys.executable, checkpoint_worker.__file__, command, str(folder)]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(args, env=env, cwd=folder, stderr=log, text=True, start_new_session=True, **kwargs)
    kill = functools.partial(os.killpg, process.pid, signal.SIGKILL)
    watchdog = threading.Timer(600, kill)
    watchdog.start()
    with process:
        try:
            yield process
            if process.stdin:
                process.stdin.close()
            assert process.wait() == 0, (folder / "log").read_text()
        finally:
            watchdog.cancel()
            with contextlib.suppress(ProcessLookupError):
                kill()


def uninterrupted(run):
    return list(train(run, run.params, run.tx.init(run.params), first=1))


def mini_step(state):
    """Of the accumulation window, if there is one."""
    return [int(x) for path, x in jax.tree.leaves_with_path(state) if "mini_step" in jax.tree_util.keystr(path)]


@pytest.mark.parametrize("names", [["O1", "O2"], pytest.param(list(runs()), marks=pytest.mark.slow)])
def test_a_run_resumed_in_a_new_process_is_the_uninterrupted_one_to_the_last_bit(names, tmp_path):
    expected = {}
    for name in names:
        run = runs()[name]
        history = uninterrupted(run)
        saved, _ = history[SAVED - 1]
        save(tmp_path / name, SAVED, saved)
        expected[name] = [bits(after) for after in history[SAVED:]]

        skips = [int(amp.metrics(whole["state"])["total_notfinite"]) for whole, _ in history]
        assert tuple(np.flatnonzero(np.diff([0, *skips])) + 1) == run.bad_steps, name
        assert 0 not in mini_step(saved), name
    with worker("resume", tmp_path):
        pass
    seen = pickle.loads((tmp_path / "seen").read_bytes())
    for name in names:
        assert len(seen[name]) == STEPS - SAVED
        for step, (resumed, control) in enumerate(zip(seen[name], expected[name], strict=True), SAVED + 1):
            assert resumed == control, f"{name}, step {step}"


def test_a_floor_of_its_own_survives_jit_scan_tree_map_and_a_checkpoint(tmp_path):
    tx = amp.dynamic_loss_scale(optax.sgd(0.1), amp.LossScale(init_scale=1.0, min_scale=0.25, growth_interval=2))
    params = {"w": jnp.ones(2)}

    @functools.partial(jax.jit, static_argnames="gradient")
    def three_steps(state, gradient):
        def step(state, _):
            _, state = tx.update({"w": jnp.full(2, gradient)}, state, params)
            return state, amp.get_loss_scale(state)

        return jax.lax.scan(step, state, length=3)

    state, scales = three_steps(tx.init(params), jnp.inf)
    assert scales.tolist() == [0.5, 0.25, 0.25]
    save(tmp_path, 0, jax.tree.map(lambda x: x, state))
    restored = restore(tmp_path, jax.eval_shape(tx.init, params))
    assert three_steps(restored, jnp.inf)[1].tolist() == [0.25] * 3
    assert three_steps(restored, 1.0)[1].tolist() == [0.25, 0.5, 0.5]


RIG = {"sgd": optax.sgd(1.0), "adam": optax.adam(1e-2), "adamw": optax.adamw(1e-2)}


def run_rig(tx, loss_fn, skipped=(), between=lambda i, whole: whole):
    """Four batches, two layers as torch initialises them, an `inf` in a gradient of the third batch."""

    @jax.jit
    def step(params, state, x, y, bad):
        scale = amp.get_loss_scale(state) if isinstance(state, amp.DynamicLossScaleState) else 1.0
        grads = amp.grad(loss_fn, loss_scale=scale)(params, x, y)
        grads[1]["w"] = grads[1]["w"].at[0, 0].add(bad)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    rng, bound = np.random.default_rng(0), 8**-0.5
    shapes = {"w": (8, 8), "b": (1, 8)}
    params = [{k: jnp.float32(rng.uniform(-bound, bound, s)) for k, s in shapes.items()} for _ in range(2)]
    whole = params, tx.init(params)
    for i in range(4):
        x, y = rng.normal(size=(2, 8, 8)).astype(np.float32)
        if i not in skipped:
            whole = between(i, step(*whole, x, y, np.float32(np.inf if i == 2 else 0)))
    return whole


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", RIG)
def test_float16_training_restored_at_every_step_is_close_to_a_float32_control(name, tmp_path):
    def saved_and_restored(i, whole):
        save(tmp_path, i, whole)
        return restore(tmp_path, whole)

    tx, mixed = amp.dynamic_loss_scale(RIG[name], RULE), amp.autocast(loss_fn)
    expected, _ = run_rig(RIG[name], loss_fn, skipped=[2])
    in_one_go = run_rig(tx, mixed)
    restored = run_rig(tx, mixed, between=saved_and_restored)
    assert bits(restored) == bits(in_one_go)
    params, state = restored
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-3), params, expected)
    assert amp.get_loss_scale(state) == 128 * 2.0**3 * 0.5


@pytest.mark.slow
def test_a_process_killed_while_it_saves_leaves_its_last_complete_checkpoint(tmp_path):
    rng, folder = random.Random(0), tmp_path / "saved"
    folder.mkdir()
    latest, cut_short, longest = -1, 0, None
    with worker("save", folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        for _ in range(12):
            print("go", file=server.stdin, flush=True)
            _, pid = server.stdout.readline().split()
            if longest is None:  # twice what a save takes here
                start = time.monotonic()
                assert server.stdout.readline().split() == ["saved", "0"]
                latest, longest = 0, 2 * (time.monotonic() - start)
            time.sleep(rng.uniform(0, longest))
            os.kill(int(pid), signal.SIGKILL)
            complete = latest
            while (said := server.stdout.readline().split())[0] != "ended":
                complete = int(said[1]) if said[0] == "saved" else complete
            assert said == ["ended", str(-signal.SIGKILL)]
            cut_short += any("tmp" in path.name for path in folder.iterdir())
            with checkpoints(folder) as manager:
                found = manager.latest_step()
            latest = -1 if found is None else found
            assert latest in (complete, complete + 1)  # complete, but killed before it could say so
            if latest >= 0:
                assert bits(restore(folder, state_form())) == bits(state_of(latest))
    assert cut_short
    assert latest > 0


@pytest.mark.parametrize("left", [["commit_success.txt"], ["commit_success.txt", "default"]])
def test_what_is_left_of_an_older_checkpoint_that_was_half_deleted_is_not_in_the_way(left, tmp_path):
    form = {"w": np.zeros(2)}
    for step in range(2):
        save(tmp_path, step, {"w": np.full(2, step)})
    for path in (tmp_path / "0").iterdir():
        if path.name not in left:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for step in range(2, 4):
        assert restore(tmp_path, form)["w"].tolist() == [step - 1] * 2
        save(tmp_path, step, {"w": np.full(2, step)})


# Where the parameters, and so their moments, lie on so many devices.
SPECS = {
    8: {"w1": P("data"), "b1": P("data"), "w2": P("data"), "b2": P()},
    4: {"w1": P(None, "data"), "b1": P(), "w2": P(None, "data"), "b2": P("data")},
    1: dict.fromkeys(many.NAMES, P()),
}


def shardings(tx, devices):
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
    state = jax.eval_shape(tx.init, many.initial_params())
    specs = optax.tree.map_params(
        tx, lambda _, spec: spec, state, SPECS[devices], transform_non_params=lambda _: P(), is_leaf=lambda x: x is P
    )
    return jax.tree.map(functools.partial(NamedSharding, mesh), ((SPECS[devices], specs), P("data")))


def test_what_is_saved_from_eight_devices_is_restored_on_others_and_trains_on(tmp_path):
    tx = many.optimizer(many.CLIP)
    step = jax.jit(many.train_step(tx, many.loss_and_grads))
    whole = many.initial_params(), tx.init(many.initial_params())

    def train_on(whole, steps, batch_sharding):
        for i in steps:
            *whole, _ = step(*whole, jax.device_put(many.batch_of(i), batch_sharding))
        return tuple(whole)

    placed, batch_sharding = shardings(tx, 8)
    saved = train_on(jax.device_put(whole, placed), [0, 1], batch_sharding)
    save(tmp_path, 1, saved)
    expected = train_on(saved, [2, 3], batch_sharding)
    for devices in (4, 1):
        placed, batch_sharding = shardings(tx, devices)
        form = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), saved, placed)
        restored = restore(tmp_path, form)
        assert bits(restored) == bits(saved)
        assert jax.tree.all(jax.tree.map(lambda x, s: x.sharding == s, restored, placed))
        after = train_on(restored, [2, 3], batch_sharding)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6), after, expected)


def through_flax_bytes(whole, start):
    serialization = pytest.importorskip("flax.serialization", reason="needs Flax")
    return serialization.from_bytes(start, serialization.to_bytes(whole))


def through_a_flax_state_dict(whole, start):
    serialization = pytest.importorskip("flax.serialization", reason="needs Flax")
    return serialization.from_state_dict(start, serialization.to_state_dict(whole))


def through_equinox(whole, start):
    eqx = pytest.importorskip("equinox", reason="needs Equinox")
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, whole)
    file.seek(0)
    return eqx.tree_deserialise_leaves(file, jax.eval_shape(lambda: start))


@pytest.mark.parametrize("name", ["O2", "O3", "window_inside"])
@pytest.mark.parametrize("through", [through_flax_bytes, through_a_flax_state_dict, through_equinox])
def test_what_other_libraries_write_and_read_is_the_same_state(through, name):
    run = runs()[name]
    start = {"params": run.params, "state": run.tx.init(run.params)}
    step = jax.jit(lambda params, state: run.tx.update(jax.tree.map(jnp.ones_like, params), state, params)[1])
    whole = start | {"state": step(**start)}
    restored = through(whole, start)
    assert jax.tree.structure(restored) == jax.tree.structure(whole)
    assert bits(restored) == bits(whole)
    assert bits(step(**restored)) == bits(step(**whole))


def through_flax_checkpoints(whole, start):
    module = pytest.importorskip("flax.training.checkpoints", reason="needs Flax")
    with tempfile.TemporaryDirectory() as folder:
        module.save_checkpoint(folder, whole, 1)
        return module.restore_checkpoint(folder, start)


@pytest.mark.parametrize("wrap", [optax.adamw, lambda rate: amp.low_precision_params(optax.adamw(rate))])
@pytest.mark.parametrize("through", [through_flax_bytes, through_flax_checkpoints, through_equinox])
def test_a_float32_run_goes_on_with_a_loss_scale_and_back(through, wrap):
    inner, params = wrap(1e-3), {"w": jnp.arange(3.0)}
    tx = amp.dynamic_loss_scale(inner)
    plain = inner.update(params, inner.init(params), params)[1]
    state = tx.init(params)._replace(inner_state=through(plain, inner.init(params)))
    scaled = jax.tree.map(lambda x: 2.0**16 * x, params)
    (want, plain), (got, state) = inner.update(params, plain, params), tx.update(scaled, state, params)
    assert bits(got) == bits(want)
    assert bits(state.inner_state) == bits(plain)
    back = through(state, tx.init(params)).inner_state
    assert bits(inner.update(params, back, params)) == bits(inner.update(params, plain, params))


@pytest.mark.parametrize("through", [through_flax_bytes, through_flax_checkpoints, through_equinox])
def test_a_state_of_another_structure_is_an_error_but_for_one_library_as_the_page_says(through):
    inner, params = optax.adamw(1e-3), {"w": jnp.arange(3.0)}
    tx = amp.dynamic_loss_scale(inner)
    plain, state = (each.update(params, each.init(params), params)[1] for each in (inner, tx))
    for whole, start in ((plain, tx.init(params)), (state, inner.init(params))):
        if through is through_flax_checkpoints:
            assert optax.tree.get(through(whole, start), "ScaleByAdamState").count == 0
        else:
            with pytest.raises((ValueError, RuntimeError)):
                through(whole, start)


@functools.cache
def page():
    """What its own code leaves behind, and what it shows of other libraries."""
    blocks = re.findall(r"^```(python|py)\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    first = [kind for kind, _ in blocks].index("py")
    names = {}
    exec("\n".join(code for _, code in blocks[:first]), names)
    return names, [code for kind, code in blocks if kind == "py"]


def shown(library):
    """The names after the one block of the page that has a text in it."""
    pytest.importorskip(library.split()[1])
    names, blocks = page()
    (code,) = (code for code in blocks if library in code)
    names = dict(names)
    exec(code, names)
    return names


@pytest.mark.parametrize("library", ["from flax import serialization", "import equinox"])
def test_what_the_page_shows_of_other_libraries_restores_the_same_state(library):
    names = shown(library)
    assert bits(names["restored"]) == bits({"params": names["params"], "opt_state": names["opt_state"]})


def test_what_the_page_shows_of_flax_nnx_restores_the_same_state():
    names = shown("from flax import nnx")
    saved, restored = (names["nnx"].to_pure_dict(names["nnx"].state(run)) for run in (names["run"], names["restored"]))
    assert bits(restored) == bits(saved)
    assert amp.get_loss_scale(names["restored"][1]) == 2**10
