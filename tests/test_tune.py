"""`python -m pallas_kernels tune`: what it chooses, with a clock of the tests, and the file that it writes."""

import json
import subprocess
import sys
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import pallas_kernels.__main__ as command
from pallas_kernels import _measured, _tune, check_finite, quantize
from pallas_kernels._measured import Measured, fastest_implementation

KIND = "A fine GPU (80 GB)"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of the test, on a machine whose GPU is `KIND`."""
    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv(_measured.SWITCH, raising=False)
    monkeypatch.setattr(_measured, "device_kind", lambda: KIND)
    _measured.measurements.cache_clear()
    yield tmp_path
    _measured.measurements.cache_clear()


class Clock:
    """Runs only while an op does: for its cost, by implementation and size, and a drift with each call."""

    def __init__(self, costs, drift=0.0):
        self.now, self.costs, self.drift = 0.0, costs, drift

    def __call__(self):
        return self.now

    def op(self, wrong=()):
        def call(x, implementation):
            key = implementation, x.size
            assert key in self.costs, "does not run here"

            def advance(x):
                self.now += self.costs[key]
                self.costs = {key: cost + self.drift for key, cost in self.costs.items()}
                return np.float32(np.asarray(x).astype(np.float32).sum() + (implementation in wrong))

            return io_callback(advance, jax.ShapeDtypeStruct((), jnp.float32), x)

        def cases(dtype):
            return [_tune.Case(f"{n}", n, (jax.ShapeDtypeStruct((n,), dtype),)) for n in (100, 10, 1000)]

        return {"an op": _tune.Op(call, cases)}


@pytest.fixture
def tuned():
    """Times an op, and returns what was chosen for both numbers of bits, and the lines of the table."""

    def run(costs, wrong=(), drift=0.0):
        clock, lines = Clock(costs, drift), []
        fastest = _tune.tune(clock.op(wrong), clock, lines.append)
        assert list(fastest.get("an op", {})) in ([], [16, 32])
        return fastest.get("an op", {}).get(16), lines

    return run


def costs(xla, **kernels):
    """Seconds of a call for 10, 100 and 1,000 elements."""
    return {(by, 10 ** (k + 1)): cost for by, row in {"xla": xla, **kernels}.items() for k, cost in enumerate(row)}


@pytest.mark.long
def test_the_kernel_that_wins_from_a_size_on_is_chosen_from_there(tuned):
    measured, lines = tuned(costs([1, 2, 4], mosaic_gpu=[2, 1, 1], triton=[1, 1, 2]))
    assert measured == Measured("mosaic_gpu", 100)
    assert "| an op | 16 | 1000 | mosaic_gpu | 1000000.0 | 4.00 |" in lines
    assert tuned(costs([4, 4, 4], mosaic_gpu=[1, 8, 2], triton=[3, 3, 3]))[0] == Measured("mosaic_gpu", 1000)
    assert tuned(costs([4, 4, 4], triton=[3, 3, 3]))[0] == Measured("triton", 10)


@pytest.mark.long
def test_a_kernel_that_loses_on_the_largest_arguments_is_not_chosen(tuned):
    assert tuned(costs([4, 4, 4], mosaic_gpu=[1, 1, 4], triton=[1, 1, 5]))[0] is None


@pytest.mark.long
def test_a_gain_within_the_noise_does_not_count(tuned):
    times = costs([4, 4, 4], triton=[3.9, 3.9, 3.9])
    assert tuned(times)[0] == Measured("triton", 10)
    assert tuned(times, drift=0.01)[0] is None


def test_a_wrong_result_and_an_error_are_shown_and_not_chosen(tuned):
    measured, lines = tuned(costs([4, 4, 4], triton=[1, 1, 1]), wrong=["triton"])
    assert measured is None
    assert any("| triton | ValueError: another result than XLA's" in line for line in lines)
    assert any("| mosaic_gpu | AssertionError: does not run here" in line for line in lines)


def test_the_median_of_the_batches_after_the_first_counts():
    ticks = iter([0, 90, 100, 102, 200, 206, 300, 304])
    assert _tune.median_seconds(lambda: 0, lambda: next(ticks), calls=2, batches=3) == 2


def test_every_op_is_timed_on_arguments_that_its_kernels_read():
    for op in _tune.OPS.values():
        for dtype in _tune.DTYPES.values():
            cases = list(op.cases(dtype))
            assert len({case.size for case in cases}) == len(cases) > 1
            for case in cases:
                jax.eval_shape(lambda *args, op=op: op.call(*args, implementation="xla"), *case.args)


def timed(clock, cost):
    def layer(x, w, cotangent):
        def advance(x):
            clock.now += cost
            return np.float32(0)

        return io_callback(advance, jax.ShapeDtypeStruct((), jnp.float32), x)

    return layer


@pytest.mark.parametrize(
    ("cost", "says"),
    [
        (2.0, "in mxfp8 is 0.50 x as fast as in bfloat16; it does not pay: use bfloat16 or float8."),
        (0.5, "in mxfp8 is 2.00 x as fast as in bfloat16; it pays."),
    ],
)
def test_it_says_whether_mxfp8_pays(monkeypatch, cost, says):
    monkeypatch.setattr(_tune, "LAYER", (64, 32, 96))
    clock = Clock({})
    assert _tune.mxfp8_pays(clock, [timed(clock, 1.0), timed(clock, cost)]).endswith(says)


def test_it_says_where_mxfp8_does_not_run(monkeypatch):
    monkeypatch.setattr(_tune, "LAYER", (64, 32, 96))

    def refuses(*args):
        raise NotImplementedError("no such unit")

    says = _tune.mxfp8_pays(ways=[_tune.in_bfloat16, refuses])
    assert says == "mxfp8 does not run on this GPU (NotImplementedError: no such unit): use bfloat16 or float8."


# The file


FASTEST = {"check_finite": {16: Measured("triton", 100)}, "quantize": {32: Measured("mosaic_gpu", 1024)}}


def test_what_was_written_is_read(cache):
    assert fastest_implementation("quantize", [jnp.float32], 1024) == "xla"
    file = _measured.write(KIND, FASTEST)
    assert file == str(cache / "pallas_kernels" / "A_fine_GPU_80_GB_.json")
    assert [path.name for path in (cache / "pallas_kernels").iterdir()] == ["A_fine_GPU_80_GB_.json"]
    assert _measured.measurements(KIND) == FASTEST
    assert fastest_implementation("quantize", [jnp.float32], 1024) == "mosaic_gpu"
    assert fastest_implementation("quantize", [jnp.float32], 1023) == "xla"
    assert fastest_implementation("quantize", [jnp.bfloat16], 1024) == "xla"
    assert fastest_implementation("quantize_blocks", [jnp.float32], 1024) == "xla"
    assert fastest_implementation("check_finite", [jnp.float16, jnp.bfloat16], 100) == "triton"
    assert fastest_implementation("check_finite", [jnp.float16, jnp.float32], 100) == "xla"
    assert fastest_implementation("check_finite", [], 100) == "xla"
    assert fastest_implementation("quantize", [jnp.float32], 1024, "Another GPU") == "xla"


def test_the_ops_read_it_once_when_they_are_traced(monkeypatch):
    x = jnp.ones((128, 128))
    _measured.write(KIND, {op: {32: Measured("triton", 1)} for op in ("check_finite", "quantize", "quantize_blocks")})
    reads = []
    load = json.loads
    monkeypatch.setattr(_measured.json, "loads", lambda text: reads.append(text) or load(text))
    for op in (quantize, lambda x: quantize(x, block=32), check_finite):
        names = {eqn.primitive.name for eqn in jax.make_jaxpr(op)(x).eqns}
        assert names & {"quantize", "unscale_check"}
    assert len(reads) == 1


def test_the_environment_turns_it_off(monkeypatch):
    _measured.write(KIND, FASTEST)
    monkeypatch.setenv("JMP_AMP_KERNELS", "xla")
    assert fastest_implementation("quantize", [jnp.float32], 1024) == "xla"
    _measured.measurements.cache_clear()
    monkeypatch.setenv("JMP_AMP_KERNELS", "triton")
    with pytest.raises(ValueError, match="JMP_AMP_KERNELS must be \"xla\" or empty, got 'triton'"):
        fastest_implementation("quantize", [jnp.float32], 1024)


GOOD = {"versions": _measured.versions(), "fastest": {"quantize": {"32": ["triton", 1]}}}
BROKEN = {
    "another JAX": json.dumps(GOOD | {"versions": GOOD["versions"] | {"jax": "0.1"}}),
    "other kernels": json.dumps(GOOD | {"versions": GOOD["versions"] | {"kernels": "0"}}),
    "cut off": json.dumps(GOOD)[:-9],
    "empty": "",
    "bytes": b"\xff\xfe",
    "a list": "[1]",
    "a number": "1",
    "no versions": json.dumps({"fastest": {}}),
    "no entries": json.dumps({"versions": GOOD["versions"]}),
    "entries that are no table": json.dumps(GOOD | {"fastest": [1]}),
    "an entry of another form": json.dumps(GOOD | {"fastest": {"quantize": {"32": "triton"}}}),
    "a kernel of no name": json.dumps(GOOD | {"fastest": {"quantize": {"32": [None, 1]}}}),
    "an unknown kernel": json.dumps(GOOD | {"fastest": {"quantize": {"32": ["cutlass", 1]}}}),
    "a module that is no kernel": json.dumps(GOOD | {"fastest": {"quantize": {"32": ["reference", 1]}}}),
    "an infinite size": json.dumps(GOOD | {"fastest": {"quantize": {"32": ["triton", float("inf")]}}}),
    "bits that are no number": json.dumps(GOOD | {"fastest": {"quantize": {"NaN": ["triton", 1]}}}),
    "nested too deeply": "[" * 100_000,
    "a size that is no number": json.dumps(GOOD | {"fastest": {"quantize": {"32": ["triton", "large"]}}}),
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_a_stale_or_broken_file_is_ignored_with_one_warning(content, cache):
    file = cache / "pallas_kernels" / "A_fine_GPU_80_GB_.json"
    file.parent.mkdir()
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.warns(UserWarning, match=r"A_fine_GPU_80_GB_.json .*`python -m pallas_kernels tune` writes it again"):
        assert jax.jit(lambda x: quantize(x))(jnp.ones((32, 32))).rows.shape == (32, 32)  # as in a train step
    assert fastest_implementation("quantize", [jnp.float32], 1024) == "xla"
    _measured.write(KIND, FASTEST)
    assert fastest_implementation("quantize", [jnp.float32], 1024) == "mosaic_gpu"


def test_a_file_that_cannot_be_opened_is_ignored_with_a_warning(cache):
    (cache / "pallas_kernels" / "A_fine_GPU_80_GB_.json").mkdir(parents=True)
    with pytest.warns(UserWarning, match="cannot be read"):
        assert fastest_implementation("quantize", [jnp.float32], 1024) == "xla"


@pytest.mark.parametrize(
    ("platform", "variables", "folder"),
    [
        ("linux", {"XDG_CACHE_HOME": "/c"}, "/c"),
        ("linux", {"XDG_CACHE_HOME": "", "HOME": "/h"}, "/h/.cache"),
        ("darwin", {"XDG_CACHE_HOME": "/c", "HOME": "/h"}, "/h/Library/Caches"),
        ("win32", {"LOCALAPPDATA": "/l"}, "/l"),
    ],
)
def test_the_file_lies_in_the_users_cache(platform, variables, folder, monkeypatch):
    monkeypatch.setattr(_measured, "sys", types.SimpleNamespace(platform=platform))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert _measured.path("T4") == f"{folder}/pallas_kernels/T4.json"


# The command


def test_the_command_prints_the_table_and_writes_the_file(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["pallas_kernels", "tune"])
    monkeypatch.setattr(command, "tune", lambda: FASTEST)
    monkeypatch.setattr(command, "mxfp8_pays", lambda: "It does not pay.")
    command.main()
    assert _measured.measurements(KIND) == FASTEST
    printed = capsys.readouterr().out
    chosen = "- check_finite, 16 bits, from size 100: triton"
    for part in (KIND, jax.__version__, _measured.path(KIND), chosen, "It does not pay."):
        assert part in printed
    assert "quantize, 16 bits" not in printed


def test_without_a_gpu_the_command_fails_and_says_why():
    done = subprocess.run([sys.executable, "-m", "pallas_kernels", "tune"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "need an NVIDIA GPU, but JAX runs on cpu; nothing was measured" in done.stderr


def test_on_a_machine_without_a_gpu_no_file_is_read(monkeypatch):
    monkeypatch.setattr(_measured, "device_kind", lambda: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fastest_implementation("quantize", [jnp.float32], 1024) == "xla"
