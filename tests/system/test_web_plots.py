"""The plots of the page in a real browser: their axes, words, tables and files, two jobs, and single clients."""

import csv
from collections.abc import Iterator
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.system.browser import Window, open_browser
from tests.system.scripted_page import JOB, ROUND, Script, served

HOSTILE = "=1+<b>bold</b>"
ACCURACIES = {6: [0.5, 0.8, 0.9], 7: [0.975, 0.977, 0.976]}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def desk(browser: Any) -> Any:
    """Return a context of the browser, which keeps the page's files for all tests."""
    return browser.new_context(viewport={"width": 1280, "height": 900})


@pytest.fixture(scope="module")
def stage() -> Iterator[tuple[Script, str]]:
    """Serve the page for all tests, each of which sets what it shows."""
    script = Script()
    with served(script) as url:
        yield script, url


@pytest.fixture
def script(stage: tuple[Script, str]) -> Script:
    """Two jobs of three rounds each, with two clients."""
    script = stage[0]
    script.play(Script())
    for job_id, accuracies in ACCURACIES.items():
        for i, accuracy in enumerate(accuracies, start=1):
            number = 3 * (job_id - 6) + i
            about = {"round": number, "job_id": job_id, "job_round": i, "accuracy": accuracy, "loss": 1 - accuracy}
            script.history.append(ROUND | about)
            facts = {"num_samples": 9, "train_seconds": 1.5 * i, "upload_bytes": 10, "download_bytes": 20}
            script.parts[number] = [
                facts | {"client_id": name, "metrics": {"loss": i / 4}} for name in ("ann", HOSTILE)
            ]
    script.now["jobs"] = [JOB, JOB | {"job_id": 6, "name": "first", "state": "completed"}]
    script.now["round"] = script.history[-1]
    script.settings = {7: {"lr": 0.5, "epochs": 1, "seed": 0}, 6: {"lr": 0.5, "epochs": 1, "seed": 3}}
    script.changed = ["lr"]
    return script


@pytest.fixture
def url(script: Script, stage: tuple[Script, str]) -> str:
    return stage[1]


@pytest.fixture
def window(desk: Any, url: str) -> Iterator[Window]:
    window = Window(desk, url)
    window.until("document.getElementById('accuracy').data?.[0].x.length === 3")
    yield window
    assert window.complaints == []
    window.close()


def tool(window: Window, plot: str, name: str) -> Any:
    return window.page.locator(f"#{plot}-title + .tools button", has_text=name)


def saved(window: Window, plot: str, kind: str) -> bytes:
    """Return the file that a button of a plot saves."""
    with window.page.expect_download() as download:
        tool(window, plot, kind).click()
    assert download.value.suggested_filename.endswith(f".{kind.lower()}")
    return Path(download.value.path()).read_bytes()


def test_small_differences_of_the_accuracy_look_small(window: Window, script: Script) -> None:
    low, high = window.page.evaluate("document.getElementById('accuracy').layout.yaxis.range")
    assert high - low >= 0.05 - 1e-9
    assert low <= 0.975 < 0.977 <= high
    said = window.text("#accuracy-caption")
    assert "97.60 % in round 3; highest 97.70 % in round 2." in said
    assert f"The axis shows {100 * low:.0f} % to {100 * high:.0f} %." in said


@pytest.mark.parametrize(
    ("accuracies", "span"), [([1.0, 1.0], (0.95, 1.0)), ([0.0, 0.0], (0.0, 0.05)), ([0.0, 1.0], (0.0, 1.0))]
)
def test_the_axis_of_an_accuracy_stays_between_0_and_1(
    desk: Any, script: Script, url: str, accuracies: list[float], span: tuple[float, float]
) -> None:
    script.history = [
        ROUND | {"round": i, "job_round": i, "accuracy": accuracy} for i, accuracy in enumerate(accuracies, 1)
    ]
    window = Window(desk, url)
    window.until("document.getElementById('accuracy').data?.[0].x.length === 2")
    assert tuple(window.page.evaluate("document.getElementById('accuracy').layout.yaxis.range")) == pytest.approx(span)
    assert ("The axis shows" in window.text("#accuracy-caption")) == (span[0] > 0)
    window.close()


def test_two_jobs_are_compared_in_one_plot(window: Window, script: Script) -> None:
    window.page.click("#others summary")
    assert window.page.locator("#other label").all_text_contents() == ["6 · first · completed"]
    window.page.check("#other input")
    for plot in ("accuracy", "loss"):
        window.until(f"document.getElementById('{plot}').data.length === 2")
    names = window.page.evaluate("document.getElementById('accuracy').data.map((trace) => trace.name)")
    assert names == ["job 7, clients' samples", "job 6, clients' samples"]
    assert window.page.evaluate("document.getElementById('accuracy').data[1].y") == ACCURACIES[6]
    window.until("document.querySelector('#settings').textContent.includes('job 6: 3')")  # the seed
    assert "epochs" not in window.text("#settings")
    window.page.uncheck("#other input")
    window.until("document.getElementById('accuracy').data.length === 1")


