"""The page in a real browser, while real daemons work.

FEDRING_FIGURES=DIR keeps pictures of it in DIR; docs/figures has those of the last time.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.fault.faulty_fleet import SECONDS, StartedJob, wait_for
from tests.fleets import Control, Fleet
from tests.system.browser import Look, open_browser

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
    "rounds": ROUNDS,
    "min_clients": 2,
    "epochs": 8,
    "batch_size": 16,
    "lr": 0.002,
}
TRUSTED = {"trusted": ["fedring", "user_trainers"]}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as browser:
        yield browser


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """A server with its page, and two clients."""
    with Fleet(tmp_path, {"web_port": 0}, [{}] * 2) as fleet:
        yield fleet


@pytest.fixture
def look(browser: Any, fleet: Fleet) -> Iterator[Look]:
    """A window that has the page open, and in the end has nothing to complain of."""
    look = Look(browser, fleet.web, **DESK)
    yield look
    assert look.hosts == {"127.0.0.1"}
    assert look.complaints == []
    look.close()


def run(fleet: Fleet, **keys: Any) -> int:
    """The id of a job that has completed."""
    with Control(fleet.control) as control:
        started = StartedJob(fleet, control, DIGITS | keys)
        started.until("job_ended")
        assert control.job(started.job_id).state == "completed"
        return started.job_id


def picture(look: Look, name: str, tmp_path: Path) -> None:
    """The page can be pictured; the picture is kept if that is wanted."""
    folder = Path(os.environ.get("FEDRING_FIGURES", tmp_path))
    phone = look.page.viewport_size["width"] < 500
    assert look.shot(folder / f"{name}.png", whole=not phone).startswith(b"\x89PNG")
    assert look.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "it is wider than the window"


def test_a_job_can_be_followed_live_without_a_reload(look: Look, fleet: Fleet, tmp_path: Path) -> None:
    assert "No job has run yet" in look.text("#now")
    assert "flctl start-round" in look.text("#now")
    look.until("document.querySelectorAll('#clients tbody tr').length === 2")
    picture(look, "web-empty", tmp_path)
    job_id = run(fleet)
    look.until(f"document.querySelectorAll('#rounds tbody tr').length === {ROUNDS}")
    look.until("document.querySelector('.badge').textContent === 'completed'")
    for plot, curves in {"accuracy": 1, "loss": 1, "bytes": 2}.items():  # the bytes up, and down
        lengths = f"(document.getElementById('{plot}').data ?? []).map((curve) => curve.x.length)"
        look.until(f"{lengths}.join() === '{','.join([str(ROUNDS)] * curves)}'")
    look.until(f"document.querySelectorAll('#accuracy .points path').length === {ROUNDS}")
    look.until(f"document.querySelectorAll('#models tbody tr').length === {ROUNDS + 1}")
    assert "uniform" in look.text("#totals")
    look.until(f"document.querySelector('#events').textContent.includes('job {job_id} (digits) is completed')")
    with Control(fleet.control) as control:
        last = control.rounds(limit=1)[0]
    accuracy = f"{100 * last.eval_correct / last.eval_total:.2f} %"
    look.until(f"document.querySelector('#tiles').innerText.includes('{accuracy}')")
    look.until("document.querySelectorAll('#clients .muted').length === 2")  # they are idle
    picture(look, "web", tmp_path)
    for plot in ("accuracy", "bytes"):
        look.page.hover(f"#{plot} .nsewdrag", force=True)
        look.until(f"document.querySelector('#{plot} .hoverlayer')?.textContent.includes('round ')")


def test_one_window_sees_the_rounds_pass(look: Look, fleet: Fleet) -> None:
    look.page.evaluate(WATCH_ROUNDS)
    with Control(fleet.control) as control:
        started = StartedJob(fleet, control, DIGITS | {"rounds": 10_000})
        look.until("window.seen.length > 2")
        control.stop_job()
        started.until("job_ended")


WATCH_ROUNDS = """() => {
  window.seen = [];
  new MutationObserver(() => {
    const round = document.getElementById('round-name');
    if (round && !window.seen.includes(round.textContent)) window.seen.push(round.textContent);
  }).observe(document.body, {subtree: true, childList: true});
}"""


def test_a_client_that_dies_is_shown_as_away_and_a_new_one_appears(look: Look, fleet: Fleet) -> None:
    run(fleet, rounds=1)
    look.until("document.querySelectorAll('#clients .good').length === 2")
    fleet.kill(0, signal.SIGKILL)
    look.until("document.querySelector('#clients .bad')?.textContent === 'away'")
    assert "client-0" in look.text("#clients tr:has(.bad)")
    look.until("[...document.querySelectorAll('#events .bad')].some((event) => event.textContent.includes('client-0'))")
    fleet.restart(0)
    look.until("document.querySelectorAll('#clients .good').length === 2")


def test_a_lost_connection_is_said_and_heals_by_itself(browser: Any, fleet: Fleet) -> None:
    look = Look(browser, fleet.web, **DESK)
    run(fleet, rounds=2)
    look.until("document.querySelectorAll('#rounds tbody tr').length === 2")
    fleet.server.kill()
    look.until("!document.querySelector('#lost').hidden")
    assert "connection lost" in look.text("#link")
    assert look.page.locator("#rounds tbody tr").count() == 2  # what was known stays to be read
    fleet.start_server()
    look.until("document.querySelector('#link').dataset.link === 'live'")
    assert look.page.locator("#lost").is_hidden()
    run(fleet, rounds=3)
    look.until("document.querySelectorAll('#rounds tbody tr').length === 3")
    assert look.hosts == {"127.0.0.1"}
    assert all("ERR_" in complaint for complaint in look.complaints)  # the browser's own, of the requests that failed
    look.close()


def test_older_jobs_can_be_chosen_with_the_keyboard(look: Look, fleet: Fleet) -> None:
    run(fleet, rounds=1, name="first")
    run(fleet, rounds=3, name="second")
    look.until("document.querySelectorAll('#rounds tbody tr').length === 3")
    look.page.focus("#job")
    look.page.keyboard.press("End")
    look.until("document.querySelectorAll('#rounds tbody tr').length === 1")
    assert "of job 1" in look.text("#rounds-of")
    assert look.points("accuracy") == [1]
    assert "second" in look.text("#now")  # that stays what happens now
    look.page.keyboard.press("Home")
    look.until("document.querySelectorAll('#rounds tbody tr').length === 3")
    order = []
    look.page.evaluate("document.activeElement.blur()")
    for _ in range(8):
        look.page.keyboard.press("Tab")
        order.append(look.page.evaluate("document.activeElement.id || document.activeElement.className"))
    assert {"skip", "job", "clients", "events", "rounds", "models"} <= set(order)


def test_what_others_wrote_does_not_become_markup(browser: Any, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    for pipe in (gate, tmp_path / "gate.began"):
        os.mkfifo(pipe)
    path = os.pathsep.join(filter(None, [str(ROOT / "tests" / "fault"), os.environ.get("PYTHONPATH")]))
    fleet = Fleet(tmp_path, TRUSTED | {"web_port": 0}, [TRUSTED] * 2, env={"PYTHONPATH": path})
    fleet.clients[1].env["FL_TEST_GATE"] = str(gate)
    with fleet, Control(fleet.control) as control:
        look = Look(browser, fleet.web, **DESK)
        job = {"name": HOSTILE, "trainer": "user_trainers:gated", "min_clients": 2, "evaluate": False}
        started = StartedJob(fleet, control, job)
        assert wait_for(fleet, "client 1 at the gate", gate.with_name("gate.began").read_text) == "began"
        look.until("document.querySelector('.waits')?.textContent.includes('and waits for client-1')")
        assert look.text(".phases .current") == "Training"
        wait_for(fleet, "the gate", lambda: gate.write_text("go"))
        started.until("job_ended")
        look.until("document.querySelector('.badge').textContent === 'completed'")
        assert HOSTILE in look.text("#now")
        assert HOSTILE in look.text("#events")
        assert HOSTILE in look.page.inner_text("#job option:nth-child(2)")
        assert look.page.evaluate("window.owned") is None
        assert look.page.locator("main img, main script, main b").count() == 0
        assert (look.hosts, look.complaints) == ({"127.0.0.1"}, [])
        look.close()


def test_the_ring_shows_its_members_and_a_loss(look: Look, fleet: Fleet, tmp_path: Path) -> None:
    with Control(fleet.control) as control:
        spec = {"mode": "data_parallel", "name": "ring", "min_clients": 2, "epochs": 100_000, "batch_size": 8}
        started = StartedJob(fleet, control, spec | {"data_parallel": {"replacement_seconds": SECONDS}})
        started.until("group_formed")
        look.until("document.querySelectorAll('#group svg.running .joined').length === 2")
        assert look.text("#group-title") == "Ring of 2 workers"
        assert look.page.text_content("#members") == "client-0: joinedclient-1: joined"
        picture(look, "web-ring", tmp_path)
        fleet.kill(1, signal.SIGKILL)
        look.until("document.querySelector('#group-body').textContent.includes('gathering')")
        # Its stream and its ring end at the same time: either event may be the newest.
        look.until("[...document.querySelectorAll('#events .bad')].some(e => e.textContent.includes('client-1'))")
        assert "last one ended" in look.text("#group-body")  # because of a lost worker, whoever said so first
        fleet.restart(1)
        started.until("group_formed")
        look.until("document.querySelectorAll('#group svg.running .joined').length === 2")
        control.stop_job()
        started.until("job_ended")


def test_a_pipeline_shows_its_stages(look: Look, fleet: Fleet) -> None:
    model = {"model": "fedring.train.models:digits_mlp", "model_args": {"hidden": 32, "layers": 3}}
    with Control(fleet.control) as control:
        started = StartedJob(fleet, control, {"mode": "pipeline", "epochs": 100_000, "batch_size": 32, **model})
        started.until("group_formed")
        look.until("document.querySelectorAll('#group svg.running rect').length === 2")
        assert look.text("#group-title") == "Pipeline of 2 workers"
        assert [one.text_content() for one in look.page.locator("#group .rank").all()] == ["stage 0", "stage 1"]
        control.stop_job()
        started.until("job_ended")


def test_it_can_be_read_on_a_phone_and_in_the_dark(browser: Any, fleet: Fleet, tmp_path: Path) -> None:
    run(fleet)
    for name, options in {"web-phone": PHONE, "web-dark": DESK | {"color_scheme": "dark"}}.items():
        look = Look(browser, fleet.web, **options)
        look.until(f"document.getElementById('bytes').data?.[0].x.length === {ROUNDS}")
        picture(look, name, tmp_path)
        dark = look.page.evaluate("getComputedStyle(document.documentElement).backgroundColor") == "rgb(14, 19, 26)"
        assert dark == (name == "web-dark")
        assert look.complaints == []
        look.close()
