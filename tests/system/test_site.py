"""The site: it builds without a warning, its links lead somewhere, and its pages are near."""

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.conftest import ROOT, missing
from tests.once import made_once

pytestmark = pytest.mark.timeout(900)
FRONT = Path("docs/site/index.html")


class Read(HTMLParser):
    """The links of a page, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors.update(name for key in ("id", "name") if (name := given.get(key)))
        if link := given.get({"a": "href", "link": "href", "img": "src", "script": "src"}.get(tag, "")):
            self.links.append(link)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Read]:
    if importlib.util.find_spec("sphinx") is None:
        missing("the package `sphinx`")
    site = made_once(tmp_path_factory, "pages", build) / "site"
    return {path.relative_to(site): Read(path.read_text()) for path in site.rglob("*.html")} | {
        path.relative_to(site): Read("") for path in site.rglob("*") if path.is_file() and path.suffix != ".html"
    }


def build(out: Path) -> None:
    options = ["--quiet", "--fail-on-warning", "--keep-going", "--conf-dir", "docs/site", "--builder", "html"]
    command = [sys.executable, "-m", "sphinx", *options, "-d", str(out / ".doctrees"), ".", str(out / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def targets(page: Path, read: Read) -> Iterator[tuple[Path, str]]:
    """Yield the file and the anchor of each link of a page that stays in the site."""
    for link in read.links:
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            continue
        path = Path(*page.parent.parts, unquote(parts.path)) if parts.path else page
        flat: list[str] = []
        for part in path.parts:
            flat = flat[:-1] if part == ".." else [*flat, part]
        yield Path(*flat), unquote(parts.fragment)


def test_no_link_is_dead_and_every_page_is_near(pages: dict[Path, Read]) -> None:
    # One test, since each process that gets one of several would build the site anew.
    check_links(pages)
    check_front_page(pages)
    check_first_job(pages)
    check_api(pages)


def check_links(pages: dict[Path, Read]) -> None:
    dead = {
        f"{page}: {path}#{anchor}"
        for page, read in pages.items()
        for path, anchor in targets(page, read)
        if path not in pages or (anchor and path.suffix == ".html" and anchor not in pages[path].anchors)
    }
    assert dead == set()


def check_front_page(pages: dict[Path, Read]) -> None:
    near = {path for path, _ in targets(FRONT, pages[FRONT])}
    written = {path.relative_to(ROOT).with_suffix(".html") for path in (ROOT / "docs").glob("*.md")}
    assert written - near == set()
    assert Path("docs/site/api.html") in near


def check_first_job(pages: dict[Path, Read]) -> None:
    first = {path for path, _ in targets(FRONT, pages[FRONT])}
    assert Path("docs/first-job.html") in first
    assert any("data" in anchor or "model" in anchor for anchor in pages[Path("docs/first-job.html")].anchors)


def check_api(pages: dict[Path, Read]) -> None:
    anchors = pages[Path("docs/site/api.html")].anchors
    assert {"fedring.control.connect", "fedring.simulation.simulate", "fedring.offers.offers"} <= anchors
