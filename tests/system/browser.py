"""A real browser with a page, which records the page's errors and requests."""

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
    """Start a headless Chromium; skip the test if it is not installed."""
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


class Window:
    """One browser window with the page."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        """Load the page, and wait until it is connected to the server."""
        self.hosts: set[str] = set()  # to which the page has sent requests
        self.complaints: list[str] = []  # errors and warnings
        self.page = browser.new_page(**options)
        self.page.set_default_timeout(1000 * SECONDS)
        self.page.on("request", lambda request: self.hosts.add(urlsplit(request.url).hostname or request.url[:40]))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", self._hear)
        self.page.goto(url)
        self.until("document.querySelector('#link').dataset.link === 'live'")

    def until(self, condition: str) -> None:
        """Return when this JavaScript expression is true in the page."""
        # wait_for_function would poll with eval, which the page's policy forbids.
        self.page.evaluate(_UNTIL % (condition, 1000 * SECONDS, json.dumps(condition)))

    def text(self, selector: str) -> str:
        """Return the visible text of an element."""
        return str(self.page.inner_text(selector))

    def points(self, plot: str) -> list[int]:
        """Return the number of points of each curve of the plot."""
        return list(
            self.page.evaluate(f"(document.getElementById('{plot}').data ?? []).map((trace) => trace.x.length)")
        )

    def shot(self, path: Path, *, whole: bool) -> bytes:
        """Save a picture of the whole page, or of the visible part; return the contents of the file."""
        picture = self.page.screenshot(full_page=whole, animations="disabled")
        with Image.open(BytesIO(picture)) as image:  # with 128 colours, the file has a third of the size
            image.convert("RGB").quantize(128).save(path, optimize=True)
        return path.read_bytes()

    def close(self) -> None:
        self.page.close()

    def _hear(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(f"{message.text} ({message.location})")
