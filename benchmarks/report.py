"""A table as a page of the docs."""


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
