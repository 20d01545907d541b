"""What `first_nonfinite` says of broken programs: the line, the cause and the cure, and how long it takes.

    JAX_PLATFORMS=cpu python benchmarks/broken_programs.py [--out docs/benchmarks/broken_programs.md] [--only NAME,NAME]

The programs are those of `broken_models.py` and `broken_kinds.py` in `tests/helpers/programs`; `tests/helpers/judge.py`
judges. It takes about four minutes.
"""

import collections
import itertools
import multiprocessing
import os
import pathlib
import re
import sys
import time
from concurrent.futures import ProcessPoolExecutor

os.environ.setdefault("KERAS_BACKEND", "jax")
sys.path.extend(str(pathlib.Path(__file__).parents[1] / "tests/helpers" / folder) for folder in ("", "programs"))

import broken_kinds
import jax
import numpy as np
from broken_models import MODELS
from judge import assert_cure_is_right, is_cause_right, is_line_right
from report import arguments, head, report, row

from jmp_amp.debug import first_nonfinite

WHY = """\
[`first_nonfinite`](../my-loss-is-nan.md) on programs of the kinds that people report: float16 masks and eps, variances,
norms at 0, logarithms of probabilities, exponentials of large logits, quotients of counts, products of many factors,
divergences with zeros, optimizers, rare classes, loops, scanned layers, `vmap`, Flax NNX, Equinox and Keras. Each
stands in the tests beside its correct form, with the lines at fault and parts of the cause that the report must name.

The *line* is right if it is one of those lines, the *cause* if it names all parts. A *cure*, lines in float32 or a
smaller loss scale, is applied to the source: it is right if value and gradient are finite, and those of the correct
form in float64. Where the cell is empty, the report gives the cause alone. The time is the CPU time of one call, which
finds compiled what the programs above it have in common with it.
"""
NOTES = """
Where there is no cure, float32 is not enough. The cause is then the whole answer, with a link to the formulas and to
the usual choices. The tool was built on these programs, so the figures of others may be worse.
"""


def judged(name):
    """Returns the report of a program, and the cells of its row: line, cause, cure and time."""
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    model = MODELS[name]
    fun, args = model.make()
    start = time.process_time()
    found = first_nonfinite(fun)(*args)
    seconds = time.process_time() - start
    is_cured = found is not None and (found.cure or "loss scale that is" in found.cause)
    cure = ""
    if is_cured:
        try:
            assert_cure_is_right(model, found)
            cure = "right"
        except Exception:  # code that does not run is wrong, too
            cure = "**wrong**"
    verdicts = ("yes" if ok else "**no**" for ok in (is_line_right(model, found), is_cause_right(model, found)))
    return found, (*verdicts, cure, f"{seconds:.1f}")


def said(found):
    """What the report says, as a cell."""
    if found is None:
        return "None"
    hidden = f"hidden by {re.sub(r' at .*', '', found.hidden_by)}: " if found.hidden_by else ""
    text = re.sub(r" (at|in the backward pass of) [\w/.]*:\d+ \([^)]*\)(, iteration [\d, ]*\d)?", "", found.cause)
    return (hidden + text + (". Cure: in float32" if found.cure else "")).replace("|", "\\|")


def table(names, jobs):
    rows, times = [], []
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        for name, (found, cells) in zip(names, pool.map(judged, names), strict=True):
            rows.append(cells)
            times.append(float(cells[-1]))
            yield row(f"`{name}`", said(found), *cells)
    n_alarms = sum(first_nonfinite(fun)(*args) is not None for fun, args in broken_kinds.CORRECT.values())
    lines, causes, cures, *_ = map(collections.Counter, zip(*rows, strict=True))
    yield ""
    yield f"Of {len(rows)} programs, the line is right in {lines['yes']} and the cause in {causes['yes']}."
    yield f"{cures['right']} have a cure that is right, {cures['**wrong**']} a cure that is wrong, "
    yield f"{cures['']} none. The median of the time is {np.median(times):.1f} s, the longest {max(times):.1f} s."
    yield f"Of {len(broken_kinds.CORRECT)} correct programs with deliberate infinities, {n_alarms} raise an alarm."


if __name__ == "__main__":
    parser = arguments(__doc__, only="names of programs, separated by commas")
    parser.add_argument("--jobs", type=int, default=1, help="how many processes judge")
    args = parser.parse_args()
    names = args.only.split(",") if args.only else [*MODELS]
    lines = head("program", "what it said", "line", "cause", "cure", "s")
    report("Broken programs", WHY, itertools.chain(lines, table(names, args.jobs)), NOTES, args.out)
