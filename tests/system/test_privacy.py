"""Jobs with differential privacy, with real daemons: what is published, what is spent, what a site refuses."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest

from fedring.control.failure import Failure
from fedring.simulation import simulate
from fedring.v1 import federation_pb2 as pb
from tests.conftest import path_to
from tests.fleets import Control, Fleet, run_job, until_watching
from tests.ledgers import account_in
from tests.metrics_page import Page
from tests.system.wire import Refused, WireClient, parameters, payload_of, vector_job
from tests.waiting import SECONDS, until

SIZE = 1000
CLIP = 0.5
PRIVATE: dict[str, Any] = {"weights": "uniform", "evaluate": False}
SECRETS = "noise-*"


def private_job(noise: float, **keys: Any) -> dict[str, Any]:
    table = {"noise_multiplier": noise, "clip": CLIP, "adaptive": False, **keys.pop("dp", {})}
    return vector_job(dp=table, min_clients=2, **PRIVATE, **keys)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """Start an fl-server."""
    with Fleet(tmp_path) as fleet:
        yield fleet


def run_round(a: WireClient, b: WireClient, deltas: tuple[Any, Any]) -> None:
    """Let two clients deliver these deltas in the next round."""
    for client, delta in zip((a, b), deltas, strict=True):
        command, payload = client.expect("train"), payload_of(delta.astype(np.float32))
        client.push(client.header(command, payload), payload)


def test_updates_are_clipped_and_added_over_a_fixed_number_with_noise(fleet: Fleet, tmp_path: Path) -> None:
    long, short = np.full(SIZE, 1.0), np.full(SIZE, 1e-3)
    clipped = long * CLIP / np.linalg.norm(long)
    with (
        Control(fleet.control) as control,
        WireClient(fleet.listen, "a") as a,
        WireClient(fleet.listen, "b") as b,
    ):
        events = control.events()
        quiet = control.start_job(private_job(1e-9, start="fresh")).job_id
        run_round(a, b, (long, short))
        list(control.follow_job(quiet, events))
        change = parameters(a, 2) - parameters(a, 1)
        assert np.allclose(change, (clipped + short) / 2, rtol=1e-3, atol=1e-7)

        events = control.events()
        noisy = control.start_job(private_job(1.0, start="fresh")).job_id
        run_round(a, b, (short, short))
        list(control.follow_job(noisy, events))
        added = parameters(a, 4) - parameters(a, 3) - short
        assert added.std() == pytest.approx(CLIP / 2, rel=0.1)

        (round_,) = control.rounds(job_id=noisy)
        assert (round_.delivered, dict(round_.metrics)) == (2, {})
        assert {client.num_samples for client in round_.clients} == {1}
        spent = control.privacy()
        assert (spent.rounds, spent.rounds_without, [job.job_id for job in spent.jobs]) == (2, 0, [noisy, quiet])
        assert spent.jobs[0].epsilon == pytest.approx(4.73, rel=0.01)
        assert spent.epsilon > 1e6  # so little noise protects nobody
    assert not list(Path(fleet.server.settings["state_dir"]).rglob(SECRETS))


def spent_on_page(fleet: Fleet) -> Any:
    """Return what the page says of the privacy that is spent."""
    with urlopen(f"{fleet.web}api/state", timeout=SECONDS) as answer:
        return json.loads(answer.read())["privacy"]


def test_what_is_spent_is_on_the_page_and_in_the_metrics(tmp_path: Path) -> None:
    with (
        Fleet(tmp_path, {"web_port": 0, "metrics_listen": "127.0.0.1:0"}) as fleet,
        Control(fleet.control) as control,
        WireClient(fleet.listen, "a") as a,
        WireClient(fleet.listen, "b") as b,
    ):
        assert spent_on_page(fleet) is None
        events = control.events()
        job_id = control.start_job(private_job(1.0)).job_id
        run_round(a, b, (np.zeros(SIZE), np.zeros(SIZE)))
        list(control.follow_job(job_id, events))
        until(lambda: spent_on_page(fleet))
        spent = spent_on_page(fleet)
        assert spent["jobs"][str(job_id)]["epsilon"] == spent["epsilon"] == pytest.approx(4.73, rel=0.01)
        assert Page(fleet.ready["metrics"])("fl_server_privacy_epsilon") == pytest.approx(4.73, rel=0.01)


def test_a_job_ends_before_it_spends_more_than_it_may(fleet: Fleet) -> None:
    with (
        Control(fleet.control) as control,
        WireClient(fleet.listen, "a") as a,
        WireClient(fleet.listen, "b") as b,
    ):
        events = control.events()
        job_id = control.start_job(private_job(5.0, rounds=9, dp={"max_epsilon": 1.3})).job_id
        zeros = np.zeros(SIZE)
        for _ in range(2):
            run_round(a, b, (zeros, zeros))
        list(control.follow_job(job_id, events))
        ended = control.job(job_id)
        assert (ended.state, ended.rounds_done) == ("completed", 2), ended.reason
        assert ended.reason.startswith("it ended early: one more round would take epsilon to ")
        assert ended.reason.endswith("for delta = 1e-05, above dp.max_epsilon = 1.3")
        again = run_job(control, private_job(5.0, dp={"max_epsilon": 1.3}))
        assert (again.state, again.rounds_done) == ("failed", 0)  # other jobs have spent it


def test_whole_weights_are_refused(fleet: Fleet) -> None:
    with Control(fleet.control) as control, WireClient(fleet.listen, "a") as a, WireClient(fleet.listen, "b") as b:
        control.start_job(private_job(1.0))
        b.expect("train")
        command, payload = a.expect("train"), payload_of(np.ones(SIZE, np.float32))
        header = a.header(command, payload)
        header.packets[0].kind = pb.KIND_WEIGHTS
        with pytest.raises(Refused) as refused:
            a.push(header, payload)
        assert refused.value.reason == "bad_packets"


def test_a_model_with_buffers_is_refused_when_it_is_queued(tmp_path: Path) -> None:
    trusted = {"trusted": ["fedring", "user_models"]}
    job = {"model": "user_models:normed", "dp": {"noise_multiplier": 1.0, "adaptive": False}, **PRIVATE}
    refused = pytest.raises(Failure, match=r"dp: the buffer norm\.\w+ would be averaged without noise")
    with (
        Fleet(tmp_path, trusted, env=path_to(Path(__file__).parent)) as fleet,
        Control(fleet.control) as control,
        refused,
    ):
        control.start_job(job)


def test_a_site_refuses_what_is_weaker_than_its_policy_and_keeps_its_own_account(tmp_path: Path) -> None:
    strict = {"privacy": {"min_clients": 2, "min_noise_multiplier": 1.0, "max_epsilon": 9.0}}
    job = {"min_clients": 2, "min_clients_to_aggregate": 2, "evaluate": False, "max_abandoned": 1}
    dp = {"dp": {"noise_multiplier": 1.0, "adaptive": False, "clip": 1.0}, "weights": "uniform"}
    with Fleet(tmp_path, {}, [{}, strict]) as fleet, Control(fleet.control) as control:
        until_watching(control, 2)
        open_ = run_job(control, job)
        assert open_.state == "failed"
        assert "privacy_policy" in open_.reason
        assert "privacy.min_noise_multiplier = 1 demands a job with [dp]" in open_.reason
        private = run_job(control, job | dp)
        assert private.state == "completed"
        folder = tmp_path / "state" / "client-1"
        assert account_in(folder)["rounds"] == {"1.0": 1}
        two = run_job(control, job | dp | {"rounds": 2})
        assert two.rounds_done == 1
        assert "above its privacy.max_epsilon = 9" in two.reason
        assert account_in(folder)["rounds"] == {"1.0": 2}
        round_ = control.rounds(job_id=private.job_id)[0]
        assert {client.num_samples for client in round_.clients} == {1}
        assert not any(client.metrics for client in round_.clients)


def test_a_simulation_adds_noise(tmp_path: Path) -> None:
    dp = {"noise_multiplier": 1.0, "clip": 0.3}
    job = {"rounds": 2, "min_clients": 20, "dp": dp, **PRIVATE, "evaluate_on_server": True, "batch_size": 16}
    first, second = (simulate(job, clients=20, workers=1, out=tmp_path / name)["model_sha256"] for name in ("1", "2"))
    assert first != second  # nobody can repeat the noise
