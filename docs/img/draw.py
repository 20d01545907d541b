"""Draws the pictures of pages by running their code: `python docs/img/draw.py`."""

import pathlib
import re

IMAGES = pathlib.Path(__file__).parent


def run(page):
    """Returns what the code of a page leaves behind."""
    scope = {}
    exec("\n".join(re.findall(r"^```python\n(.*?)^```", (IMAGES.parent / page).read_text(), re.M | re.S)), scope)
    return scope


page = run("worse-than-float32.md")
page["comparison"].plot(IMAGES / "compare.png")
page["figure"].savefig(IMAGES / "underflow.png")
run("watching.md")["figure"].savefig(IMAGES / "history.png")
run("tutorial/train-step.md")["figure"].savefig(IMAGES / "tutorial.png")
