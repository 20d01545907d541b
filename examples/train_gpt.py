"""Train a small GPT in float16 with dynamic loss scaling, on the source text of Python's standard library.

    python examples/train_gpt.py                        # float16, a few minutes on two CPU cores
    python examples/train_gpt.py --precision compare    # float32, float16 without loss scaling, and with it
    python examples/train_gpt.py --precision float8     # in the layers; a device without float8 units emulates it
    python examples/train_gpt.py --checkpoint DIR       # and the same with --resume, after an interruption

The model holds no cast: `amp.autocast` gives every operation its dtype. Writes `metrics.csv` and `loss.png`.
"""

import argparse
import contextlib
import csv
import dataclasses
import functools
import itertools
import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import data
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import jmp_amp as amp

VOCAB, HEADS = 256, 2
FETCH_EVERY, EVAL_EVERY, EVAL_WINDOWS, SAMPLE_BYTES = 5, 20, 64, 320
RUNS = {  # what autocast gets, and how the curve is drawn
    "float32": ({"dtype": "float32"}, {"color": "0.7", "lw": 5}),
    "float16_unscaled": ({"dtype": "float16"}, {"color": "C1"}),
    "mixed_float16": ({"dtype": "float16"}, {"color": "C0"}),
    "mixed_bfloat16": ({"dtype": "bfloat16"}, {"color": "C2"}),
    # In the layers, and at any size; the head stays bfloat16.
    "float8": ({"dtype": "bfloat16", "rules": {"layer": "float8"}}, {"color": "C4"}),
}
COMPARED = {
    "compare": ("float32", "float16_unscaled", "mixed_float16"),
    "compare_float8": ("float32", "mixed_bfloat16", "float8"),
}
MAY_DIFFER = {"precision", "out", "checkpoint", "resume"}  # in a run that is resumed; a precision has its own folder

Params = dict[str, Any]
Rows = list[dict[str, Any]]  # one a step


def option(default: Any, text: str, **more: Any) -> Any:
    return dataclasses.field(default=default, metadata={"help": text, **more})


@dataclasses.dataclass(frozen=True)
class Config:
    """The command line, an option a field."""

    precision: str = option("mixed_float16", "what to train in", choices=(*RUNS, *COMPARED))
    steps: int = option(300, "optimizer steps")
    batch: int = option(32, "sequences a step")
    context: int = option(256, "bytes a sequence")
    layers: int = option(4, "transformer layers")
    dim: int = option(64, f"width, a multiple of the {HEADS} heads, of 16 for float8")
    lr: float = option(6e-3, "peak learning rate")
    init_scale: float = option(2.0**16, "first loss scale")
    growth_interval: int = option(50, "finite steps after which the loss scale doubles")
    inject_overflow: int = option(0, "puts inf into the gradients of this step; 0: of none", metavar="STEP")
    seed: int = option(0, "of the initial parameters and the batches")
    out: str = option("runs/train_gpt", "where metrics.csv and loss.png go")
    checkpoint: str = option("", f"where to save, every {EVAL_EVERY} steps, at the end and at Ctrl-C", metavar="DIR")
    resume: bool = option(False, "go on from the last checkpoint in DIR", action="store_true")


def compared(config: Config) -> tuple[str, ...]:
    return COMPARED.get(config.precision, (config.precision,))


def init_params(config: Config) -> Params:
    """Initializes as GPT-2 does; the layers are stacked, for `jax.lax.scan`."""
    rng, n, d = np.random.default_rng(config.seed), config.layers, config.dim
    small = 0.02 / math.sqrt(2 * n)  # for what adds to the residual stream

    def normal(*shape: int, std: float = 0.02) -> np.ndarray:
        return std * rng.standard_normal(shape)

    def dense(n_in: int, n_out: int, std: float = 0.02) -> Params:
        return {"w": normal(n, n_in, n_out, std=std), "b": np.zeros((n, 1, n_out))}

    norm = {"w": np.ones((n, 1, d)), "b": np.zeros((n, 1, d))}
    layers = {"norm1": norm, "qkv": dense(d, 3 * d), "proj": dense(d, d, small)}
    layers |= {"norm2": norm, "up": dense(d, 4 * d), "down": dense(4 * d, d, small)}
    params = {"embed": normal(VOCAB, d), "position": normal(config.context, d), "layers": layers}
    params["norm"] = {"w": np.ones((1, d)), "b": np.zeros((1, d))}
    return jax.tree.map(lambda x: jnp.array(x, jnp.float32), params)


