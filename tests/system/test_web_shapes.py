"""The page in a real browser, with states that real daemons reach only with many machines or rare failures."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from tests.system.browser import Window, open_browser
from tests.system.scripted_page import JOB, ROUND, SERVER, Script, served


@pytest.fixture(scope="module")
def page() -> Iterator[tuple[Any, Script, str]]:
    """Return a context of a browser, which keeps the page's files for all tests, a source of states, and its URL."""
    script = Script()
    with open_browser() as browser, served(script) as url:
        yield browser.new_context(viewport={"width": 1280, "height": 900}), script, url


@pytest.fixture
def script(page: tuple[Any, Script, str]) -> Script:
    """Return the source of states, as if it were new."""
    _, script, _ = page
    vars(script).update(vars(Script()))
    return script


@pytest.fixture
def window(page: tuple[Any, Script, str], script: Script) -> Iterator[Window]:
    context, _, url = page
    window = Window(context, url)
    yield window
    assert window.complaints == []
    window.close()


def workers(*states: str) -> list[dict[str, Any]]:
    return [{"client_id": f"stage-{i}", "state": state, "steps": 40, "progress": 0.5} for i, state in enumerate(states)]


def group(mode: str, *states: str, **keys: Any) -> dict[str, Any]:
    fixed = {"round": 1, "generation": 2, "phase": "running", "reason": "", "target": 4, "steps": 40, "others": []}
    fixed |= {"replicas": 1, "stages_per_worker": 1, "stage_workers": []}
    return {"mode": mode, **fixed, "members": workers(*states), **keys}


def test_the_stages_of_a_pipeline_are_drawn_in_a_row(window: Window, script: Script) -> None:
    script.now["group"] = group("pipeline", "joined", "joined", "done", "lost")
    window.until("document.querySelectorAll('#group rect').length === 4")
    assert window.text("#group-title") == "Pipeline of 4 workers"
    boxes = [box.bounding_box() for box in window.page.locator("#group rect").all()]
    assert len({box["y"] for box in boxes}) == 1
    assert all(left["x"] + left["width"] < right["x"] for left, right in pairwise(boxes))
    assert [text.text_content() for text in window.page.locator("#group .rank").all()] == [
        f"stage {i}" for i in range(4)
    ]
    script.now["group"] = group("pipeline", *["joined"] * 4, replicas=2, stages_per_worker=2)
    window.until("document.querySelector('#group .rank').textContent === 'stage 0, 2'")
    assert len({box["y"] for one in window.page.locator("#group rect").all() if (box := one.bounding_box())}) == 2
    script.now["group"] = group("pipeline", *["joined"] * 4, stage_workers=[1, 2, 1])
    window.until("document.querySelectorAll('#group .rank')[3].textContent === 'stage 2'")
    ranks = window.page.locator("#group .rank").all()
    assert [text.text_content() for text in ranks] == ["stage 0", "stage 1", "stage 1", "stage 2"]
    script.now["group"] = group("data_parallel", *["joined"] * 4)
    window.until("document.querySelectorAll('#group .node').length === 4")
    assert window.page.locator("#bytes-card").is_hidden()  # there are no bytes, so the group has the whole width
    script.now["group"] = None
    window.until("document.querySelector('#group').hidden")


def test_a_ring_of_any_size_is_drawn_without_overlap(window: Window, script: Script) -> None:
    for count in (1, 2, 3, 8, 16, 64, 200):
        script.now["group"] = group("data_parallel", *["joined"] * count)
        window.until(f"document.querySelectorAll('#group .node').length === {count}")
        circles = window.page.evaluate(
            "[...document.querySelectorAll('#group .node')].map((n) => [n.cx, n.cy, n.r].map((v) => v.baseVal.value))"
        )
        for i, (x, y, r) in enumerate(circles):
            for other_x, other_y, other_r in circles[:i]:
                assert (x - other_x) ** 2 + (y - other_y) ** 2 > (r + other_r) ** 2, f"in a ring of {count}"


