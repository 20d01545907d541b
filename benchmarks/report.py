"""Pages of the docs: their tables, and the options of the benchmarks that write them."""

import argparse
import pathlib
import re


def arguments(doc, only=None):
    """Returns the parser of a benchmark: `--out`, and `--only` with its help, if there is one."""
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    if only:
        parser.add_argument("--only", default="", help=only)
    parser.add_argument("--out", type=pathlib.Path, help="also write the page to this file")
    return parser


def row(*cells):
    """A line of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def head(*cells):
    """The first two lines of a table."""
    return row(*cells), "|---" * len(cells) + "|"


def report(title, head, table, notes, out):
    """Prints the lines of a table as they come; with `out`, writes the page that they make."""
    lines = [head, ""]
    print(*lines, sep="\n")
    for line in table:
        print(line, flush=True)
        lines.append(line)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text("\n".join([f"# {title}", "", *lines, notes]))


def report_section(heading, lines, out):
    """Prints the lines of a section as they come; with `out`, puts them into its page: in its place, or at the end."""
    section = [heading, ""]
    print("", *section, sep="\n")
    for line in lines:
        print(line, flush=True)
        section.append(line)
    if out:
        top, *others = re.split(r"\n(?=## )", out.read_text())
        sections = {each.partition("\n")[0]: each for each in others} | {heading: "\n".join(section)}
        out.write_text("\n\n".join([each.rstrip() for each in (top, *sections.values())]) + "\n")