def test_the_settings_that_differ_from_the_defaults_are_shown_and_the_rest_on_demand(window: Window) -> None:
    window.until("document.querySelectorAll('.settings div').length === 1")
    assert window.text("#settings").split() == ["lr", "0.5"]
    window.page.check("#all-settings")
    window.until("document.querySelectorAll('.settings div').length === 3")


def test_a_plot_is_saved_as_csv(window: Window) -> None:
    rows = list(csv.reader(StringIO(saved(window, "accuracy", "CSV").decode())))
    assert rows == [["round", "clients' samples"], ["1", "0.975"], ["2", "0.977"], ["3", "0.976"]]


def test_a_plot_is_saved_as_png(window: Window) -> None:
    with Image.open(BytesIO(saved(window, "accuracy", "PNG"))) as image:
        assert image.size == (1800, 960)
        colors = image.convert("RGB").getcolors(1 << 24)
        assert colors is not None
        assert len(colors) > 20  # it shows a curve and text


def test_a_plot_can_be_read_as_a_table(window: Window) -> None:
    assert window.page.get_attribute("#accuracy", "role") == "img"
    assert window.page.get_attribute("#accuracy", "aria-describedby") == "accuracy-caption"
    tool(window, "accuracy", "Table").click()
    cells = window.page.locator("section:has(#accuracy) tbody td").all_text_contents()
    assert cells == ["3", "97.60 %", "2", "97.70 %", "1", "97.50 %"]
    assert window.page.locator("#accuracy").is_hidden()
    assert tool(window, "accuracy", "Table").get_attribute("aria-pressed") == "true"
    tool(window, "accuracy", "Table").click()
    assert window.page.locator("#accuracy").is_visible()


def test_each_client_has_a_curve_on_demand(window: Window) -> None:
    asked: list[str] = []
    window.page.on("request", lambda request: asked.append(request.url))
    window.page.click("#client-curves summary")
    window.until("document.getElementById('by-client').data?.length === 2")
    assert next(url for url in asked if "api/rounds" in url).endswith("clients=1")
    assert window.page.evaluate("document.getElementById('by-client').data[0].y") == [1.5, 3, 4.5]
    window.page.select_option("#figure", "metric loss")
    window.until("document.getElementById('by-client').data[0].y[0] === 0.25")
    shown = window.page.locator("#by-client .legendtext").all_text_contents()
    assert shown == [HOSTILE, "ann"]  # as text, not as markup
    header = next(csv.reader(StringIO(saved(window, "by-client", "CSV").decode())))
    assert header == ["round", f"'{HOSTILE}", "ann"]  # a spreadsheet does not compute it


def test_no_table_is_cut_on_a_phone(browser: Any, script: Script, url: str) -> None:
    client: dict[str, Any] = {
        "client_id": "a-client-with-a-long-name-of-some-hospital",
        "state": "watching",
        "activity": "training",
    }
    client |= {"progress": 0.4, "software": "fedring/0.1.0", "address": "ipv4:10.100.100.100:50123", "updates": 12}
    model: dict[str, Any] = {
        "version": 9,
        "round": 3,
        "job_id": 6,
        "job_round": 3,
        "best_of_job": True,
        "digest": "blake3-01234567",
    }
    model |= {"parameters": 10, "bytes": 19900, "created_at": "", "accuracy": 0.9, "loss": 0.1}
    script.now |= {"clients": [client | {"part": "delivered"}], "models": [model]}
    script.history[-1] |= {"missing": ["another-client-with-a-long-name"], "stalled": [], "stragglers": []}
    window = Window(browser, url, viewport={"width": 390, "height": 800}, is_mobile=True, has_touch=True)
    window.until("document.querySelectorAll('#rounds tbody tr').length === 3")
    window.until("document.querySelectorAll('#clients tbody tr').length === 1")
    cut = """[...document.querySelectorAll('td')].filter((cell) => {
      const box = cell.getBoundingClientRect();
      return !box.width || box.left < 0 || box.right > innerWidth || cell.scrollWidth > cell.clientWidth;
    }).map((cell) => cell.textContent)"""
    assert window.page.evaluate(cut) == []
    assert window.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    titles = window.page.locator("#rounds tbody tr:first-child td").evaluate_all(
        "(all) => all.map((c) => c.dataset.title)"
    )
    assert {"received", "from model", "new model", "missing"} <= set(titles)
    window.close()


def test_the_servers_number_of_a_round_is_in_its_tooltip(window: Window) -> None:
    first = window.page.locator("#rounds tbody tr").first.locator("td span span").first
    assert (first.inner_text(), first.get_attribute("title")) == ("3", "number 6 of the server")
    assert window.page.get_attribute("#round-name", "title") == "number 6 of the server"
