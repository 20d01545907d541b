"""Two processes with devices of their own train together, as on two machines."""

import contextlib
import functools
import itertools
import json
import os
import subprocess
import sys
import time

import jax
import numpy as np
import process_worker
import pytest
from many_devices import BAD_STEP, SCALES, control
from process_worker import RUNS
from processes import flags_but_devices, free_port

pytestmark = pytest.mark.usefixtures("users_code")
CLEAN = [step != BAD_STEP for step in range(len(SCALES))]


@contextlib.contextmanager
def two_processes(folder, *args):
    """Starts both, which write what they saw and what they say into `folder`, and leaves none behind."""
    port = free_port()
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    env["XLA_FLAGS"] = flags_but_devices()
    processes = []
    try:
        for i in range(2):
            command = [sys.executable, process_worker.__file__, str(i), str(port), str(folder), *args]
            with (folder / f"{i}.log").open("w") as log:
                processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=env, cwd=folder))
        yield processes
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait(10)


def logs(folder):
    return "\n".join(path.read_text()[-3000:] for path in sorted(folder.glob("*.log")))


@pytest.mark.slow
def test_two_processes_train_as_one_device_does_and_skip_the_overflow_of_one(tmp_path):
    with two_processes(tmp_path) as processes:
        codes = [process.wait(600) for process in processes]
    assert codes == [0, 0], logs(tmp_path)
    histories = [json.loads((tmp_path / f"{i}.out").read_text()) for i in range(2)]
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
    for (*_, clip), first, second in zip(RUNS, *histories, strict=True):
        assert first["finite_here"] == [True] * len(CLEAN)
        assert second["finite_here"] == CLEAN
        assert first["hashes"] == second["hashes"]
        for mine in (first, second):
            assert mine["finite"] == CLEAN
            assert mine["scales"] == SCALES
            assert [new != old for old, new in itertools.pairwise(mine["hashes"])] == CLEAN[1:]
            for step, (params, _, loss) in enumerate(control(clip)):
                close(mine["losses"][step], loss)
                jax.tree.map(close, {name: np.float32(p) for name, p in mine["params"][step].items()}, params)


@pytest.mark.slow
@pytest.mark.parametrize("killed", [pytest.param(0, id="coordinator"), pytest.param(1, id="other")])
def test_when_one_process_dies_the_other_fails_and_does_not_hang(killed, tmp_path):
    steps = tmp_path / f"{killed}.out"
    with two_processes(tmp_path, "endless") as processes:
        deadline = time.monotonic() + 600
        while not (steps.exists() and steps.stat().st_size > 3):
            assert time.monotonic() < deadline, logs(tmp_path)
            assert [process.poll() for process in processes] == [None, None], logs(tmp_path)
            time.sleep(0.05)
        processes[killed].kill()
        code = processes[1 - killed].wait(600)
    assert code != 0, logs(tmp_path)