def test_a_long_job_has_all_rounds_in_its_curves_and_the_newest_ones_in_its_table(
    window: Window, script: Script
) -> None:
    script.history = [
        ROUND | {"round": i, "job_round": i, "accuracy": i / 1000, "metrics": {"eval/accuracy": i / 1000}}
        for i in range(1, 991)
    ]
    script.history[4] |= {
        "phase": "abandoned",
        "reason": "too_few_clients",
        "missing": ["b"],
        "accuracy": None,
        "metrics": {},
    }
    script.now |= {"jobs": [JOB], "round": script.history[-1]}
    window.until("document.getElementById('accuracy').data?.[0].x.length === 989")
    assert window.page.locator("#rounds tbody tr").count() == 200
    assert "and 790 older ones: flctl rounds --job 7" in window.text("#rounds")
    assert "98.90 %" not in window.text("#tiles")
    assert "99.00 %" in window.text("#tiles")


CLIENT = {
    "state": "watching",
    "activity": "training",
    "progress": 0.4,
    "software": "s",
    "address": "a",
    "updates": 1,
    "part": "asked",
}


def test_the_server_searches_and_turns_the_pages_of_very_many_clients(window: Window, script: Script) -> None:
    script.all_clients = [CLIENT | {"client_id": f"client-{i:05}"} for i in range(10_000)]
    server = SERVER | {"clients": 9_990, "watching": 9_990, "known": 10_000}
    script.now |= {"server": server, "clients": script.all_clients[:200]}
    first, rows = "document.querySelector('#clients tbody tr')?.textContent", "#clients tbody tr"
    window.until("document.querySelector('#clients').textContent.includes('and 9,800 more')")
    window.page.click("text=later")
    window.until(f"{first}?.includes('client-00200')")
    assert "and 9,600 more: flctl clients" in window.text("#clients")
    window.page.fill("#client-search", "Client-077")
    window.until(f"{first}?.includes('client-07700')")
    assert window.page.locator(rows).count() == 100
    assert window.text("#client-count") == "100 of 10,000"
    window.page.fill("#client-search", "client-0")
    window.until("document.querySelector('#client-count').textContent === '10,000 of 10,000'")
    for turned in ("00200", "00400"):
        window.page.click("text=later")
        window.until(f"{first}?.includes('client-{turned}')")
    window.page.click("text=earlier")
    window.until(f"{first}?.includes('client-00200')")
    window.page.fill("#client-search", "nobody")
    window.until("document.querySelector('#clients').textContent.includes('No client fits the search.')")
    window.page.fill("#client-search", "")
    window.until(f"{first}?.includes('client-00000')")
    assert window.complaints == []


def test_clients_that_are_not_shown_are_counted(window: Window, script: Script) -> None:
    script.now |= {
        "server": SERVER | {"clients": 1000},
        "clients": [CLIENT | {"client_id": f"client-{i}"} for i in range(200)],
    }
    window.until("document.querySelectorAll('#clients tbody tr').length === 200")
    assert "and 800 more: flctl clients" in window.text("#clients")
    assert window.page.get_attribute("#clients [role=progressbar]", "aria-valuenow") == "40"


WAITS: dict[str, dict[str, Any]] = {
    "waits for clients: 1 of 3 are ready": {"what": "clients", "have": 1, "need": 3},
    "has 1 of 3 updates, and waits for ann, bob": {"what": "updates", "have": 1, "need": 3, "clients": ["ann", "bob"]},
    "adds up 3 updates": {"what": "aggregation", "have": 0, "need": 0},
    "is evaluated: 2 of 3 have reported, it waits for ann": {
        "what": "evaluations", "have": 2, "need": 3, "clients": ["ann"],
    },
}  # fmt: skip


def test_a_sentence_says_what_a_round_waits_for(window: Window, script: Script) -> None:
    for sentence, waits in WAITS.items():
        script.now |= {
            "jobs": [JOB],
            "round": ROUND | {"phase": "training"},
            "waits_for": {"clients": [], "until": "", **waits},
        }
        window.until(f"document.querySelector('.waits')?.textContent.includes('{sentence}')")
        script.now |= {"round": ROUND | {"phase": "abandoned", "reason": "barrier_timeout"}, "waits_for": None}
        window.until("document.querySelector('.waits').textContent.includes('was abandoned: barrier_timeout')")


