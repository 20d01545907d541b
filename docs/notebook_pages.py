"""A hook of MkDocs: shows the notebooks of the docs, as Markdown with their saved outputs."""

import html
import json
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page


class NotebookFile(File):
    """A notebook, which becomes a page of the site."""

    def is_documentation_page(self) -> bool:
        """Overrides MkDocs' rule that pages are Markdown."""
        return True


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Declares the notebooks as pages, not as files to copy."""
    for file in list(files):
        if file.src_uri.endswith(".ipynb"):
            files.remove(file)
            files.append(NotebookFile(file.src_uri, config.docs_dir, config.site_dir, config.use_directory_urls))


def on_page_read_source(page: Page, config: MkDocsConfig) -> str | None:
    """Returns a notebook as Markdown, and None for all other pages."""
    if not isinstance(page.file, NotebookFile):
        return None
    cells = json.loads(page.file.content_string)["cells"]
    return "\n\n".join(block for cell in cells for block in _to_markdown(cell))


def _to_markdown(cell: dict[str, Any]) -> list[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return [source]
    return [f"```python\n{source}\n```", *map(_output, cell["outputs"])]


def _output(output: dict[str, Any]) -> str:
    content = {kind: "".join(lines) for kind, lines in output.get("data", {"text/plain": output.get("text")}).items()}
    if "image/png" in content:
        return f"![Picture drawn by the code above](data:image/png;base64,{content['image/png'].strip()})"
    if "text/html" in content:
        return f"<div>{content['text/html']}</div>"
    text = content["text/plain"].rstrip()
    is_prose = max(map(len, text.splitlines())) > 100  # its lines are broken, those of tables are not
    return f'<pre style="white-space: {"pre-wrap" if is_prose else "pre"}"><code>{html.escape(text)}</code></pre>'
