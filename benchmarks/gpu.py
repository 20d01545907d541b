"""All that the docs say of a GPU's time and memory, measured on one in a quarter of an hour.

    python benchmarks/gpu.py [--minutes 14] [--only NAME ...] [--out FOLDER]
    python benchmarks/gpu.py --dry-run [--only NAME ...]     # compiles all of it for an H200, on any machine
    python docs/write_gpu.py FOLDER                          # puts the tables of FOLDER into the pages

The entries run in the order of `ENTRIES`, the most important first, each in a process of its own (`gpu_entry.py`).
After each one, what was measured so far is in FOLDER, in a JSON file for each GPU and in a page of the tables. Another
call measures what is missing there; what failed comes last. To measure an entry again, delete it there. What needs
torch or cuDNN is left out where they are not installed. In a copy of the repository without `.git`, name the commit:
`COMMIT=... python benchmarks/gpu.py`.
"""

import argparse
import collections
import concurrent.futures
import datetime
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from importlib import metadata
from typing import Any, NamedTuple

from report import head, row

ROOT = pathlib.Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks/figures"
LIMIT = 400  # seconds for an entry; in a dry run, on whatever machine, an hour
NEEDED = 20  # seconds without which none is started


class Entry(NamedTuple):
    """What is measured in one process: a row of a table, or all of its rows.

    Attributes:
        table: the name of the table.
        measure: the function of `gpu_entry.py`.
        case: the model, of `models.py`.
        sizes: of the model.
        options: of the function; they also name the row.
    """

    table: str
    measure: str
    case: str
    sizes: dict[str, Any]
    options: dict[str, Any]

    @property
    def row(self):
        """The options as the docs write them: `bfloat16, attention="cudnn"`, `torch, bfloat16, compiled`."""
        words = {"library", "dtype", "state"}
        named = {name: value if name in words else f'{name}="{value}"' for name, value in self.options.items()}
        return ", ".join(name.replace("_", " ") if self.options[name] is True else text for name, text in named.items())

    @property
    def name(self):
        return f"{self.table}: {self.row}".removesuffix(": ")