def test_a_failed_job_and_the_best_model_stand_out(window: Window, script: Script) -> None:
    def ended(job_id: int, text: str) -> dict[str, Any]:
        at, kind = ROUND["started_at"], "job_ended"
        return {"id": job_id, "at": at, "kind": kind, "job_id": job_id, "round": 0, "client_id": "", "text": text}

    begun = {"start": "best", "start_version": 4}
    script.now["jobs"] = [JOB | begun | {"state": "failed"}, JOB | {"job_id": 6, "state": "completed"}]
    script.now["events"] = [ended(6, "job 6 (a) is completed"), ended(7, "job 7 (b) has failed")]
    model = {"job_id": 7, "digest": "blake3-0f", "parameters": 9, "bytes": 90, "accuracy": 0.9, "loss": 0.2}
    script.now["models"] = [
        {**model, "version": 4 + i, "round": i, "job_round": i, "best_of_job": i == 1} for i in (2, 1)
    ]
    window.until("document.querySelectorAll('#events li').length === 2")
    assert [text.text_content() for text in window.page.locator("#events .bad").all()] == ["job 7 (b) has failed"]
    assert window.text("#models tr:has(.badge)").split()[:3] == ["5", "best", "7.1"]
    assert "started from the best model (version 4)" in window.text("#now")


def test_the_header_keeps_its_line_when_the_connection_is_lost(window: Window, script: Script) -> None:
    script.now["server"] = SERVER | {"version": "10.11.12"}
    script.now["jobs"] = [JOB | {"job_id": 70 - i, "name": "a long name of a job" * 3} for i in range(3)]
    window.until("document.querySelectorAll('#job option').length === 4")
    window.page.evaluate("document.getElementById('link').textContent = 'connection lost'")
    boxes = [window.page.locator(name).bounding_box() or {} for name in ("#job", "#link")]
    assert abs(boxes[0]["y"] - boxes[1]["y"]) < 20


def test_the_steps_of_secure_aggregation_and_its_losses_are_shown(window: Window, script: Script) -> None:
    secure = {"step": "shares", "groups": 2, "answered": 3, "asked": 5, "lost": {"keys": 1}, "seconds": {}}
    script.now |= {"jobs": [JOB], "round": ROUND | {"phase": "training", "secure": secure}}
    window.until("document.querySelector('#secure')")
    text = "Secure aggregation in 2 groups: clients share their secrets, 3 of 5 have. Lost: 1 in keys."
    assert window.text("#secure") == text
    ended = secure | {"step": "done", "lost": {}, "groups": 1, "seconds": {"keys": 0.5, "unmask": 1.25}}
    lost = ended | {"lost": {"keys": 1, "unmask": 2}}
    script.now |= {"round": ROUND | {"secure": ended}}
    window.until("document.querySelector('#secure').textContent.includes('No client was lost')")
    assert window.text("#secure") == "Secure aggregation in 1 group: No client was lost."
    script.history = [ROUND | {"secure": lost}]
    script.now |= {"round": ROUND | {"round": 2, "secure": ended}}
    window.until("document.querySelectorAll('#rounds tbody tr').length === 1")
    assert "Lost: 1 in keys, 2 in unmask" in window.text("#rounds")
    assert window.page.locator("#rounds [title*='keys 0.50 s, unmask 1.25 s']").count() == 1
    script.now |= {"round": ROUND | {"round": 2}}
    window.until("!document.querySelector('#secure')")


def test_the_privacy_that_a_job_has_spent_is_shown(window: Window, script: Script) -> None:
    script.now |= {"jobs": [JOB | {"max_epsilon": 8.0}], "privacy": None}
    window.until("document.querySelector('.now')")
    assert window.page.locator("#epsilon").count() == 0
    jobs = {"7": {"rounds": 3, "epsilon": 1.2345}}
    script.now["privacy"] = {"delta": 1e-5, "epsilon": 4.5678, "rounds": 5, "jobs": jobs}
    window.until("document.querySelector('#epsilon')")
    assert window.text("#epsilon") == (
        "Privacy spent: ε = 4.57 of at most 8, for δ = 0.00001 and all jobs of this server; by this job alone 1.23, "
        "in 3 rounds."
    )
    script.now["privacy"] = {"delta": 1e-5, "epsilon": None, "rounds": 5, "jobs": {"7": {"rounds": 1, "epsilon": None}}}
    window.until("document.querySelector('#epsilon').textContent.includes('∞')")
