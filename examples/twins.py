"""What the examples share: a run in low precision beside its twin, the same run in float32.

`main` gives a training loop a command line, a progress bar, a table of its scores and a picture of its losses.
"""

import argparse
import inspect
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import jmp_amp as amp

PRECISIONS = ("float32", "float16", "bfloat16")
Scores = dict[str, float]
Train = Callable[[str, int, int, Callable[..., None]], Scores]


def main(
    train: Train, steps: int, argv: Sequence[str] | None = None, draw: Callable[[Path], None] | None = None
) -> dict[str, Scores]:
    """Trains in float32 and in float16, or as the command line says.

    Args:
        train: `train(precision, steps, seed, log)` calls `log(loss=loss, **amp.metrics(opt_state))` once a step and
          returns scores on data that it did not train on.
        steps: how many, unless the command line says so.
        argv: the command line; that of the process if not given.
        draw: writes pictures of its own into a folder, at the end.

    Returns:
        The scores of each run.
    """
    source = inspect.getmodule(train)
    parser = argparse.ArgumentParser(
        description=(source.__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--precision", choices=("compare", *PRECISIONS), default="compare", help="float32 and float16")
    parser.add_argument("--steps", type=int, default=steps, help="optimizer steps")
    parser.add_argument("--seed", type=int, default=0, help="of the initial parameters and the batches")
    parser.add_argument("--out", type=Path, default=Path("runs", Path(source.__file__).stem), help="where pictures go")
    config = parser.parse_args(argv)
    if config.steps < 1:
        parser.error(f"argument --steps: must be at least 1, got {config.steps}")
    rows, scores = [], {}
    for precision in PRECISIONS[:2] if config.precision == "compare" else [config.precision]:
        with amp.watch.live(config.steps, precision) as view:

            def log(precision: str = precision, view: amp.watch.LiveView = view, **values: Any) -> None:
                view.update(**values)
                rows.append({"run": precision, **values})
                step = sum(row["run"] == precision for row in rows)
                if step % max(1, config.steps // 10) == 0 and not sys.stdout.isatty():
                    # A log file gets the live line only at the end.
                    print(f"{precision} {step}/{config.steps} loss {float(values['loss']):.4g}", flush=True)

            scores[precision] = train(precision, config.steps, config.seed, log)
    rows = jax.device_get(rows)
    Console().print(summarize(rows, scores))
    config.out.mkdir(parents=True, exist_ok=True)
    amp.watch.plot_history(rows, config.out / "history.png")
    print(f"Wrote {config.out / 'history.png'}")
    if draw is not None:
        draw(config.out)
    return scores


def summarize(rows: Sequence[dict[str, Any]], scores: dict[str, Scores]) -> Table:
    names = list(next(iter(scores.values())))
    table = Table("run", *names, "loss scale", "skipped steps", box=SIMPLE_HEAD)
    for run, values in scores.items():
        last = [row for row in rows if row["run"] == run][-1]
        shown = [f"{values[name]:.4g}" for name in names]
        table.add_row(run, *shown, f"2^{math.log2(last['loss_scale']):g}", f"{last['total_notfinite']}")
    return table