def dense(p: Params, x: jax.Array) -> jax.Array:
    return x @ p["w"] + p["b"]


def norm(p: Params, x: jax.Array) -> jax.Array:
    return jax.nn.standardize(x) * p["w"] + p["b"]


def attention(p: Params, x: jax.Array) -> jax.Array:
    q, k, v = (y.reshape(len(x), HEADS, -1) for y in jnp.split(dense(p["qkv"], x), 3, axis=-1))
    scores = jnp.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
    past = jnp.tril(jnp.ones((1, len(x), len(x)), bool))
    weights = jax.nn.softmax(jnp.where(past, scores, -jnp.inf))
    return dense(p["proj"], jnp.einsum("hqk,khd->qhd", weights, v).reshape(x.shape))


def gpt(params: Params, tokens: jax.Array) -> jax.Array:
    """The logits `[time, vocab]` for one sequence `[time]`."""

    @jax.named_scope("layer")
    def layer(x: jax.Array, p: Params) -> tuple[jax.Array, None]:
        x = x + attention(p, norm(p["norm1"], x))
        return x + dense(p["down"], jax.nn.gelu(dense(p["up"], norm(p["norm2"], x)))), None

    x = params["embed"][tokens] + params["position"][: len(tokens)]
    x, _ = jax.lax.scan(layer, x, params["layers"])
    return norm(params["norm"], x) @ params["embed"].T


