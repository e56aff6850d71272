"""The page in a real browser, with real daemons.

With FEDRING_FIGURES=DIR, pictures of the page are saved in DIR; docs/figures has such pictures.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, path_to
from tests.fault.faulty_fleet import SECONDS, StartedJob
from tests.fault.gate import Gate
from tests.fleets import Control, Fleet
from tests.system.browser import Window, open_browser

HOSTILE = '<img src=x onerror="window.owned=1">&amp;<script>window.owned=1</script><b>'
PHONE: dict[str, Any] = {
    "viewport": {"width": 390, "height": 1500},
    "device_scale_factor": 1,
    "is_mobile": True,
    "has_touch": True,
}
DESK: dict[str, Any] = {"viewport": {"width": 1280, "height": 900}}
ROUNDS = 8
DIGITS: dict[str, Any] = {
    "name": "digits",
    "start": "fresh",
    "rounds": ROUNDS,
    "min_clients": 2,
    "epochs": 8 if "FEDRING_FIGURES" in os.environ else 1,  # pictures show curves that rise
    "batch_size": 16,
    "lr": 0.002,
}
TRUSTED = {"trusted": ["fedring", "user_trainers"]}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def desk(browser: Any) -> Any:
    """Return a context of the browser, which keeps the page's files for all tests."""
    return browser.new_context(**DESK)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Start a server with its page, and two clients, which many tests give jobs."""
    with Fleet(tmp_path_factory.mktemp("fleet"), {"web_port": 0}, [{}] * 2) as fleet:
        yield fleet


@pytest.fixture
def window(desk: Any, fleet: Fleet) -> Iterator[Window]:
    """Open the page; at the end, assert that it had no errors and used no other hosts."""
    window = Window(desk, fleet.web)
    yield window
    assert window.hosts == {"127.0.0.1"}
    assert window.complaints == []
    window.close()


def run(fleet: Fleet, **keys: Any) -> int:
    """Run a job, which must complete; return its id."""
    with Control(fleet.control) as control:
        started = StartedJob(fleet, control, DIGITS | keys)
        started.until("job_ended")
        assert control.job(started.job_id).state == "completed"
        return started.job_id


def picture(window: Window, name: str, tmp_path: Path) -> None:
    """Save a picture of the page, which must not be wider than the window."""
    folder = Path(os.environ.get("FEDRING_FIGURES", tmp_path))
    phone = window.page.viewport_size["width"] < 500
    assert window.shot(folder / f"{name}.png", whole=not phone).startswith(b"\x89PNG")
    assert window.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (
        "the page is wider than the window"
    )


def test_a_job_can_be_followed_live_without_a_reload(desk: Any, tmp_path: Path) -> None:
    with Fleet(tmp_path, {"web_port": 0}, [{}] * 2) as fleet:
        window = Window(desk, fleet.web)
        follow_first_job(window, fleet, tmp_path)
        assert (window.hosts, window.complaints) == ({"127.0.0.1"}, [])
        window.close()


def follow_first_job(window: Window, fleet: Fleet, tmp_path: Path) -> None:
    """Check all parts of the page while the first job of a server runs."""
    assert "No job has run yet" in window.text("#now")
    assert "flctl start-round" in window.text("#now")
    window.until("document.querySelectorAll('#clients tbody tr').length === 2")
    picture(window, "web-empty", tmp_path)
    job_id = run(fleet)
    window.until(f"document.querySelectorAll('#rounds tbody tr').length === {ROUNDS}")
    window.until("document.querySelector('.badge').textContent === 'completed'")
    for plot, curves in {"accuracy": 1, "loss": 1, "bytes": 2}.items():  # two curves: upload and download
        lengths = f"(document.getElementById('{plot}').data ?? []).map((curve) => curve.x.length)"
        window.until(f"{lengths}.join() === '{','.join([str(ROUNDS)] * curves)}'")
    window.until(f"document.querySelectorAll('#accuracy .points path').length === {ROUNDS}")
    window.until(f"document.querySelectorAll('#models tbody tr').length === {ROUNDS + 1}")
    assert "uniform" in window.text("#totals")
    assert "batch_size" in window.text("#settings")
    window.page.click("#client-curves summary")
    window.until(
        f"(document.getElementById('by-client').data ?? []).map((one) => one.x.length).join() === '{ROUNDS},{ROUNDS}'"
    )
    window.page.click("#client-curves summary")
    window.until(f"document.querySelector('#events').textContent.includes('job {job_id} (digits) is completed')")
    with Control(fleet.control) as control:
        last = control.rounds(limit=1)[0]
    accuracy = f"{100 * last.eval_correct / last.eval_total:.2f} %"
    window.until(f"document.querySelector('#tiles').innerText.includes('{accuracy}')")
    window.until("document.querySelectorAll('#clients .muted').length === 2")  # both are idle
    picture(window, "web", tmp_path)
    for plot in ("accuracy", "bytes"):
        window.page.hover(f"#{plot} .nsewdrag", force=True)
        window.until(f"document.querySelector('#{plot} .hoverlayer')?.textContent.includes('round ')")


def test_the_page_shows_each_round_while_a_job_runs(window: Window, fleet: Fleet) -> None:
    window.page.evaluate(WATCH_ROUNDS)
    with Control(fleet.control) as control:
        started = StartedJob(fleet, control, DIGITS | {"rounds": 10_000})
        window.until("window.seen.length > 2")
        control.stop_job()
        started.until("job_ended")


WATCH_ROUNDS = """() => {
  window.seen = [];
  new MutationObserver(() => {
    const round = document.getElementById('round-name');
    if (round && !window.seen.includes(round.textContent)) window.seen.push(round.textContent);
  }).observe(document.body, {subtree: true, childList: true});
}"""


def test_a_client_that_dies_is_shown_as_away_and_a_new_one_appears(window: Window, fleet: Fleet) -> None:
    run(fleet, rounds=1)
    window.until("document.querySelectorAll('#clients .good').length === 2")
    fleet.kill(0, signal.SIGKILL)
    window.until("document.querySelector('#clients .bad')?.textContent === 'away'")
    assert "client-0" in window.text("#clients tr:has(.bad)")
    window.until(
        "[...document.querySelectorAll('#events .bad')].some((event) => event.textContent.includes('client-0'))"
    )
    fleet.restart(0)
    window.until("document.querySelectorAll('#clients .good').length === 2")


def test_a_lost_connection_is_shown_and_restored(desk: Any, fleet: Fleet) -> None:
    window = Window(desk, fleet.web)
    run(fleet, rounds=2)
    window.until("document.querySelectorAll('#rounds tbody tr').length === 2")
    fleet.server.kill()
    window.until("!document.querySelector('#lost').hidden")
    assert "connection lost" in window.text("#link")
    assert window.page.locator("#rounds tbody tr").count() == 2  # the page keeps what it has shown
    fleet.start_server()
    window.until("document.querySelector('#link').dataset.link === 'live'")
    assert window.page.locator("#lost").is_hidden()
    run(fleet, rounds=3)
    window.until("document.querySelectorAll('#rounds tbody tr').length === 3")
    assert window.hosts == {"127.0.0.1"}
    assert all("ERR_" in complaint for complaint in window.complaints)  # the browser's own errors about failed requests
    window.close()


def test_older_jobs_can_be_chosen_with_the_keyboard(window: Window, fleet: Fleet) -> None:
    first = run(fleet, rounds=1, name="first")
    run(fleet, rounds=3, name="second")
    window.until("document.querySelectorAll('#rounds tbody tr').length === 3")
    window.page.focus("#job")
    window.page.keyboard.press("Home")
    for _ in range(2):  # the newest job, which the first option follows, and the one before
        window.page.keyboard.press("ArrowDown")
    window.until("document.querySelectorAll('#rounds tbody tr').length === 1")
    assert f"of job {first}" in window.text("#rounds-of")
    window.until("document.getElementById('accuracy').data?.[0].x.length === 1")
    assert "second" in window.text("#now")  # this part still shows the newest job
    window.page.keyboard.press("Home")
    window.until("document.querySelectorAll('#rounds tbody tr').length === 3")
    window.page.evaluate("document.activeElement.blur()")
    missed = {"skip", "job", "metric", "clients", "events", "rounds", "models"}
    for _ in range(80):  # the headings of events are links, too
        window.page.keyboard.press("Tab")
        missed.discard(window.page.evaluate("document.activeElement.id || document.activeElement.className"))
        if not missed:
            break
    assert missed == set()


def test_names_of_jobs_do_not_become_markup(desk: Any, tmp_path: Path) -> None:
    gate, env = Gate(tmp_path), path_to(ROOT / "tests" / "fault")
    fleet = Fleet(tmp_path, TRUSTED | {"web_port": 0}, [TRUSTED] * 2, env=env)
    gate.close_for(fleet.clients[1])
    with fleet, Control(fleet.control) as control:
        window = Window(desk, fleet.web)
        job = {"name": HOSTILE, "trainer": "user_trainers:gated", "min_clients": 2, "evaluate": False}
        started = StartedJob(fleet, control, job)
        gate.wait(fleet)
        window.until("document.querySelector('.waits')?.textContent.includes('and waits for client-1')")
        assert window.text(".phases .current") == "Training"
        gate.let_through(fleet)
        started.until("job_ended")
        window.until("document.querySelector('.badge').textContent === 'completed'")
        assert window.page.get_attribute(".headline strong", "title") == HOSTILE
        assert HOSTILE in window.text("#events")
        assert window.page.get_attribute("#job option:nth-child(2)", "title") == HOSTILE
        assert window.page.evaluate("window.owned") is None
        assert window.page.locator("main img, main script, main b").count() == 0
        assert (window.hosts, window.complaints) == ({"127.0.0.1"}, [])
        window.close()


def test_a_ring_and_the_curves_of_its_job_are_shown_together(window: Window, fleet: Fleet, tmp_path: Path) -> None:
    with Control(fleet.control) as control:
        spec = {"mode": "data_parallel", "rounds": 1000, "epochs": 2, "data_parallel": {"hook": "dgc"}}
        started = StartedJob(fleet, control, DIGITS | {"name": "curves", "lr": 0.05} | spec)
        window.until("document.querySelector('#now').textContent.includes('curves')")
        window.until("document.querySelectorAll('#rounds tbody tr').length >= 6")
        window.until("document.querySelectorAll('#group svg.running .joined').length === 2")
        window.until("(document.getElementById('bytes').data ?? []).some((curve) => curve.name === 'between workers')")
        picture(window, "web-ring", tmp_path)
        control.stop_job()
        started.until("job_ended")


def test_the_ring_shows_its_members_and_a_loss(window: Window, fleet: Fleet) -> None:
    with Control(fleet.control) as control:
        spec = {"mode": "data_parallel", "name": "ring", "min_clients": 2, "epochs": 100_000, "batch_size": 8}
        started = StartedJob(fleet, control, spec | {"data_parallel": {"replacement_seconds": SECONDS}})
        started.until("group_formed")
        window.until("document.querySelectorAll('#group svg.running .joined').length === 2")
        assert window.text("#group-title") == "Ring of 2 workers"
        assert window.page.text_content("#members") == "client-0: joinedclient-1: joined"
        fleet.kill(1, signal.SIGKILL)
        window.until("document.querySelector('#group-body').textContent.includes('gathering')")
        # The client's stream and its ring end at the same time, so either event may be the newest.
        window.until("[...document.querySelectorAll('#events .bad')].some(e => e.textContent.includes('client-1'))")
        assert "last one ended" in window.text("#group-body")  # after either event
        fleet.restart(1)
        started.until("group_formed")
        window.until("document.querySelectorAll('#group svg.running .joined').length === 2")
        control.stop_job()
        started.until("job_ended")


def test_a_pipeline_shows_its_stages(window: Window, fleet: Fleet) -> None:
    model = {"model": "fedring.train.models:digits_mlp", "model_args": {"hidden": 32, "layers": 3}}
    with Control(fleet.control) as control:
        started = StartedJob(fleet, control, {"mode": "pipeline", "epochs": 100_000, "batch_size": 32, **model})
        started.until("group_formed")
        window.until("document.querySelectorAll('#group svg.running rect').length === 2")
        assert window.text("#group-title") == "Pipeline of 2 workers"
        assert [one.text_content() for one in window.page.locator("#group .rank").all()] == ["stage 0", "stage 1"]
        control.stop_job()
        started.until("job_ended")


def test_the_page_fits_a_phone_and_has_a_dark_theme(browser: Any, fleet: Fleet, tmp_path: Path) -> None:
    run(fleet)
    for name, options in {"web-phone": PHONE, "web-dark": DESK | {"color_scheme": "dark"}}.items():
        window = Window(browser, fleet.web, **options)
        window.until(f"document.getElementById('bytes').data?.[0].x.length === {ROUNDS}")
        picture(window, name, tmp_path)
        dark = window.page.evaluate("getComputedStyle(document.documentElement).backgroundColor") == "rgb(14, 19, 26)"
        assert dark == (name == "web-dark")
        assert window.complaints == []
        window.close()


def test_a_job_without_accuracy_shows_none_and_any_metric_can_be_plotted(desk: Any, tmp_path: Path) -> None:
    module = {"trusted": ["fedring", "user_metrics"]}
    parts = [{**module, "partition_index": index, "partition_count": 2} for index in range(2)]
    own = {name: f"user_metrics:{name}" for name in ("model", "loss")}
    own |= {"data": "user_metrics:texts", "trainer": "user_metrics:train", "evaluator": "user_metrics:evaluate"}
    job = {**own, "rounds": 2, "lr": 0.5, "best_by": "min eval/perplexity"}
    code = ROOT / "tests" / "fixtures_user_code"
    with Fleet(tmp_path, {**module, "web_port": 0}, parts, env=path_to(code)) as fleet:
        run(fleet, **job)
        window = Window(desk, fleet.web)
        window.until("document.querySelectorAll('#rounds tbody tr').length === 2")
        window.until("document.querySelector('#metric').value === 'eval/perplexity'")
        window.until("document.querySelectorAll('#accuracy .scatterlayer .point').length === 2")
        tiles = window.page.evaluate("document.querySelector('#tiles').textContent")
        assert "eval/perplexity" in tiles
        assert "best 1.2" in window.page.evaluate(
            "document.querySelector('#models tbody tr').textContent"
        )  # the newest
        assert "Accuracy" not in tiles
        window.page.select_option("#metric", "train/words_sum")
        window.until("document.querySelector('#accuracy').data[0].y.every((value) => value === 240)")
        window.page.select_option("#metric", "accuracy")
        window.until("document.querySelector('#accuracy').textContent.includes('not defined')")
        assert window.complaints == []
        window.close()
