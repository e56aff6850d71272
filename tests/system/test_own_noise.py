"""Rounds whose clients add the noise of differential privacy, with real daemons: models, charges, kills."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedring.client.policy.ledger import LEDGER
from fedring.privacy.account import epsilon
from fedring.privacy.charges import charge_of
from fedring.secure.limits import honest_survivors
from fedring.train.jobs.privacy_table import ClientPrivacy
from fedring.v1 import federation_pb2 as pb
from tests.conftest import path_to
from tests.damage import ask
from tests.fleets import Control, Fleet, until_watching
from tests.ledgers import account_in
from tests.secure_client import NoisyClient
from tests.system.wire import SIZE, Refused, outcome, parameters, run

NAMES = ("a", "b", "c", "d", "e")
CLIP = 0.5
BEFORE_UNMASKING = ("send_keys", "send_shares", "take_peers", "push", "sign_survivors")
STEPS = (*BEFORE_UNMASKING, "send_unmask_shares")


@pytest.fixture
def party(server: Fleet) -> Iterator[list[NoisyClient]]:
    """Open five clients, each with an update of its own."""
    rng = np.random.default_rng(7)
    clients = [NoisyClient(server.listen, name, rng.normal(0, 0.005, SIZE).astype(np.float32)) for name in NAMES]
    yield clients
    for client in clients:
        client.close()


def start(control: Control, party: list[NoisyClient], multiplier: float, **keys: Any) -> tuple[int, Any]:
    """Start a job whose clients add the noise, and let each of them begin its first round."""
    dp = {"noise_multiplier": multiplier, "clip": CLIP, "adaptive": False, "noise_by": "clients"} | keys.pop("dp", {})
    fixed = {"weights": "uniform", "deadline_seconds": 60, "min_clients": 5, "min_clients_to_aggregate": 4}
    fixed |= {"max_abandoned": 1, "dp": dp, "secure_aggregation": {"step_seconds": 60}, "evaluate": False}
    started = run(control, **fixed | keys)
    for client in party:
        client.begin()
    return started


def each(party: list[NoisyClient], *steps: str) -> None:
    """Let all clients make a step, then all the next one."""
    for step in steps:
        for client in party:
            getattr(client, step)()


def fail(client: NoisyClient) -> None:
    """Let a client say that it cannot go on."""
    lost = pb.Failure(round=client.command.round, reason="train_error")
    client.link.say(pb.WatchRequest(matched=True, failure=lost))


def state_of(server: Fleet) -> Path:
    return Path(server.server.settings["state_dir"])


def cost(multiplier: float, rounds: int = 1) -> float:
    """Return epsilon of rounds of a group of five, as the accountant has it."""
    table = {"noise_multiplier": multiplier, "clip": CLIP, "adaptive": False, "noise_by": "clients"}
    dp = ClientPrivacy.model_validate(table)
    return epsilon([dp.plan(5, SIZE, 4).charge] * rounds, 1e-5)


def test_the_model_moves_by_the_sum_over_all_that_were_drawn_and_a_client_may_be_lost(
    server: Fleet, control: Control, party: list[NoisyClient]
) -> None:
    job_id, events = start(control, party, 3e-4, dp={"bits": 24})
    assert party[0].command.secure == type(party[0].command.secure)(clip=CLIP)
    each(party, "send_keys", "send_shares", "take_peers")
    fail(party[0])
    each(party[1:], "push", "sign_survivors", "send_unmask_shares")
    assert outcome(control, job_id, events).state == "completed"
    expected = np.sum([client.update for client in party[1:]], axis=0, dtype=np.float64) / len(party)
    moved = parameters(party[1].link, 2) - parameters(party[1].link, 1)
    assert np.linalg.norm(moved - expected) < 0.05 * np.linalg.norm(expected)


def test_the_noise_and_its_cost_are_what_the_job_says(
    server: Fleet, control: Control, party: list[NoisyClient]
) -> None:
    for client in party:
        client.update = np.zeros(SIZE, np.float32)
    job_id, events = start(control, party, 1.0)
    each(party, *STEPS)
    assert outcome(control, job_id, events).state == "completed"
    moved = parameters(party[0].link, 2) - parameters(party[0].link, 1)
    claimed = CLIP * np.sqrt(5 / honest_survivors(5, 4, trusted=False)) / 5
    assert moved.std() == pytest.approx(claimed, rel=0.2)
    spent = control.privacy()
    assert (spent.rounds, spent.rounds_without, spent.jobs[0].noise_multiplier) == (1, 0, 1.0)
    assert spent.epsilon == spent.jobs[0].epsilon == pytest.approx(cost(1.0), rel=1e-9)
    (round_,) = control.rounds(job_id=job_id)
    assert (round_.delivered, dict(round_.metrics)) == (5, {})


def test_a_round_is_charged_once_masks_may_be_removed_also_if_it_makes_no_model(
    server: Fleet, control: Control, party: list[NoisyClient]
) -> None:
    job_id, events = start(control, party, 1.0)
    each(party, *BEFORE_UNMASKING[:-1])
    assert ask(state_of(server), "SELECT * FROM charges") == []
    each(party, "sign_survivors")
    for client in party:
        client.step("unmask")
    assert len(ask(state_of(server), "SELECT * FROM charges")) == 1
    for client in party[:2]:
        fail(client)
    for client in party[2:]:
        client.call("SendUnmaskShares", client.unmask_shares())
    ended = outcome(control, job_id, events)
    assert (ended.state, control.rounds(limit=1)[0].reason) == ("failed", "too_few_to_unmask")
    assert (control.privacy().rounds, control.models(limit=1)[0].version) == (1, 1)
    assert control.privacy().epsilon == pytest.approx(cost(1.0), rel=1e-9)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_server_that_is_killed_while_it_charges_charges_once(
    server: Fleet, control: Control, party: list[NoisyClient], when: str
) -> None:
    server.server.kill()
    server.server.env["FL_CRASH_AT"] = f"{when}_secure_signers_commit"
    server.start_server()
    del server.server.env["FL_CRASH_AT"]
    for client in party:
        client.again(server.listen)
    with Control(server.control) as first:
        job_id, _ = start(first, party, 1.0)
        each(party, *BEFORE_UNMASKING[:-1])
        for client in party:
            try:
                client.sign_survivors()
            except Refused:  # the server is killed as soon as all have signed
                break
    assert server.server.wait() == 137
    charged = ask(state_of(server), "SELECT * FROM charges")
    assert len(charged) == (when == "after")
    server.start_server()
    for client in party:
        client.again(server.listen)
    for client in party:
        client.call("SignSurvivors", client.sent["SignSurvivors"]) if not charged else None
    each(party, "send_unmask_shares")
    with Control(server.control) as again:
        list(again.follow_job(job_id))
        assert again.job(job_id).state == "completed"
        assert again.privacy().rounds == 1
        assert again.privacy().epsilon == pytest.approx(cost(1.0), rel=1e-9)
    assert ask(state_of(server), "SELECT * FROM charges")[: len(charged)] == charged


def test_a_job_ends_before_it_spends_more_than_it_may(
    server: Fleet, control: Control, party: list[NoisyClient]
) -> None:
    limit = 1.1 * cost(5.0, 2)
    job_id, events = start(control, party, 5.0, rounds=9, dp={"max_epsilon": limit})
    each(party, *STEPS)
    for client in party:
        client.begin()
    each(party, *STEPS)
    ended = outcome(control, job_id, events)
    assert (ended.state, ended.rounds_done) == ("completed", 2), ended.reason
    assert "it ended early: one more round would take epsilon to " in ended.reason


def test_five_daemons_of_which_one_is_lost_and_one_is_killed_publish_and_say_what_it_costs(tmp_path: Path) -> None:
    strict = {"privacy": {"noise_by_clients": True, "min_clients": 4, "min_noise_multiplier": 1.0, "max_epsilon": 9.0}}
    trusted = {"trusted": ["fedring", "own_noise_trainers"]}
    job = {
        "trainer": "own_noise_trainers:lost_if_told",
        "min_clients": 5,
        "min_clients_to_aggregate": 4,
        "weights": "uniform",
        "evaluate": False,
        "max_abandoned": 1,
        "dp": {"noise_multiplier": 1.0, "clip": 1.0, "adaptive": False, "noise_by": "clients"},
        "secure_aggregation": {},
    }
    env = path_to(Path(__file__).parent)
    daemons = Fleet(tmp_path, trusted, [strict | trusted] * 5, env=env)
    daemons.clients[0].env["FL_TEST_LOST"] = "yes"
    with daemons as fleet, Control(fleet.control) as control:
        until_watching(control, 5)
        weak = control.start_job(job | {"dp": {"noise_multiplier": 1.0, "adaptive": False}, "secure_aggregation": None})
        list(control.follow_job(weak.job_id))
        assert "noise_by_clients = true refuses noise of the server" in control.job(weak.job_id).reason
        killed = fleet.clients[1]
        killed.kill()
        killed.env["FL_CRASH_AT"] = "client_secure_payload"
        killed.start()
        del killed.env["FL_CRASH_AT"]
        until_watching(control, 5)
        first = control.start_job(job)
        assert killed.wait() == 137  # its update is on its disk, and was charged
        killed.start()
        list(control.follow_job(first.job_id))
        assert control.job(first.job_id).state == "completed", control.job(first.job_id).reason
        (round_,) = control.rounds(job_id=first.job_id)
        assert round_.delivered == 4
        dp = ClientPrivacy.model_validate(job["dp"])
        size = control.models(limit=1)[0].parameters
        ((charge,),) = ask(state_of(fleet), "SELECT charge FROM charges")
        # The group is one of four, if the client has failed before its keys had come.
        assert charge in [str(dp.plan(clients, size, 4).charge) for clients in (4, 5)]
        spent = control.privacy()
        assert spent.epsilon == pytest.approx(epsilon([charge_of(str(charge))], 1e-5), rel=1e-9)
        folders = [tmp_path / "state" / f"client-{number}" for number in range(5)]
        rounds = [account_in(folder)["rounds"] for folder in folders if (folder / LEDGER).exists()]
        assert rounds == [{charge: 1}] * 4