def loss_fn(params: Params, batch: jax.Array) -> jax.Array:
    logits = jax.vmap(gpt, in_axes=(None, 0))(params, batch[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


@jax.jit
def generate(params: Params, prompt: jax.Array, key: jax.Array) -> jax.Array:
    """Samples bytes at temperature 0.7; `prompt` fills the context."""

    def extend(window: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        token = jax.random.categorical(key, gpt(params, window)[-1] / 0.7)
        return jnp.append(window[1:], token), token

    return jax.lax.scan(extend, prompt, jax.random.split(key, SAMPLE_BYTES))[1]


def make_optimizer(name: str, config: Config) -> optax.GradientTransformationExtraArgs:
    scaled = amp.LossScale(init_scale=config.init_scale, growth_interval=config.growth_interval)
    schedule = optax.warmup_cosine_decay_schedule(0, config.lr, config.steps // 10, config.steps, config.lr / 10)
    return amp.dynamic_loss_scale(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95)),
        loss_scale=scaled if name == "mixed_float16" else amp.LossScale.none(),
    )


@functools.partial(jax.jit, static_argnames=("loss_fn", "tx"), donate_argnames=("params", "opt_state"))
def train_step(params: Params, opt_state: Any, batch: Any, overflow: Any, *, loss_fn: Any, tx: Any) -> tuple[Any, ...]:
    loss, grads = amp.value_and_grad(loss_fn, opt_state=opt_state)(params, batch)
    grads = jax.tree.map(lambda g: jnp.where(overflow, jnp.inf, g), grads)  # --inject-overflow
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, measure(loss, grads, amp.metrics(opt_state))


def measure(loss: jax.Array, grads: Params, scaling: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """A step's row; `zero_grads` is the share of exact zeros in the gradients of the layers' matrices."""
    matrices = [grads["layers"][name]["w"].ravel() for name in ("qkv", "proj", "up", "down")]
    row = {"loss": loss, "loss_scale": scaling["loss_scale"], "skipped": jnp.where(scaling["last_finite"], 0, 1)}
    return row | {"zero_grads": jnp.mean(jnp.concatenate(matrices) == 0)}


def save(name: str, config: Config, state: Any, rows: Rows) -> None:
    state, history = (ocp.args.StandardSave(x) for x in (state, {field: column(rows, field) for field in rows[0]}))
    items = ocp.args.Composite(state=state, history=history, config=ocp.args.JsonSave(dataclasses.asdict(config)))
    options = ocp.CheckpointManagerOptions(max_to_keep=3, cleanup_tmp_directories=True)
    with ocp.CheckpointManager(Path(config.checkpoint, name).absolute(), options=options) as manager:
        manager.save(len(rows), args=items)


def restore(name: str, config: Config, state: Any, rows: Rows) -> Any:
    """Returns the saved state and fills `rows`; where the run has not begun, `state` as it is."""
    folder = Path(config.checkpoint, name).absolute()
    with ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(create=False)) as manager:
        if manager.latest_step() is None:
            if config.resume and name == compared(config)[0]:
                raise SystemExit(f"--resume: there is no checkpoint in {folder}")
            return state
        if not config.resume:
            raise SystemExit(f"--checkpoint: there is a run in {folder}; add --resume, or name another directory")
        old = manager.restore(None, args=ocp.args.Composite(config=ocp.args.JsonRestore())).config
        for field, value in dataclasses.asdict(config).items():
            if value != old.get(field) and field not in MAY_DIFFER:
                flag = "--" + field.replace("_", "-")
                raise SystemExit(f"{flag} {value}: the run in {folder} was started with {flag} {old.get(field)}")
        state, history = ocp.args.StandardRestore(state), ocp.args.StandardRestore()
        saved = manager.restore(None, args=ocp.args.Composite(state=state, history=history))
    rows += [dict(zip(saved.history, row, strict=True)) for row in zip(*saved.history.values(), strict=True)]
    return saved.state


@contextlib.contextmanager
def ctrl_c_after_the_step() -> Iterator[list]:
    """Yields a list that Ctrl-C fills, so that a step is finished and saved; a second Ctrl-C stops at once."""
    stop, before = [], signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, lambda *args: signal.default_int_handler(*args) if stop else stop.append(args))
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


def train(name: str, config: Config, text: Sequence[np.ndarray], rows: Rows, stop: list) -> Params:
    """Returns trained parameters and fills `rows`; waits for the device once in `FETCH_EVERY` steps."""
    loss, tx = amp.autocast(loss_fn, **RUNS[name][0]), make_optimizer(name, config)
    step_fn, evaluate = functools.partial(train_step, loss_fn=loss, tx=tx), jax.jit(loss)
    params = init_params(config)
    opt_state = tx.init(params)
    if config.checkpoint:
        params, opt_state = restore(name, config, (params, opt_state), rows)
    training = data.windows(text[0], config.context + 1, config.batch, config.seed)
    validation = next(data.windows(text[1], config.context + 1, EVAL_WINDOWS, config.seed))
    fetched, start, speed = len(rows), time.perf_counter(), math.nan
    log(f"{name} {len(rows)}/{config.steps} compiling")
    with amp.watch.live(config.steps, name, every=1, start=len(rows)) as view:
        for step, batch in enumerate(itertools.islice(training, len(rows), config.steps), len(rows) + 1):
            params, opt_state, measured = step_fn(params, opt_state, batch, step == config.inject_overflow)
            rows.append({"step": step, "val_loss": math.nan, "tokens_per_s": speed, **measured})
            last = bool(stop) or step == config.steps
            if step % FETCH_EVERY and not last:
                continue
            rows[fetched:] = jax.device_get(rows[fetched:])
            speed = (step - fetched) * config.batch * config.context / (time.perf_counter() - start)
            rows[fetched:] = [row | {"tokens_per_s": speed} for row in rows[fetched:]]
            if step % EVAL_EVERY == 0 or step == config.steps:
                rows[-1]["val_loss"] = evaluate(params, validation).item()
                log(f"{name} {step}/{config.steps} val loss {rows[-1]['val_loss']:.4f}")
            if config.checkpoint and (step % EVAL_EVERY == 0 or last):
                save(name, config, (params, opt_state), rows)
            status = {"loss": rows[-1]["loss"], "loss_scale": rows[-1]["loss_scale"], "tok/s": speed}
            view.update(step, **status, total_notfinite=column(rows, "skipped").sum())
            fetched, start = step, time.perf_counter()
            if last and stop:
                raise KeyboardInterrupt
    return params


def log(line: str) -> None:
    """Prints a line to a log file, which gets the live line only at the end of the run."""
    if not sys.stdout.isatty():
        print(line, flush=True)


def column(rows: Rows, field: str) -> np.ndarray:
    return np.array([row[field] for row in rows])


def validated(rows: Rows) -> Rows:
    return [row for row in rows if math.isfinite(row["val_loss"])]


def write_csv(runs: dict[str, Rows], path: Path) -> None:
    rows = [{"run": name, **row} for name, rows in runs.items() for row in rows]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def plot(runs: dict[str, Rows], path: Path) -> None:
    figure = Figure(figsize=(10, 3.8), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, rows in runs.items():
        style = {"lw": 1.8, "label": name} | RUNS[name][1]
        left.plot(column(rows, "step"), column(rows, "loss"), color=style["color"], lw=0.7, alpha=0.35)
        left.plot(*(column(validated(rows), field) for field in ("step", "val_loss")), **style)
        if name == "mixed_float16":
            skipped = [row for row in rows if row["skipped"]]
            right.step(column(rows, "step"), column(rows, "loss_scale"), where="post", **style)
            right.plot(column(skipped, "step"), column(skipped, "loss_scale"), "C3x", label="skipped step")
            right.legend(frameon=False)
    best = min(np.nanmin(column(rows, "loss")) for rows in runs.values())
    left.set_ylim(0.98 * best, 1.4 * best)
    left.legend(frameon=False)
    left.set(title="Validation loss (faint: training loss)", xlabel="step", ylabel="nats per byte")
    right.set(title="Loss scale", xlabel="step")
    right.set_yscale("log", base=2)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def summarize(runs: dict[str, Rows]) -> Table:
    """One line a run; loss and speed of the others also in relation to the first."""
    table = Table("run", "val loss", "skips", "scale", "zero grads", "tokens/s", box=SIMPLE_HEAD, padding=0)
    speeds = [np.median(column(rows, "tokens_per_s")) for rows in runs.values()]
    losses = [[math.nan, *column(validated(rows), "val_loss")][-1] for rows in runs.values()]
    for (name, rows), loss, speed in zip(runs.items(), losses, speeds, strict=True):
        skips, scale, zeros = column(rows, "skipped").sum(), np.log2(rows[-1]["loss_scale"]), column(rows, "zero_grads")
        flushed, shown_loss, shown_speed = f"{zeros.mean():.2%}, max {zeros.max():.0%}", f"{loss:.4f}", f"{speed:,.0f}"
        if rows is not next(iter(runs.values())):
            shown_loss += f" ({loss / losses[0] - 1:+.2%})"
            shown_speed += f" ({speed / speeds[0]:.2f}x)"
        table.add_row(name, shown_loss, f"{skips}", f"2^{scale:g}", flushed, shown_speed)
    return table


def parse(argv: Sequence[str] | None) -> Config:
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], formatter_class=formatter)
    flags = {"--" + field.name.replace("_", "-"): field for field in dataclasses.fields(Config)}
    for flag, field in flags.items():
        kind = {} if field.type is bool else {"type": field.type}
        parser.add_argument(flag, default=field.default, **kind, **field.metadata)
    config = Config(**vars(parser.parse_args(argv)))
    for flag, field in flags.items():
        value = getattr(config, field.name)
        if field.type in (int, float) and not (0 < value < math.inf or value == field.default):
            parser.error(f"argument {flag}: must be positive, got {value}")
    try:
        make_optimizer("mixed_float16", config)
    except ValueError as error:
        parser.error(f"argument --init-scale: {error}")
    if config.resume and not config.checkpoint:
        parser.error("argument --resume: needs --checkpoint DIR")
    if config.dim % HEADS:
        parser.error(f"argument --dim: must be a multiple of the {HEADS} heads, got {config.dim}")
    if config.inject_overflow > config.steps:
        parser.error(f"argument --inject-overflow: step {config.inject_overflow} of {config.steps} never comes")
    return config


