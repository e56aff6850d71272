"""The page with one and with a hundred clients, several jobs, links to them, and no barriers for anybody.

With FEDRING_FIGURES=DIR, pictures of the page are saved in DIR; docs/figures has such pictures.
"""

import importlib.util
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import missing
from tests.system.browser import Window, open_browser
from tests.system.scripted_page import JOB, ROUND, SERVER, Script, served

DESK: dict[str, Any] = {"viewport": {"width": 1280, "height": 900}}
DARK: dict[str, Any] = DESK | {"color_scheme": "dark"}
PHONE: dict[str, Any] = {"viewport": {"width": 390, "height": 1500}, "is_mobile": True, "has_touch": True}
LOOKS = {"light": DESK, "dark": DARK, "phone": PHONE}
MANY = (
    100 if "FEDRING_FIGURES" in os.environ else 46
)  # with 46, there is each kind of row, and axe looks at all of them
LONG = "models-of-all-wards-with-a-name-that-somebody-has-made-far-too-long-2026"
HOSPITAL = "hospital-of-the-university-of-somewhere-42"
AWAY = "it has no session: its fl-client does not run, or does not reach this server"
LABELS = "its labels are gpu=no, and the job wants gpu=yes"
NAMES = {9: LONG, 8: "second", 7: "first"}
ROUNDS = 12
WIRE = 1_220_000  # bytes of a first visit; 4.9 MB without compression


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as browser:
        yield browser


def fleet_of(count: int) -> Script:
    """Return three jobs, and `count` clients of which some are not ready."""
    script = Script()
    for job_id, name in NAMES.items():
        about = {
            "job_id": job_id,
            "name": name,
            "rounds": 20,
            "rounds_done": ROUNDS,
            "start": "fresh",
            "start_version": 3,
        }
        state = "running" if job_id == 9 else "completed"
        script.now["jobs"].append(JOB | about | {"state": state, "best_by": "max eval/f1" if job_id == 9 else ""})
        script.settings[job_id] = {"lr": job_id / 10, "epochs": 2}
        for i in range(1, ROUNDS + 1):
            accuracy = 0.1 * job_id * (1 - math.exp(-i / 4))
            metrics = {"eval/accuracy": accuracy, "eval/f1": accuracy - 0.05, "train/loss": 1 / i}
            numbers = {"round": 100 * job_id + i, "job_id": job_id, "job_round": i, "selected": count}
            script.history.append(ROUND | numbers | {"accuracy": accuracy, "loss": 1 / i, "metrics": metrics})
    script.changed = ["lr"]
    script.history[ROUNDS - 1] |= {"delivered": count - 1, "missing": [HOSPITAL]}
    script.now["clients"] = [client(i) for i in range(count)]
    script.now["server"] = SERVER | {"clients": count, "watching": count}
    script.now["round"] = script.history[ROUNDS - 1]
    told = [("round_published", 9, 911), ("client_lost", 0, 0), ("round_started", 9, 912), ("round_published", 9, 912)]
    script.now["events"] = [
        {
            "id": i,
            "at": ROUND["started_at"],
            "kind": kind,
            "job_id": job,
            "round": number,
            "client_id": "",
            "text": kind,
        }
        for i, (kind, job, number) in enumerate([("job_ended", 8, 0), ("round_published", 9, 500), *told], start=1)
    ]
    return script


def client(i: int) -> dict[str, Any]:
    state, why = ("away", AWAY) if i % 17 == 5 else ("watching", LABELS if i % 19 == 3 else "")
    about = {"client_id": HOSPITAL if i == 42 else f"client-{i}", "state": state, "why": why, "part": "asked"}
    doing = {"activity": "training" if i % 2 and state == "watching" else "", "progress": i % 10 / 10, "updates": 2 * i}
    return about | doing | {"software": "fedring/0.2.0", "address": f"ipv4:10.0.0.{i}:50123"}


@pytest.fixture(scope="module")
def stage() -> Iterator[tuple[Script, str]]:
    """Serve the page for all tests, each of which sets what it shows."""
    script = Script()
    with served(script) as url:
        yield script, url


@pytest.fixture(scope="module")
def looks(browser: Any) -> dict[str, Any]:
    """Return a context of the browser for each look, which keeps the page's files for all tests."""
    return {look: browser.new_context(**options) for look, options in LOOKS.items()}


