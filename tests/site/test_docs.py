"""What the README and the docs show runs as it stands."""

import importlib.util
import inspect
import pathlib
import re
import types

import jax.numpy as jnp
import numpy as np
import pytest

import jmp_amp as amp

pytestmark = pytest.mark.usefixtures("users_code")

ROOT = pathlib.Path(__file__).parents[2]
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md"))
PRINTS = "docs/sharp-bits.md"  # has a test of its own


def code(page):
    return "\n".join(re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S))


def test_code_of_the_pages_fits_their_width():
    for page in PAGES:
        blocks = re.findall(r"^ *```py\w*\n(.*?)^ *```", (ROOT / page).read_text(), re.M | re.S)
        assert [line for block in blocks for line in block.splitlines() if len(line) > 100] == [], page


@pytest.mark.parametrize(
    "page",
    [  # the home page; `.ci/run` runs the others too
        pytest.param(page, marks=() if page == "docs/index.md" else pytest.mark.slow)
        for page in PAGES
        if code(page) and page != PRINTS
    ],
)
def test_code_of_a_page_runs(page):
    for library in re.findall(r"^(?:import|from) (\w+)", code(page), re.M):
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"needs {library}")
    exec(compile(code(page), page, "exec"), {})


@pytest.mark.slow
def test_the_sharp_bits_print_what_their_page_shows(capsys):
    page = (ROOT / PRINTS).read_text()
    exec(compile(code(PRINTS), PRINTS, "exec"), {})
    assert capsys.readouterr().out == "".join(re.findall(r"^```text\n(.*?)^```", page, re.M | re.S))


def test_readme_train_step_trains():
    def loss_fn(params, batch):
        return jnp.mean((jnp.tanh(batch @ params["w"] + params["b"]) - 0.5) ** 2)

    params = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
    step = {"loss_fn": loss_fn, "params": params}
    exec(compile(code("README.md"), "README.md", "exec"), step)
    state, losses = step["opt_state"], []
    for _ in range(20):
        params, state, loss = step["train_step"](params, state, jnp.ones((4, 3)))
        losses.append(float(loss))
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]
    # The first step fits into the scale that it starts with; an overflow halves it and moves nothing.
    skipped, state, _ = step["train_step"](params, state, jnp.full((4, 3), jnp.nan))
    assert all(np.array_equal(skipped[k], params[k]) for k in params)
    assert amp.get_loss_scale(state) == 2**15


def reference():
    """The names that the pages of the reference list."""
    pages = "".join(path.read_text() for path in sorted(ROOT.glob("docs/reference/*.md")))
    return re.findall(r"^::: (.+)$", pages, re.M)


def test_every_public_name_has_an_example_and_one_place_in_the_reference():
    modules = [amp.debug, amp.watch, amp.interop.torch, amp.interop.apex]
    names = {f"jmp_amp.{name}": getattr(amp, name) for name in amp.__all__}
    names = {name: x for name, x in names.items() if not isinstance(x, types.ModuleType | str)}
    names |= {f"{module.__name__}.{name}": getattr(module, name) for module in modules for name in module.__all__}
    assert len(amp.__all__) <= 32
    for name, value in names.items():
        assert reference().count(name) == 1, name
        assert ">>> " in inspect.getdoc(value), name


def test_the_page_of_the_ops_is_that_of_the_table():
    spec = importlib.util.spec_from_file_location("write_ops", ROOT / "docs/write_ops.py")
    write_ops = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(write_ops)
    assert write_ops.PAGE.read_text() == write_ops.page(), "run `python docs/write_ops.py`"


def test_every_page_of_figures_has_a_script_and_a_line_on_the_index():
    pages = {path.stem for path in (ROOT / "docs/benchmarks").glob("*.md")} - {"index"}
    assert pages == set(re.findall(r"\[(\w+)\]\(\1\.md\)", (ROOT / "docs/benchmarks/index.md").read_text()))
    of_gpu = {page for page in pages if "<!-- gpu: " in (ROOT / f"docs/benchmarks/{page}.md").read_text()}  # `gpu.py`
    assert pages == of_gpu | {page for page in pages if (ROOT / f"benchmarks/{page}.py").exists()}


def test_reference_names_exist():
    for name in reference():
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name


def home_table(head):
    """The rows of the table of the home page with this head, as lists of cells."""
    table = (ROOT / "docs/index.md").read_text().partition(head)[2].partition("\n\n")[0]
    return [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_the_home_page_gives_the_figures_of_the_benchmarks():
    page = (ROOT / "docs/benchmarks/autocast_cost.md").read_text()
    costs = {}
    for model, variant, moved, *_, held in re.findall(r"^\| ([^|]+) \| ([^|]+)" + r" \| ([\d.]+)" * 4, page, re.M):
        costs[model, variant] = float(moved), float(held)
    rows = home_table("| model | bytes moved, x float32")
    assert len(rows) == 5
    for model, *shown in rows:
        ratios = [
            costs[model, "autocast"][i] / costs[model, other][i] for i in (0, 1) for other in ("float32", "by hand")
        ]
        assert [f"{ratio:.2f}" for ratio in ratios] == shown, model


def test_the_home_page_counts_the_programs_of_the_conformance_page():
    page = (ROOT / "docs/benchmarks/conformance.md").read_text()
    libraries, passed = (
        [cell.strip() for cell in re.search(rf"^\| {name} \|(.*)\|$", page, re.M)[1].split("|")]
        for name in (r"programs that pass", r"\*\*all\*\*")
    )
    head = "| | jmp_amp | grampax | jaxamp | jmp | mpx |"
    counts = dict(zip(libraries, passed, strict=True))
    ((question, *shown),) = home_table(head)
    assert question == "programs that pass, of 102"
    for name, count in zip(head.split(" | ")[1:], shown, strict=True):
        assert counts[name.strip(" |")].startswith(f"{count} of 102 ")


def test_all_pages_say_the_same_of_the_low_residual_stream():
    page = (ROOT / "docs/benchmarks/autocast_cost.md").read_text()
    rows = re.findall(r"^\| ((?:GPT|ViT|encoder)[^|]+) \| ([^|]+)" + r" \| ([\d.]+)" * 4, page, re.M)
    figures = {(model, variant): (float(moved), float(held)) for model, variant, moved, *_, held in rows}
    models = {model for model, variant in figures if variant == 'save="all"'}
    saved = []
    for i in (0, 1):
        shares = [1 - figures[m, 'residual_stream="low"'][i] / figures[m, "autocast"][i] for m in models]
        saved.append(f"{100 * min(shares):.0f} to {100 * max(shares):.0f}%")
    guide = (ROOT / "docs/autocast.md").read_text()
    for text in (guide, page, inspect.getdoc(amp.autocast)):
        assert f"saves {saved[0]} of the bytes" in " ".join(text.split())
        assert f"and {saved[1]} of " in " ".join(text.split())