def main(argv: Sequence[str] | None = None) -> None:
    config, text, console = parse(argv), data.library_text(4_000_000), Console()
    if config.context >= len(text[1]):
        raise SystemExit(f"--context {config.context}: there are only {len(text[1])} bytes of text to validate on")
    runs, params = {name: [] for name in compared(config)}, None
    if "float8" in runs:  # where a device has no such units: computes what one with them does
        os.environ.setdefault("JMP_AMP_EMULATE_FLOAT8", "1")
    try:
        with ctrl_c_after_the_step() as stop:
            for name, rows in runs.items():
                params = train(name, config, text, rows, stop)
    except KeyboardInterrupt:
        console.print("Interrupted: here is what there is.")
    runs = {name: jax.device_get(rows) for name, rows in runs.items() if rows}
    if not runs:
        return
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    write_csv(runs, out / "metrics.csv")
    plot(runs, out / "loss.png")
    console.print(summarize(runs))
    console.print(f"Wrote {out / 'metrics.csv'} and {out / 'loss.png'}", soft_wrap=True)
    if params:
        prompt = text[1][: config.context].astype(np.int32)
        sample = np.asarray(generate(params, prompt, jax.random.key(config.seed)), np.uint8)
        shown = sample.tobytes().decode(errors="replace")
        console.print(f"\n{SAMPLE_BYTES} bytes that {list(runs)[-1]} wrote, at temperature 0.7:\n", highlight=False)
        console.print("".join(c for c in shown if c.isprintable() or c == "\n"), markup=False, highlight=False)


if __name__ == "__main__":
    main()
