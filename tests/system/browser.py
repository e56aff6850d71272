"""A real browser that looks at a page, and remembers what it said and asked for."""

import importlib.util
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from PIL import Image

from tests.conftest import missing

_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
)
_NAMES = ("chromium", "chromium-browser", "google-chrome")
SECONDS = 120.0
_UNTIL = """() => new Promise((done, fail) => {
  const began = performance.now();
  const check = () => {
    if (%s) done();
    else if (performance.now() - began < %d) setTimeout(check, 30);
    else fail(new Error("it did not come true: " + %s));
  };
  check();
})"""


@contextmanager
def open_browser() -> Iterator[Any]:
    """Headless Chromium; the test is skipped without it."""
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None or importlib.util.find_spec("playwright") is None:
        missing("Chromium, or the package playwright")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=list(_FLAGS), timeout=1000 * SECONDS)
        try:
            yield browser
        finally:
            browser.close()


class Look:
    """One window with the page in it."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        """The page has been loaded, and has heard from the server."""
        self.hosts: set[str] = set()  # that were asked for anything
        self.complaints: list[str] = []
        self.page = browser.new_page(**options)
        self.page.set_default_timeout(1000 * SECONDS)
        self.page.on("request", lambda request: self.hosts.add(urlsplit(request.url).hostname or request.url[:40]))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", self._hear)
        self.page.goto(url)
        self.until("document.querySelector('#link').dataset.link === 'live'")

    def until(self, condition: str) -> None:
        """Return when this is true in the page."""
        # Not wait_for_function, whose polling is an eval, which the page's policy forbids.
        self.page.evaluate(_UNTIL % (condition, 1000 * SECONDS, json.dumps(condition)))

    def text(self, selector: str) -> str:
        """What a reader sees there."""
        return str(self.page.inner_text(selector))

    def points(self, plot: str) -> list[int]:
        """How many points each curve of the plot has."""
        return list(
            self.page.evaluate(f"(document.getElementById('{plot}').data ?? []).map((trace) => trace.x.length)")
        )

    def shot(self, path: Path, *, whole: bool) -> bytes:
        """A picture of the page, or of the part that the window shows, in this file."""
        picture = self.page.screenshot(full_page=whole, animations="disabled")
        with Image.open(BytesIO(picture)) as image:  # in few colours it is a third as long
            image.convert("RGB").quantize(128).save(path, optimize=True)
        return path.read_bytes()

    def close(self) -> None:
        self.page.close()

    def _hear(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(f"{message.text} ({message.location})")
