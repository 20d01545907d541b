"""Executes the notebooks and saves them beside their sources: `python docs/write_notebooks.py [NAME ...]`."""

import pathlib
import sys

import jupytext
import nbformat
from nbclient import NotebookClient

NOTEBOOKS = pathlib.Path(__file__).parent / "notebooks"


def executed(source: pathlib.Path) -> nbformat.NotebookNode:
    """Returns the notebook of a source with its outputs, without what differs from one execution to the next."""
    notebook = jupytext.read(source)
    NotebookClient(
        notebook, record_timing=False, coalesce_streams=True, resources={"metadata": {"path": str(NOTEBOOKS)}}
    ).execute()
    for i, cell in enumerate(notebook.cells):
        cell.id = f"cell-{i}"
        if "outputs" in cell:  # progress is on stderr
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        for output in cell.get("outputs", ()):
            if {"image/png", "text/html"} & set(output.get("data", ())):
                del output.data["text/plain"]  # the `repr` of what is shown
    return notebook


if __name__ == "__main__":
    for name in sys.argv[1:] or [path.stem for path in NOTEBOOKS.glob("*.py")]:
        print(name)
        nbformat.write(executed(NOTEBOOKS / f"{name}.py"), NOTEBOOKS / f"{name}.ipynb")
