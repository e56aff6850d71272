"""Rounds with secure aggregation on the wire: a real fl-server, and clients that run the protocol step by step."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from fedring.v1 import control_pb2
from fedring.v1 import federation_pb2 as pb
from fedring.v1 import secure_pb2 as wire
from tests.damage import ask, set_epoch
from tests.fleets import Control, Fleet
from tests.secure_client import CALLS, STEPS, SecureClient, mean_of
from tests.system.wire import SIZE, Refused, WireClient, outcome, parameters, published_version, run

NAMES = ("a", "b", "c", "d", "e")

Party = list[SecureClient]


@pytest.fixture
def party(server: Fleet) -> Iterator[Callable[..., Party]]:
    """Return a function that opens clients of these names, each with an update of its own."""
    with ExitStack() as stack:

        def open_(names: Sequence[str] = NAMES, samples: int = 1) -> Party:
            rng = np.random.default_rng(7)
            found = []
            for name in names:
                client = SecureClient(server.listen, name, rng.normal(0, 0.03, SIZE).astype(np.float32), samples)
                stack.callback(client.close)
                found.append(client)
            return found

        yield open_


def start(control: Control, party: Party, needed: int = 4, **keys: Any) -> tuple[int, Iterator[control_pb2.Event]]:
    """Start a job with secure aggregation for the clients, and let each of them begin its first round."""
    table = {"step_seconds": 60, **keys.pop("secure_aggregation", {})}
    fixed = {"weights": "uniform", "deadline_seconds": 60, "min_clients": len(party), "max_abandoned": 1}
    fixed |= {"min_clients_to_aggregate": needed, "secure_aggregation": table}
    started = run(control, **{**fixed, **keys})
    for client in party:
        client.begin()
    return started


def each(party: Party, *steps: str) -> None:
    """Let all clients make a step, then all the next one."""
    for step in steps:
        for client in party:
            getattr(client, step)()


def expected(party: Party, link: WireClient) -> "np.ndarray[Any, Any]":
    """Return the first model plus the mean of what these clients have masked."""
    return parameters(link, 1) + mean_of(party)


def progress(control: Control) -> control_pb2.SecureProgress:
    """Return how far the round in progress, or the last one, is."""
    return control.rounds(limit=1)[0].secure


def test_the_model_moves_by_the_mean_of_updates_that_the_server_cannot_read(
    server: Fleet, control: Control, party: Callable[..., Party]
) -> None:
    clients = party()
    job_id, events = start(control, clients)
    each(clients, "send_keys", "send_shares", "take_peers", "push", "sign_survivors", "send_unmask_shares")
    assert outcome(control, job_id, events).state == "completed"
    np.testing.assert_allclose(parameters(clients[0].link), expected(clients, clients[0].link), atol=1e-7)
    done = progress(control)
    assert (done.step, done.groups, sum(done.lost.values())) == ("done", 1, 0)
    state = server.directory / "state" / "server"
    assert ask(state, "SELECT * FROM secure_messages UNION ALL SELECT *, '' FROM secure_rounds") == []
    for client in clients:
        assert client.link.expect("round_ended").round == client.command.round


def test_updates_count_by_samples_up_to_the_largest_weight(control: Control, party: Callable[..., Party]) -> None:
    clients = party()
    for client, samples in zip(clients, (1, 2, 3, 4, 100), strict=True):
        client.samples = samples
    job_id, events = start(control, clients, weights="samples", secure_aggregation={"max_weight": 10})
    each(clients, "send_keys", "send_shares", "take_peers", "push", "sign_survivors", "send_unmask_shares")
    assert outcome(control, job_id, events).state == "completed"
    assert [client.levels[-1] for client in clients] == [1, 2, 3, 4, 10]
    np.testing.assert_allclose(parameters(clients[0].link), expected(clients, clients[0].link), atol=1e-7)


@pytest.mark.parametrize("lost_in", ["keys", "shares", "updates", "survivors", "unmask"])
def test_a_client_may_be_lost_in_any_step(control: Control, party: Callable[..., Party], lost_in: str) -> None:
    clients = party()
    job_id, events = start(control, clients)
    rest, lost = clients[1:], clients[0]
    here = clients
    for name, calls in CALLS.items():
        if name == lost_in:
            lost.link.say(failed(lost))
            here = rest
        each(here, *calls)
    assert outcome(control, job_id, events).state == "completed"
    counted = clients if lost_in in ("survivors", "unmask") else rest
    np.testing.assert_allclose(parameters(rest[0].link), expected(counted, rest[0].link), atol=1e-7)
    assert progress(control).lost[lost_in] == 1


def failed(client: SecureClient) -> pb.WatchRequest:
    """Return what a client says that cannot go on."""
    return pb.WatchRequest(matched=True, failure=pb.Failure(round=client.command.round, reason="bad_roster"))


@pytest.mark.parametrize("step", STEPS)
def test_a_server_that_is_killed_in_a_step_goes_on_with_it(
    server: Fleet, control: Control, party: Callable[..., Party], step: str
) -> None:
    clients = party()
    start(control, clients)
    for name in STEPS:
        each(clients[:3] if name == step else clients, *CALLS[name])
        if name == step:
            break
    server.server.kill()
    server.start_server()
    for client in clients:
        client.again(server.listen)
    for client in clients[:3]:  # an answer may have been lost: the same bytes are taken again
        if step == "updates":
            client.push()
        else:
            method = {"keys": "SendKeys", "shares": "SendShares", "survivors": "SignSurvivors"}
            name = method.get(step, "SendUnmaskShares")
            client.call(name, client.sent[name])
    each(clients[3:], *CALLS[step])
    for name in STEPS[STEPS.index(step) + 1 :]:
        each(clients, *CALLS[name])
    with Control(server.control) as again:
        published_version(again, clients[0].command.round)
    np.testing.assert_allclose(parameters(clients[0].link), expected(clients, clients[0].link), atol=1e-7)


def test_a_round_takes_no_update_after_it_was_decided_whose_updates_count(
    server: Fleet, control: Control, party: Callable[..., Party]
) -> None:
    clients = party()
    start(control, clients)
    each(clients, "send_keys", "send_shares", "take_peers")
    late, rest = clients[0], clients[1:]
    each(rest, "push")
    late.link.say(failed(late))
    each(rest, "sign_survivors")
    with pytest.raises(Refused, match="round_closed"):
        late.push()
    server.server.kill()
    server.start_server()
    for client in clients:
        client.again(server.listen)
    with pytest.raises(Refused, match="round_closed"):
        late.push()
    each(rest, "send_unmask_shares")
    with Control(server.control) as again:
        published_version(again, late.command.round)
    np.testing.assert_allclose(parameters(rest[0].link), expected(rest, rest[0].link), atol=1e-7)


def test_a_restored_server_does_not_go_on_with_a_secure_round(
    server: Fleet, control: Control, party: Callable[..., Party]
) -> None:
    clients = party()
    job_id, _ = start(control, clients)
    each(clients, "send_keys")
    server.server.kill()
    state = server.directory / "state" / "server"
    set_epoch(state, 1)
    server.start_server()
    with Control(server.control) as again:
        for _ in again.follow_job(job_id):
            pass
        assert again.rounds(limit=1)[0].reason == "restored"
    assert ask(state, "SELECT round FROM secure_messages UNION SELECT round FROM secure_rounds") == []


@pytest.mark.slow
def test_a_client_that_comes_too_late_is_told_and_the_round_goes_on(
    control: Control, party: Callable[..., Party]
) -> None:
    clients = party()
    job_id, events = start(control, clients, secure_aggregation={"step_seconds": 10})
    late, rest = clients[0], clients[1:]
    each(rest, "send_keys", "send_shares", "take_peers", "push", "sign_survivors", "send_unmask_shares")
    assert late.link.expect("round_ended").reason == "too_late"
    assert outcome(control, job_id, events).state == "completed"
    np.testing.assert_allclose(parameters(rest[0].link), expected(rest, rest[0].link), atol=1e-7)


@pytest.mark.parametrize(
    ("step", "reason"),
    [("keys", "too_few_for_threshold"), ("shares", "too_few_for_threshold")]
    + [(step, "too_few_to_unmask") for step in ("survivors", "unmask")],
)
def test_a_round_of_which_too_few_are_left_is_abandoned(
    control: Control, party: Callable[..., Party], step: str, reason: str
) -> None:
    clients = party()
    job_id, events = start(control, clients)
    for name in STEPS[: STEPS.index(step)]:
        each(clients, *CALLS[name])
    for client in clients[:2]:
        client.link.say(failed(client))
    each(clients[2:], *CALLS[step])
    assert outcome(control, job_id, events).state == "failed"
    assert control.rounds(limit=1)[0].reason == reason
    for client in clients:
        while client.link.expect("round_ended").reason != reason:
            pass


def test_groups_of_a_round_stand_and_fall_by_themselves(control: Control, party: Callable[..., Party]) -> None:
    clients = party("abcdefg")
    job_id, events = start(control, clients, needed=3, secure_aggregation={"group_size": 3})
    each(clients, "send_keys", "send_shares", "take_peers", "push")
    groups: dict[tuple[str, ...], Party] = {}
    for client in clients:
        groups.setdefault(tuple(client.roster.places), []).append(client)
    assert sorted(map(len, groups)) == [3, 4]
    small, large = sorted(groups.values(), key=len)
    each(large, "sign_survivors", "send_unmask_shares")
    small[0].link.say(failed(small[0]))
    each(small[1:], "sign_survivors")
    assert outcome(control, job_id, events).state == "completed"
    np.testing.assert_allclose(parameters(large[0].link), expected(large, large[0].link), atol=1e-7)


def refused(client: SecureClient, method: str, message: Any, reason: str = "bad_secure_message") -> None:
    with pytest.raises(Refused) as caught:
        client.call(method, message)
    assert caught.value.reason == reason


def changed(message: Any, change: Callable[[Any], object]) -> Any:
    """Return a copy of a message to which something was done."""
    copy = type(message).FromString(message.SerializeToString())
    change(copy)
    return copy


def test_keys_that_do_not_fit_are_refused_and_repeated_ones_are_not(
    server: Fleet, control: Control, party: Callable[..., Party]
) -> None:
    clients = party()
    start(control, clients)
    a, b, *_ = clients
    number, keys = a.command.round, a.keys()
    refused(a, "SendKeys", wire.SecureKeys(round=number + 1), "unknown_round")
    refused(a, "SendKeys", wire.SecureKeys(round=number))
    refused(a, "SendKeys", b.keys())
    refused(a, "SendKeys", changed(keys, lambda copy: copy.keys.MergeFrom(wire.SignedKeys(signature=bytes(64)))))
    refused(a, "SendKeys", wire.SecureKeys(round=number, keys=wire.SignedKeys(statement=bytes(1 << 17))))
    refused(a, "SendShares", wire.SecureShares(round=number), "round_closed")
    stranger = SecureClient(server.listen, "z", a.update)
    stranger.command = a.command
    stranger.draw()
    refused(stranger, "SendKeys", stranger.keys(), "not_selected")
    stranger.close()
    for _ in range(2):
        a.call("SendKeys", keys)
    b.take_secrets_of(a)
    refused(b, "SendKeys", b.keys())
    a.draw()
    refused(a, "SendKeys", a.keys(), "other_message")


def test_what_follows_the_keys_is_refused_if_it_does_not_fit(control: Control, party: Callable[..., Party]) -> None:
    clients = party()
    start(control, clients)
    each(clients, "send_keys")
    a, *rest = clients
    with pytest.raises(Refused, match="not_selected"):
        a.push_bytes(bytes(100))  # nobody knows yet for which peers it is masked
    each(rest, "send_shares")
    shares = rest[0].sent["SendShares"]
    refused(a, "SendShares", shares)
    a.send_shares()
    refused(rest[0], "SendShares", changed(shares, lambda copy: copy.shares.pop()), "other_message")
    each(clients, "take_peers")
    for size in (100, len(a.masked()) - 1):
        with pytest.raises(Refused, match="wrong_width"):
            a.push_bytes(bytes(size))
    each(clients, "push")
    a.step("survivors")
    refused(a, "SignSurvivors", wire.SurvivorsSignature(round=a.command.round, signature=bytes(64)))
    refused(a, "SendUnmaskShares", wire.UnmaskShares(round=a.command.round, shares=[bytes(66)] * 5), "round_closed")
    each(rest, "sign_survivors")
    a.link.say(failed(a))
    a.survivors = rest[0].survivors
    rest[0].step("unmask")
    refused(rest[0], "SendUnmaskShares", changed(rest[0].unmask_shares(), lambda copy: copy.shares.pop()))
    short = wire.UnmaskShares(round=a.command.round, shares=[bytes(65)] * 5)
    refused(rest[0], "SendUnmaskShares", short)
    refused(a, "SendUnmaskShares", a.unmask_shares(), "round_closed")
    rest[0].call("SendUnmaskShares", rest[0].unmask_shares())
    each(rest[1:], "send_unmask_shares")
    published_version(control, a.command.round)


@pytest.mark.parametrize("liars", [1, 2])
def test_wrong_shares_end_the_round_only_if_too_few_are_right(
    control: Control, party: Callable[..., Party], liars: int
) -> None:
    clients = party()
    job_id, events = start(control, clients)
    each(clients, "send_keys", "send_shares", "take_peers", "push", "sign_survivors")
    wrong = wire.UnmaskShares(round=clients[0].command.round, shares=[bytes(66)] * 5)
    for client in clients[:liars]:
        client.step("unmask")
        client.call("SendUnmaskShares", wrong)
    each(clients[liars:], "send_unmask_shares")
    assert outcome(control, job_id, events).state == ("completed" if liars == 1 else "failed")
    ended = control.rounds(limit=1)[0]
    assert ended.reason == ("" if liars == 1 else "too_few_to_unmask")
    assert list(ended.liars) == ["a", "b"][:liars]
    if liars == 1:
        np.testing.assert_allclose(parameters(clients[0].link), expected(clients, clients[0].link), atol=1e-7)


@pytest.mark.parametrize("fault", ["damaged", "impossible"])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_group_whose_sum_is_spoilt_does_not_count(
    server: Fleet, control: Control, party: Callable[..., Party], fault: str, groups: int
) -> None:
    clients = party("abcdef")
    table = {"group_size": 3 if groups == 2 else 0}
    job_id, _ = start(control, clients, needed=3 if groups == 2 else 5, secure_aggregation=table)
    each(clients, "send_keys", "send_shares", "take_peers")
    spoilt = clients[0]
    if fault == "impossible":
        rest = np.random.default_rng(5).bytes(len(spoilt.masked()) - 16)
        spoilt.push_bytes(spoilt.masked()[:16] + rest)
    else:
        spoilt.push()
    each(clients[1:], "push")
    each(clients, "sign_survivors")
    if fault == "damaged":
        server.server.kill()
        state = server.directory / "state" / "server"
        ask(state, "UPDATE updates SET payload = zeroblob(length(payload)) WHERE client_id = ?", spoilt.name)
        server.start_server()
        for client in clients:
            client.again(server.listen)
    each(clients, "send_unmask_shares")
    with Control(server.control) as again:
        for _ in again.follow_job(job_id):
            pass
        job, round_ = again.job(job_id), again.rounds(limit=1)[0]
    if groups == 1:
        assert round_.reason == {"damaged": "damaged_blob", "impossible": "bad_sum"}[fault]
        return
    assert job.state == "completed"
    good = [client for client in clients if spoilt.name not in client.roster.places]
    np.testing.assert_allclose(parameters(good[0].link), expected(good, good[0].link), atol=1e-7)


@pytest.mark.parametrize("step", STEPS)
def test_a_job_with_secure_aggregation_can_be_stopped_in_any_step(
    server: Fleet, control: Control, party: Callable[..., Party], step: str
) -> None:
    clients = party()
    job_id, events = start(control, clients)
    each(clients, *(call for before in STEPS[: STEPS.index(step)] for call in CALLS[before]))
    each(clients[:1], *CALLS[step])
    control.stop_job(job_id)
    assert outcome(control, job_id, events).state == "stopped"
    state = server.directory / "state" / "server"
    assert ask(state, "SELECT * FROM secure_messages UNION ALL SELECT *, '' FROM secure_rounds") == []
    for client in clients:
        assert client.link.expect("round_ended").reason == "stopped"
