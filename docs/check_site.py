"""Opens each page of the built site, as wide as a desktop and as a phone, and lists what is wrong with it.

    pip install -e ".[docs]" playwright
    mkdocs build --strict -d site && python docs/check_site.py site --browser /usr/bin/chromium [--pictures FOLDER]

Wrong are: a page that scrolls sideways; a line of code that does, at desktop width; an image that is missing, or larger
than its file; a link to a page or an anchor that does not exist. `--pictures` saves a picture of each page.
"""

import argparse
import functools
import http.server
import pathlib
import threading
from collections.abc import Iterator
from urllib.parse import unquote, urldefrag

from playwright.sync_api import Page, sync_playwright

WIDTHS = {"desktop": 1280, "phone": 390}
FOUND = """() => {
  const all = query => [...document.querySelectorAll(query)];
  return {
    overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    code: all(".md-content pre > code").filter(x => x.checkVisibility()).filter(x => x.scrollWidth > x.clientWidth)
      .map(x => x.innerText.slice(0, 60)),
    missing: all("img").filter(x => !x.naturalWidth).map(x => x.src),
    blurred: all("img").filter(x => !x.src.endsWith("svg")).filter(x => x.width > x.naturalWidth).map(x => x.src),
    links: all("a[href]").map(x => x.href),
    ids: all("[id]").map(x => x.id),
  };
}"""


def faults_of(page: Page, name: str, root: str, out: pathlib.Path | None) -> Iterator[str]:
    """Yields the faults of a page at each width, and links within the site as `-> address`."""
    for kind, width in WIDTHS.items():
        page.set_viewport_size({"width": width, "height": 900})
        page.goto(root + name, wait_until="load")
        found = page.evaluate(FOUND)
        if found["overflow"] > 0:
            yield f"{name}: scrolls sideways by {found['overflow']} pixels ({kind})"
        if kind == "desktop":
            yield from (f"{name}: code scrolls sideways: {text!r}" for text in found["code"])
            yield from (f"-> {link}" for link in found["links"] if link.startswith(root))
            yield from (f"# {root}{name}#{x}" for x in found["ids"])
        yield from (f"{name}: no image {src} ({kind})" for src in found["missing"])
        yield from (f"{name}: shown larger than it is: {src} ({kind})" for src in found["blurred"])
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            page.screenshot(path=out / f"{name.strip('/').replace('/', '_') or 'home'}_{kind}.png", full_page=True)


def faults_of_site(site: pathlib.Path, browser: str | None, out: pathlib.Path | None, only: str) -> list[str]:
    """Returns all faults."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    root = f"http://127.0.0.1:{server.server_port}/"
    names = sorted(str(path.parent.relative_to(site)).strip(".") for path in site.glob("**/index.html"))
    with sync_playwright() as playwright:
        page = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"]).new_page()
        lines = [x for name in names if only in name for x in faults_of(page, f"{name}/".lstrip("/"), root, out)]
    faults = [line for line in lines if line[:2] not in ("->", "# ")]
    anchors = {line.removeprefix("# ") for line in lines if line.startswith("# ")}
    for link in sorted({unquote(line.removeprefix("-> ")) for line in lines if line.startswith("->")}):
        address, anchor = urldefrag(link)
        path = site / address.removeprefix(root)
        if not path.exists():
            faults.append(f"no page {address.removeprefix(root)}")
        elif anchor and (path / "index.html").exists() and not only and link not in anchors:
            faults.append(f"no anchor {link.removeprefix(root)}")
    return faults


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("site", type=pathlib.Path, help="the folder that `mkdocs build` wrote")
    parser.add_argument("--browser", help="the path of a Chromium; by default, Playwright's own")
    parser.add_argument("--pictures", type=pathlib.Path, help="save pictures of the pages here")
    parser.add_argument("--only", default="", help="only pages whose address contains this")
    options = parser.parse_args()
    faults = faults_of_site(options.site, options.browser, options.pictures, options.only)
    print(*faults, f"{len(faults)} faults", sep="\n")
    raise SystemExit(bool(faults))