@pytest.fixture
def hundred(stage: tuple[Script, str]) -> tuple[Script, str]:
    stage[0].play(fleet_of(100))
    return stage


@pytest.fixture
def window(looks: dict[str, Any], hundred: tuple[Script, str]) -> Iterator[Window]:
    window = Window(looks["light"], hundred[1])
    window.until(f"document.getElementById('accuracy').data?.[0].x.length === {ROUNDS}")
    yield window
    assert window.complaints == []
    window.close()


def names(window: Window) -> list[str]:
    """Return the whole names of the clients in the table, in its order."""
    cells = window.page.locator("#clients tbody td:first-child span span")
    return [str(name) for name in cells.evaluate_all("(all) => all.map((cell) => cell.title)")]


@pytest.mark.parametrize("count", [1, MANY])
@pytest.mark.parametrize("look", LOOKS)
def test_the_page_has_no_barriers(
    looks: dict[str, Any], stage: tuple[Script, str], count: int, look: str, tmp_path: Path
) -> None:
    if importlib.util.find_spec("axe_playwright_python") is None:
        missing("axe-playwright-python")
    from axe_playwright_python.sync_playwright import Axe

    stage[0].play(fleet_of(count))
    window = Window(looks[look], f"{stage[1]}#job=9&with=8,7")
    window.until("document.getElementById('accuracy').data?.length === 3")
    assert len(names(window)) == count
    found = Axe().run(window.page, options={"resultTypes": ["violations"]}).response["violations"]
    assert [(each["id"], [node["target"] for node in each["nodes"]]) for each in found] == []
    assert window.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    folder = Path(os.environ.get("FEDRING_FIGURES", tmp_path))
    assert window.shot(folder / f"web-{count}-{look}.png", whole=look != "phone")
    assert window.complaints == []
    window.close()


def test_a_first_visit_is_small_and_a_second_one_takes_nothing_but_the_page(
    browser: Any, hundred: tuple[Script, str]
) -> None:
    context = browser.new_context(**DESK)
    sizes = []
    for _ in range(2):
        window = Window(context, hundred[1])
        window.until(f"document.getElementById('accuracy').data?.[0].x.length === {ROUNDS}")
        sizes.append(window.page.evaluate(TRANSFERRED))
        window.close()
    context.close()
    assert 1_000_000 < sizes[0] < WIRE
    assert sizes[1] < 2000


TRANSFERRED = """["resource", "navigation"].flatMap((kind) => performance.getEntriesByType(kind))
  .filter((entry) => !entry.name.includes("/api/")).reduce((sum, entry) => sum + entry.transferSize, 0)"""


def test_the_figure_of_best_by_is_plotted_first(window: Window, hundred: tuple[Script, str]) -> None:
    first = "document.querySelector('main section .plot').id"
    assert (window.page.evaluate(first), window.page.input_value("#metric")) == ("accuracy", "eval/f1")
    window.page.select_option("#job", "8")  # it has no best_by, so accuracy counts
    window.until("document.querySelector('#metric').value === 'accuracy'")
    jobs = hundred[0].now["jobs"]
    hundred[0].now["jobs"] = [job | {"best_by": "min eval/loss"} for job in jobs]
    window.until(f"{first} === 'loss'")
    hundred[0].now["jobs"] = jobs
    window.until(f"{first} === 'accuracy'")


def test_several_jobs_are_drawn_over_each_other(window: Window) -> None:
    window.page.click("#others summary")
    for job_id in (8, 7):
        window.page.check(f"#other input[value='{job_id}']")
    for plot in ("accuracy", "loss"):
        window.until(f"document.getElementById('{plot}').data.length === 3")
    labels = window.page.evaluate("document.getElementById('accuracy').data.map((trace) => trace.name)")
    assert labels == [f"job {job_id}, eval/f1" for job_id in NAMES]
    colors = window.page.evaluate("document.getElementById('accuracy').data.map((trace) => trace.line.color)")
    assert len(set(colors)) == 3
    assert window.text("#others summary") == "Compare: 8, 7"
    window.until("document.querySelector('#settings').textContent.includes('job 7: 0.7')")


