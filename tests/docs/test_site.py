"""The site: its pages have a place, its reference is complete, and it looks right in a browser."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from docs.example_pages import PROFILE, REPORT, SWEEP, profile, report, sweep
from markdown_it import MarkdownIt
from support.browser import needs_browser, rendered
from support.documents import DOCS, blocks, pages

CONFIGURATION = DOCS / "site" / "mkdocs.yml"
WIDTHS = (390, 1280)


def _nav() -> list[str]:
    """The pages that the navigation names; folders end in a slash."""
    # The configuration may have tags that MkDocs alone understands.
    settings = yaml.safe_load(CONFIGURATION.read_text("utf-8"))

    def places(entry: Any) -> Iterator[str]:
        for place in entry.values() if isinstance(entry, dict) else [entry]:
            if isinstance(place, str):
                yield place
            else:
                for inner in place:
                    yield from places(inner)

    return [place for entry in settings["nav"] for place in places(entry)]


def test_every_page_has_a_place_in_the_navigation() -> None:
    made = {place for place in _nav() if place.startswith("reference/")}
    named = {place for place in _nav() if place not in made and not place.endswith("/")}
    assert named == {page.name for page in DOCS.glob("*.md")}
    assert "adr/" in _nav()
    in_folders = {p.parent.relative_to(DOCS).as_posix() for p in DOCS.glob("*/**/*.md")}
    assert in_folders == {"adr"}


# The reference


@pytest.fixture(scope="module")
def reference() -> Iterator[Any]:
    """The module that makes the pages of the Python interface."""
    sys.path.insert(0, str(DOCS / "site"))
    try:
        yield importlib.import_module("python_reference")
    finally:
        sys.path.remove(str(DOCS / "site"))


def test_every_name_of_the_reference_exists(reference: Any) -> None:
    for module in reference.MODULES:
        found = importlib.import_module(module)
        assert [name for name in reference.names(module) if not hasattr(found, name)] == []
        for name, hidden in reference.MODULES[module].internal.items():
            methods = dir(getattr(found, name))
            assert all(any(re.fullmatch(each, m) for m in methods) for each in hidden), name


def test_the_reference_has_what_pages_import(reference: Any) -> None:
    known = {f"{module}.{name}" for module in reference.MODULES for name in reference.names(module)}
    known |= set(reference.MODULES)
    # Names with a page at their own module are the same objects elsewhere.
    known |= {
        f"{module}.{name}" for module, page in reference.MODULES.items() for name in page.elsewhere
    }
    for page in pages():
        for block in blocks(page):
            if block.language != "python":
                continue
            for node in ast.walk(ast.parse(block.text)):
                if isinstance(node, ast.ImportFrom) and "coreml_delegate" in str(node.module):
                    names = {f"{node.module}.{alias.name}" for alias in node.names}
                    assert names <= known, f"{block.location}: {sorted(names - known)}"


# The examples, which ``python -m tests.docs.example_pages`` writes


def test_the_report_is_what_the_first_page_writes(tmp_path: Path) -> None:
    assert report(tmp_path) == REPORT.read_text("utf-8")


def _profiled(page: str) -> tuple[list[str], list[str]]:
    """Headings of a profile, and the names of its modules and operations."""
    headings = re.findall(r"<h[12]>.*?</h[12]>|<th.*?</th>", page)
    return headings, sorted(re.findall(r"<tr><td[^>]*><code>(.*?)</code></td>", page))


@pytest.mark.slow
def test_the_profile_is_what_its_page_writes(tmp_path: Path) -> None:
    shown = _profiled(PROFILE.read_text("utf-8"))
    assert shown[1]
    assert _profiled(profile(tmp_path)) == shown


def _swept(page: str) -> tuple[list[str], list[str]]:
    """Headings of a sweep's page, and the names of its jobs."""
    headings = re.findall(r"<h[1-3]>.*?</h[1-3]>|<th.*?</th>", page)
    return headings, sorted(set(re.findall(r"\w+\[[\w-]+\]", page)))


@pytest.mark.slow
def test_the_sweep_is_what_its_guide_writes(tmp_path: Path) -> None:
    shown = _swept(SWEEP.read_text("utf-8"))
    assert len(shown[1]) > 1
    assert _swept(sweep(tmp_path)) == shown


# The built site


# On one worker, so that the site is built once.
_BUILT = pytest.mark.xdist_group("site")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built") / "site"
    command = ["-m", "mkdocs", "build", "--quiet", "-f", CONFIGURATION, "-d", folder]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class Resources(HTMLParser):
    """Collects the addresses that a page loads by itself."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ("script", "img", "iframe", "source"):
            self.addresses.append(given.get("src") or "")
        if tag == "link" and given.get("rel") != "canonical":
            self.addresses.append(given.get("href") or "")


@pytest.mark.slow
@_BUILT
def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    found = list(site.rglob("*.html"))
    assert len(found) > 60
    for page in found:
        for address in Resources(page.read_text("utf-8")).addresses:
            assert not re.match(r"(https?:)?//", address), f"{page.name}: {address}"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import )['\"]?(https?:)?//", sheet.read_text("utf-8"))


@pytest.mark.slow
@_BUILT
def test_pages_have_the_form_that_commonmark_gives_them(site: Path) -> None:
    """MkDocs reads Markdown by rules of its own, which lose lists without an empty line before."""
    elements = {
        "li": "list_item_open",
        "table": "table_open",
        "pre": "fence",
        **{f"h{level}": "heading_open" for level in range(1, 5)},
    }
    for page in DOCS.rglob("*.md"):
        tokens = MarkdownIt("commonmark").enable("table").parse(page.read_text("utf-8"))
        built = (site / page.relative_to(DOCS)).with_suffix(".html").read_text("utf-8")
        article = built[built.index("<article") : built.index("</article")]
        for tag, kind in elements.items():
            expected = sum(t.type == kind and t.tag in (tag, "code") for t in tokens)
            assert len(re.findall(rf"<{tag}[ >]", article)) == expected, f"{page.name}: {tag}"


_MEASURE = """\
<!DOCTYPE html>
<meta charset="utf-8">
<body><script>
for (const [page, width] of CASES) {
  const frame = document.createElement("iframe");
  frame.width = width;
  frame.height = 900;
  frame.src = page;
  frame.onload = () => {
    const row = document.createElement("p");
    const content = frame.contentDocument;
    row.textContent = JSON.stringify([page, width, content.documentElement.scrollWidth,
      content.querySelector("h1") !== null]);
    document.body.append(row);
  };
  document.body.append(frame);
}
</script></body>
"""


@pytest.mark.slow
@_BUILT
@needs_browser
def test_no_page_is_wider_than_the_window(site: Path) -> None:
    """Tables and code scroll by themselves, on a phone too."""
    addresses = sorted(p.relative_to(site).as_posix() for p in site.rglob("*.html"))
    cases = [[address, width] for address in addresses for width in WIDTHS]
    measure = site / "measure.html"
    measure.write_text(_MEASURE.replace("CASES", json.dumps(cases)), "utf-8")
    document = rendered(measure, "", "--allow-file-access-from-files")
    rows = [json.loads(row) for row in re.findall(r"<p>(\[.*?\])</p>", document)]
    assert len(rows) == len(cases)
    assert [row for row in rows if row[2] > row[1] or not row[3]] == []
