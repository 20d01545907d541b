"""The example on many devices, run through its command line at a tiny size."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import flags_but_devices, free_port

import jmp_amp

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_sharded.py"
TINY = ("--steps", "12", "--batch", "32", "--inject-overflow", "5")


def start(*args, **more):
    """Starts the example as users do: JAX has not been used in its process."""
    package = str(Path(jmp_amp.__file__).parent.parent)
    env = os.environ | {"PYTHONPATH": package, "XLA_FLAGS": flags_but_devices(), "COLUMNS": "100"} | more
    command = [sys.executable, "-W", "error", str(EXAMPLE), *args]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def finish(process):
    try:
        out, err = process.communicate(timeout=600)
    finally:
        process.kill()
    return process.returncode, out, err


def rows(text):
    """The table: loss, accuracy, skips, scale and megabytes, by way."""
    found = re.findall(r"(data parallel|FSDP) +(\S+) +(\S+)% +(\S+) +(2\^\S+) +(\S+) MB", text)
    return {way: (float(loss), float(accuracy), *rest, float(held)) for way, loss, accuracy, *rest, held in found}


def assert_trains(table):
    """Both ways skip the overflow and end near each other; the shards of four devices hold a quarter."""
    assert [row[2:4] for row in table.values()] == [("1", "2^15")] * 2
    parallel, sharded = table["data parallel"], table["FSDP"]
    assert abs(parallel[0] - sharded[0]) < 2e-3
    assert sharded[0] < 5  # ln 256 is 5.5
    assert 3.9 < parallel[-1] / sharded[-1] <= 4.1


@pytest.mark.slow
def test_a_simulated_run_skips_the_overflow_of_one_device():
    code, out, err = finish(start("--simulate", "4", *TINY))
    assert code == 0, err[-2000:]
    assert "4 x cpu, 1 process(es)" in out
    assert_trains(rows(out))


@pytest.mark.slow
def test_simulated_real_and_distributed_runs_agree():
    alone = start("--simulate", "4", *TINY)
    # Devices that the example did not ask for, as on a machine that has them.
    found = start(*TINY, XLA_FLAGS="--xla_force_host_platform_device_count=4", PJRT_NPROC="16")
    coordinator = f"127.0.0.1:{free_port()}"
    processes = [start("--simulate", "2", "--distributed", coordinator, "2", str(i), *TINY) for i in range(2)]
    results = [finish(process) for process in (alone, found, *processes)]
    assert [code for code, *_ in results] == [0] * 4, "\n".join(err[-2000:] for *_, err in results)
    one, real, first, second = (out for _, out, _ in results)
    assert "skips" not in second  # the first process speaks for all
    assert "4 x cpu, 1 process(es)" in one
    assert "4 x cpu, 2 process(es)" in first
    assert rows(one) == rows(real)
    assert_trains(rows(one))
    for way, (loss, accuracy, *rest) in rows(one).items():
        distributed_loss, distributed_accuracy, *distributed_rest = rows(first)[way]
        assert abs(distributed_loss - loss) < 2e-3
        assert abs(distributed_accuracy - accuracy) < 5
        assert distributed_rest == rest


def test_a_batch_that_the_devices_do_not_divide_is_refused():
    code, _, err = finish(start("--simulate", "4", "--batch", "30"))
    assert code != 0
    assert "--batch 30: must be a multiple of the devices (4 x cpu, 1 process(es))" in err