def test_a_link_opens_a_job_and_choosing_one_makes_a_link(looks: dict[str, Any], hundred: tuple[Script, str]) -> None:
    script, url = hundred
    window = Window(looks["light"], f"{url}#job=8&with=7")
    window.until("document.getElementById('accuracy').data?.length === 2")
    assert window.page.input_value("#job") == "8"
    assert "of job 8" in window.text("#rounds-of")
    window.page.select_option("#job", "7")
    window.until("document.querySelector('#rounds-of').textContent.includes('of job 7')")
    assert window.page.evaluate("location.hash") == "#job=7"  # a job is not compared with itself
    assert window.page.get_attribute("#job-link", "href") == "#job=7"
    window.page.click("#events h3 a[href='#job=9']")
    window.until("document.querySelector('#rounds-of').textContent.includes('of job 9')")
    script.unknown = {77}
    window.page.evaluate("location.hash = '#job=77'")
    window.until("document.querySelector('#unknown').textContent === 'This server knows no job 77.'")
    window.page.select_option("#job", "0")
    window.until("document.querySelector('#unknown').hidden")
    window.page.evaluate("location.hash = '#now'")  # a place in the page, and no job
    assert window.page.input_value("#job") == "0"
    assert window.complaints == []
    window.close()


def test_clients_can_be_searched_and_sorted(window: Window, hundred: tuple[Script, str]) -> None:
    assert len(names(window)) == 100
    window.page.fill("#client-search", "somewhere-42")
    assert names(window) == [HOSPITAL]
    assert window.text("#client-count") == "1 of 100"
    hundred[0].all_clients = hundred[0].now["clients"]
    hundred[0].now["server"] = SERVER | {"clients": 101, "watching": 100}  # so the server searches from now on
    window.until("document.querySelector('#client-count').textContent === '1 of 101'")
    assert names(window) == [HOSPITAL]  # what was typed stays
    window.page.fill("#client-search", "nobody")
    window.until("document.querySelector('#clients').innerText.trim() === 'No client fits the search.'")
    window.page.fill("#client-search", "")
    window.until("document.querySelector('#clients').innerText.includes('and 1 more: flctl clients')")
    window.page.select_option("#client-order", "client-updates")
    assert names(window)[:2] == ["client-99", "client-98"]
    window.page.select_option("#client-order", "client-ready")
    assert names(window)[:2] == ["client-5", "client-22"]  # away
    window.page.select_option("#client-order", "client-slow")
    assert names(window)[0] == "client-1"  # of those that train, and none has done less


def test_a_client_says_why_it_is_not_ready(window: Window) -> None:
    window.page.fill("#client-search", "gpu=yes")
    row = window.text("#clients tbody tr:first-child")
    assert LABELS in row
    assert "not ready" in row
    window.page.fill("#client-search", "away")
    assert AWAY in window.text("#clients tbody tr:first-child")
    window.page.fill("#client-search", "client-99")  # it is ready, and so the table needs no reasons
    assert "why not ready" not in window.text("#clients")


def test_long_names_are_cut_in_the_middle_and_whole_in_their_tooltip(window: Window) -> None:
    headline = window.page.locator(".headline strong")
    assert headline.get_attribute("title") == LONG
    assert headline.inner_text().startswith("models-of-all-wards")
    assert headline.inner_text().endswith("-long-2026")
    assert "…" in headline.inner_text()
    option = window.page.locator("#job option[value='9']")
    assert (option.get_attribute("title"), len(option.inner_text()) < 60) == (LONG, True)
    window.page.fill("#client-search", HOSPITAL)
    assert window.text("#clients tbody td:first-child") == "hospital-of-th…-somewhere-42"
    missing_ = window.page.locator(f"#rounds tbody [title='{HOSPITAL}']").first
    assert missing_.inner_text() == "hospital-of-th…-somewhere-42"


def test_events_stand_under_their_round(window: Window) -> None:
    headings = window.page.locator("#events h3").all_text_contents()
    assert headings == [
        "Job 9, round 12",
        "Server and clients",
        "Job 9, round 11",
        "Job 9, number 500 of the server",  # a round that the page does not know
        "Job 8",
    ]
    assert window.page.locator("#events h3:first-child + ol li").count() == 2