BFLOAT16, FLOAT16, FLOAT32, FLOAT8 = ({"dtype": dtype} for dtype in ("bfloat16", "float16", "float32", "float8"))
ATTENTION, STREAM = {"attention": "cudnn"}, {"residual_stream": "low"}
BOTH = ATTENTION | STREAM
BY_HAND = FLOAT16 | {"by_hand": True}
TORCH = {"library": "torch"} | BFLOAT16 | {"compiled": True}
GRAPHS = TORCH | {"mode": "reduce-overhead"}
CHECKS = [{"implementation": name} for name in ("xla", "mosaic_gpu", "triton")]
STEPS = [BFLOAT16 | BOTH, TORCH, GRAPHS, FLOAT16 | BOTH, BFLOAT16 | ATTENTION, FLOAT16 | ATTENTION]
STEPS += [BFLOAT16 | STREAM, FLOAT16 | STREAM, BFLOAT16, FLOAT16, FLOAT32]
STATES = ["float32 state", "8-bit state", "float32 state, remainders", "8-bit state, remainders"]
GPT2, STACKED, LONG = {"vocab": 50257}, {"vocab": 50257, "scan": True}, {"vocab": 50257, "batch": 2, "length": 4096}
WIDE = {"layers": 8, "dim": 2048, "heads": 16, "vocab": 50304}
BERT = {"layers": 12, "batch": 16, "length": 512, "dim": 768, "heads": 12, "vocab": 30522}
TABLES = [  # the name, the function of `gpu_entry.py`, the model and its sizes, and the options of each row
    ("GPT-2 small, vocabulary 50257", "time_step", "gpt_case", GPT2, STEPS),
    ("GPT-2 small, vocabulary 50304", "time_step", "gpt_case", {"vocab": 50304}, STEPS),
    ("Kernels by kind", "time_kernels", "gpt_case", GPT2, [BFLOAT16 | BOTH, FLOAT16 | BOTH, TORCH]),
    ("A gradient by `fastest`", "compare_settings", "gpt_case", GPT2, [{}]),
    ("Optimizer state", "time_step", "gpt_case", GPT2, [BFLOAT16 | BOTH | {"state": each} for each in STATES]),
    ("Check in a step, 148 leaves", "time_step", "gpt_case", GPT2, [FLOAT16 | BOTH | each for each in CHECKS]),
    ("Check in a step, 16 leaves", "time_step", "gpt_case", STACKED, [FLOAT16 | BOTH | each for each in CHECKS]),
    ("Check alone, 148 leaves", "time_check", "gpt_case", GPT2, CHECKS),
    ("Check alone, 16 leaves", "time_check", "gpt_case", STACKED, CHECKS),
    ("ResNet-50", "time_step", "resnet_case", {}, [BFLOAT16, FLOAT16, FLOAT32, BY_HAND, TORCH]),
    ("ViT-B/16, 224 pixels", "time_step", "vit_case", {"size": 224}, [BFLOAT16 | BOTH, BFLOAT16, FLOAT32]),
    ("ViT-B/16, 256 pixels", "time_step", "vit_case", {"size": 256}, [BFLOAT16 | BOTH, BFLOAT16, FLOAT32]),
    ("BERT base, 512 tokens, dropout", "time_step", "encoder_case", BERT, [BFLOAT16 | BOTH, BFLOAT16, FLOAT32]),
    ("GPT of width 2048", "time_step", "gpt_case", WIDE, [BFLOAT16 | BOTH, FLOAT8 | BOTH, TORCH, BY_HAND, FLOAT32]),
    ("GPT-2 small, 4,096 tokens", "time_step", "gpt_case", LONG, [BFLOAT16 | BOTH, TORCH, BFLOAT16 | ATTENTION]),
    ("10 million tokens", "train", "gpt_case", GPT2 | {"batch": 16}, [BFLOAT16 | ATTENTION, BFLOAT16 | BOTH]),
    # What older pages say, too, if there is time.
    ("GPT-2 small, vocabulary 50257", "time_step", "gpt_case", GPT2, [BY_HAND, TORCH | FLOAT16]),
    ("GPT-2 small, 4,096 tokens", "time_step", "gpt_case", LONG, [BY_HAND]),
    ("10 million tokens", "train", "gpt_case", GPT2 | {"batch": 16}, [FLOAT32, FLOAT16 | ATTENTION]),
]
ENTRIES = [Entry(*model, options) for *model, rows in TABLES for options in rows]
SMALL = {"layers": 1, "batch": 2, "length": 16, "dim": 32, "heads": 2}
TINY = {  # sizes for a trial on any machine
    "gpt_case": SMALL | {"vocab": 64},
    "encoder_case": SMALL | {"vocab": 64},
    "vit_case": {"layers": 1, "batch": 2, "size": 32, "dim": 32, "heads": 2, "classes": 10},
    "resnet_case": {"batch": 2, "size": 32, "blocks": (1, 1), "width": 8, "classes": 10},
}
BASES = {  # the rows whose time is that of a column of ratios
    "x torch": "torch, bfloat16, compiled",
    "x torch with graphs": 'torch, bfloat16, compiled, mode="reduce-overhead"',
    "x by hand": "float16, by hand",
    "x float32": "float32",
}
NO_GPU = {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "JAX_ENABLE_COMPILATION_CACHE": "0"}
ABOUT = ("device", "driver", "JAX", "torch", "cuDNN", "commit")  # what each table says
TRANSPOSED = ("Kernels by kind", "10 million tokens")  # with a column for each row that was measured


