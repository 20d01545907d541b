"""The notebooks of the docs: saved as their sources say, and executed without an error or a warning."""

import os
import pathlib

import pytest

pytest.importorskip("jupytext", reason='notebooks need `pip install -e ".[notebooks]"`')
pytest.importorskip("nbclient", reason='notebooks need `pip install -e ".[notebooks]"`')

import jupytext
import nbformat
from nbclient import NotebookClient

FOLDER = pathlib.Path(__file__).parents[2] / "docs/notebooks"
SOURCES = sorted(FOLDER.glob("*.py"))
FLAGS_OF_TESTS = (
    "JAX_DISABLE_MOST_OPTIMIZATIONS",
    "XLA_FLAGS",
)  # see conftest.py; they change what memory a step needs


def cells(notebook):
    return [(cell.cell_type, cell.source, cell.metadata.get("tags", [])) for cell in notebook.cells]


def outputs(notebook):
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def errors(notebook):
    return [output["text"] for output in outputs(notebook) if output.get("name") == "stderr"]


def pictures(notebook):
    return sum("image/png" in output.get("data", ()) for output in outputs(notebook))


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_a_saved_notebook_has_the_cells_of_its_source(source):
    saved = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    assert cells(saved) == cells(jupytext.read(source)), "run `python docs/write_notebooks.py`"
    nbformat.validate(saved)


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_a_notebook_runs_and_draws_the_pictures_that_are_saved(source):
    notebook = jupytext.read(source)
    env = {name: value for name, value in os.environ.items() if name not in FLAGS_OF_TESTS}
    # A busy machine takes long to start a kernel; there, XLA says on stderr that it compiles slowly.
    NotebookClient(notebook, startup_timeout=300, resources={"metadata": {"path": str(FOLDER)}}).execute(env=env)
    assert not [text for text in errors(notebook) if "Warning" in text]
    assert pictures(notebook) == pictures(nbformat.read(source.with_suffix(".ipynb"), as_version=4)) > 0


def test_lines_of_a_cell_are_named_after_the_cell():
    saved = nbformat.read(FOLDER / "why_is_my_loss_nan.ipynb", as_version=4)
    text = "".join(output.get("text", "") for output in outputs(saved))
    assert "(loss_by_hand)" in text
    assert "ipykernel" not in text
