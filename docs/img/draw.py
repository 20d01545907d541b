"""Draws the card that links to the site show, and the pictures of pages, by running their code: `draw.py`."""

import pathlib
import re

from matplotlib.figure import Figure

IMAGES = pathlib.Path(__file__).parent


def run(page):
    """Returns what the code of a page leaves behind."""
    scope = {}
    exec("\n".join(re.findall(r"^```python\n(.*?)^```", (IMAGES.parent / page).read_text(), re.M | re.S)), scope)
    return scope


def draw_card():
    """The mark of `logo.svg`, the name and what it is, in 1200 x 630 pixels."""
    figure = Figure((12, 6.3), dpi=100, facecolor="#3f51b5")
    axes = figure.add_axes((0.08, 0.3, 0.2, 0.4))
    axes.bar(range(5), [4.2, 9.4, 18, 9.4, 18], 0.62, [-2.1, -4.7, -9, -4.7, -9], color=["w", "w", "w", "#ffb300", "w"])
    axes.axis("off")
    figure.text(0.33, 0.53, "jmp_amp", size=72, color="w", weight="bold")
    figure.text(0.33, 0.38, "Automatic mixed precision for JAX", size=30, color="w")
    figure.savefig(IMAGES / "card.png")


draw_card()
page = run("worse-than-float32.md")
page["comparison"].plot(IMAGES / "compare.png")
page["figure"].savefig(IMAGES / "underflow.png")
run("watching.md")["figure"].savefig(IMAGES / "history.png")
run("tutorial/train-step.md")["figure"].savefig(IMAGES / "tutorial.png")