def machine():
    """Returns what each table says: device, driver, versions and commit."""
    try:
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        device, driver = text_of(query).splitlines()[0].split(", ")
    except (OSError, subprocess.CalledProcessError):
        device, driver = "cpu", "none"
    found = {"device": device, "driver": driver, "JAX": metadata.version("jax")}
    for name, package in {"torch": "torch", "cuDNN": "nvidia-cudnn-cu13"}.items():
        try:
            found[name] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    commit = os.environ.get("COMMIT") or text_of(["git", "describe", "--always", "--dirty", "--exclude=*"]).strip()
    return found | {"commit": commit, "date": datetime.date.today().isoformat()}


def text_of(command):
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout


class Processes:
    """Runs entries in processes beside each other, of which one at a time is timed while the others stand still.

    All but the timed seconds of an entry is work for the CPU, so the next ones compile while one starts, traces and
    compiles. They are stopped while one is timed, because XLA also tries candidates for each product on the GPU. The
    cache of JAX is shared: its key is the program, its options, the versions and the device, a file is written once and
    never changed, and one that a killed process left cut off is compiled again. XLA keeps what it tried beside it. So a
    program that two entries share, or two calls, is compiled once.
    """

    def __init__(self, deadline, dry_run):
        cache = pathlib.Path(tempfile.gettempdir()) / "jmp_amp_gpu_cache"
        self.environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # leaves room for others
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            **(NO_GPU if dry_run else {}),
        }
        self.deadline, self.limit = deadline, 3600 if dry_run else LIMIT
        self.running, self.turn = set(), threading.Lock()

    def measured(self, request):
        """Returns what a process says of an entry, or None if the time is over."""
        limit = min(self.limit, self.deadline - time.monotonic())
        if limit < NEEDED:
            return None
        with tempfile.TemporaryFile("w+") as log:
            with self.turn:  # nor does one start beside it
                command = [sys.executable, pathlib.Path(__file__).with_name("gpu_entry.py"), json.dumps(request)]
                pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
                process = subprocess.Popen(command, env=self.environment, text=True, **pipes)
                self.running.add(process)
            timer = threading.Timer(limit, process.kill)
            timer.start()
            with process:
                answer = process.stdout.readline()
                if answer == "ready\n":
                    with self.turn:
                        answer = self.alone(process)
            timer.cancel()
            self.running.remove(process)
            log.seek(0)
            errors = [line.strip() for line in log if re.search(r"Error\b|Warning: ", line)]
        if answer.endswith("\n"):  # else it was ended while it answered
            return json.loads(answer)
        if time.monotonic() >= self.deadline:
            return None
        was_killed = process.returncode == -signal.SIGKILL
        return {"error": "killed, or not done in time" if was_killed else (errors or ["failed"])[-1][:200]}

    def alone(self, process):
        """Returns the answer of a process that is ready, while no other one runs."""
        others = self.running - {process}
        try:
            for other in others:
                other.send_signal(signal.SIGSTOP)
            os.write(process.stdin.fileno(), b"go\n")  # keeps nothing that would be written when it closes
            return process.stdout.readline()
        except BrokenPipeError:  # it was ended while it waited
            return ""
        finally:
            for other in others:
                other.send_signal(signal.SIGCONT)


