"""Writes what `benchmarks/gpu.py` measured into the pages: `python docs/write_gpu.py FOLDER`.

A page says where: between `<!-- gpu: NAMES -->` and `<!-- /gpu -->` are the tables whose names begin with the pattern
NAMES. If the folder has none of them, what is there stays.
"""

import json
import pathlib
import re
import sys

DOCS = pathlib.Path(__file__).parent
sys.path.insert(0, str(DOCS.parent / "benchmarks"))

from gpu import all_tables  # noqa: E402 (lies in another folder)

MARKED = re.compile(r"(<!-- gpu: (.+?) -->\n).*?(\n<!-- /gpu -->)", re.S)


def write(folder: pathlib.Path, docs: pathlib.Path = DOCS) -> None:
    """Puts the tables of a folder into the pages."""
    files = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]

    def tables(marked: re.Match[str]) -> str:
        lines = list(all_tables(files, marked[2]))
        return "\n".join([marked[1], *lines[:-1], marked[3]]) if lines else marked[0]

    for page in docs.rglob("*.md"):
        if (text := MARKED.sub(tables, old := page.read_text())) != old:
            page.write_text(text)


if __name__ == "__main__":
    write(pathlib.Path(sys.argv[1]))