def measure(entries, folder, minutes, tiny, dry_run):
    """Measures what the folder lacks, prints it and keeps it there. Returns whether no entry failed."""
    about = machine()
    if about["driver"] == "none" and not (tiny or dry_run):
        sys.exit("No NVIDIA GPU is here: `--dry-run` compiles for one, and `--tiny` tries the programs.")
    about["device"] += ", tiny models" * tiny
    file = folder / f"{re.sub(r'[^A-Za-z0-9]+', '-', about['device'])}.json"
    records = json.loads(file.read_text()) if file.exists() else {}
    known = {name for name, record in records.items() if "rows" in record}
    todo = [entry for entry in entries if dry_run or entry.name not in known]
    todo.sort(key=lambda entry: not dry_run and entry.name in records)  # what failed
    start = time.monotonic()
    processes = Processes(float("inf") if dry_run else start + 60 * minutes, dry_run)
    with concurrent.futures.ThreadPoolExecutor(max(2, (os.cpu_count() or 1) // 3)) as pool:
        futures = {}
        for entry in todo:
            request = entry._asdict() | {"row": entry.row, "dry_run": dry_run, "tiny": tiny}
            request["sizes"] = entry.sizes | (TINY[entry.case] if tiny else {})
            futures[pool.submit(processes.measured, request)] = entry
        for future in concurrent.futures.as_completed(futures):
            name, found = futures[future].name, future.result()
            if found is not None:
                print(f"{time.monotonic() - start:5.0f} s  {name}: {summary(found)}", flush=True)
            if found is not None and not dry_run:
                records[name] = {"table": futures[future].table} | about | found
                write(file, json.dumps(records, indent=1))
                write(file.with_suffix(".md"), "\n".join(all_tables([records])))
    found = [future.result() for future in futures]
    print(f"{len(todo) - found.count(None)} of {len(todo)} entries in {time.monotonic() - start:.0f} s")
    return not any(each and "error" in each for each in found)


def write(file, text):
    """Replaces a file at once, so that a process that is ended leaves the old one or the new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(text)
    part.replace(file)


def summary(found):
    rows = [
        ", ".join(f"{cell(value)} {name}" for name, value in each.items()) for each in found.get("rows", {}).values()
    ]
    return "; ".join(rows) or next(found[key] for key in ("compiled", "skipped", "error") if key in found)


def cell(value):
    return f"{value:#.4g}" if isinstance(value, float) else str(value)


def all_tables(files, names=""):
    """Yields the lines of the tables whose names begin with a pattern, one for each GPU, its versions and commit."""
    places = {entry.name: place for place, entry in enumerate(ENTRIES)}
    records = sorted((item for file in files for item in file.items()), key=lambda item: places.get(item[0], -1))
    groups = collections.defaultdict(list)
    for _, record in records:
        if "rows" in record and re.match(names, record["table"]):
            groups[record["table"], *map(record.get, ABOUT)].append(record)
    for (table, *about), found in groups.items():
        rows = {name: with_ratios(cells, found) for record in found for name, cells in record["rows"].items()}
        columns = list(dict.fromkeys(name for cells in rows.values() for name in cells))
        body = [[name, *(cell(cells.get(column, "")) for column in columns)] for name, cells in rows.items()]
        lines = [[table, *columns], *body]
        first, *rest = zip(*lines, strict=True) if table in TRANSPOSED else lines
        yield from (*head(*first), *(row(*cells) for cells in rest), "")
        versions = ", ".join(f"{name} {value}" for name, value in zip(ABOUT[1:], about[1:], strict=True) if value)
        days = sorted({record["date"] for record in found})
        yield f"On one {about[0]} with {versions}, by `benchmarks/gpu.py`, {' and '.join(days)}."
        yield ""


def with_ratios(cells, found):
    """Returns the cells of a row with the ratios of its time to those of the rows of the table in `BASES`."""
    rows = {name: each for record in found for name, each in record["rows"].items() if "ms a step" in each}
    bases = {name: rows[base]["ms a step"] for name, base in BASES.items() if base in rows}
    return cells | {name: cells["ms a step"] / base for name, base in bases.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=14, help="after which it ends, whatever is measured")
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="the entries whose names contain one")
    parser.add_argument("--out", type=pathlib.Path, default=FOLDER, metavar="FOLDER", help="where the figures are kept")
    parser.add_argument("--dry-run", action="store_true", help="compile the entries for an H200, and measure nothing")
    parser.add_argument("--tiny", action="store_true", help="run tiny models, to try the programs; times mean nothing")
    options = parser.parse_args()
    entries = [entry for entry in ENTRIES if any(name in entry.name for name in options.only)]
    sys.exit(not measure(entries, options.out, options.minutes, options.tiny, options.dry_run))


if __name__ == "__main__":
    main()
