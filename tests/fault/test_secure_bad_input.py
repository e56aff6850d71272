"""Rounds with secure aggregation end in time, with one stable reason, whatever clients send or do not send."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedring.secure.keys import DIGEST_BYTES, SEALED_BYTES
from fedring.secure.shamir import SHARE_BYTES
from fedring.v1 import secure_pb2 as wire
from tests.damage import ask
from tests.fault.faulty_fleet import FaultyFleet, job_end, wait_for
from tests.fault.secure_fleet import SecureFleet, secure_job
from tests.fault.secure_party import Party, fail, party, start
from tests.fleets import Control, Fleet
from tests.secure_client import CALLS, STEPS, SecureClient
from tests.system.wire import SECONDS, Refused, outcome, stop_jobs

CLIENTS = 5  # the threshold is 4
METHODS = {"keys": "SendKeys", "shares": "SendShares", "survivors": "SignSurvivors", "unmask": "SendUnmaskShares"}
REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT: {"bad_request", "bad_secure_message"},
    grpc.StatusCode.FAILED_PRECONDITION: {"unknown_round", "not_selected", "round_closed", "other_message"},
}
"""How the server may refuse a message, and for which reasons."""
MOST_BYTES = 1 << 16


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with FaultyFleet(tmp_path_factory.mktemp("bad-input")) as fleet:
        yield fleet


@pytest.fixture
def control(fleet: Fleet) -> Iterator[Control]:
    """Connect to the control service; stop the jobs that a test has left."""
    with Control(fleet.control) as control:
        yield control
        stop_jobs(control)


def go_to(step: str, clients: Party, late: SecureClient) -> None:
    """Let all clients make all steps before this one, and all but one of them this one."""
    for each in STEPS[: STEPS.index(step) + 1]:
        for call in CALLS[each]:
            for client in clients:
                if client is not late or each != step:
                    getattr(client, call)()


def hostile(number: int) -> st.SearchStrategy[bytes]:
    """Return messages for the calls of a round that no honest client sends."""
    rounds = st.sampled_from([number, number, number, number + 1, 0, 2**64 - 1])
    some, names = st.binary(max_size=300), st.text(max_size=20) | st.sampled_from([f"c{n:02}" for n in range(CLIENTS)])
    sealed = st.binary(max_size=2 * SEALED_BYTES) | st.just(bytes(SEALED_BYTES - 1))
    keys = st.builds(
        wire.SignedKeys,
        statement=some,
        signature=some,
        certificates=st.lists(some, max_size=6),
        public_key=some,
    )
    parts = st.lists(st.binary(max_size=2 * SHARE_BYTES), max_size=200)
    shares = st.lists(st.builds(wire.SealedShares, client_id=names, sealed=sealed), max_size=120)
    messages = st.one_of(
        st.builds(wire.SecureKeys, round=rounds, keys=keys),
        st.builds(wire.SecureShares, round=rounds, shares=shares),
        st.builds(wire.SurvivorsSignature, round=rounds, signature=some),
        st.builds(wire.UnmaskShares, round=rounds, shares=parts),
    )
    return some | messages.map(lambda message: message.SerializeToString())


def send(client: SecureClient, method: str, data: bytes) -> tuple[grpc.StatusCode, str] | None:
    """Send bytes as the message of a call; return how they were refused, None if they were taken."""
    call: Any = client.link.channel.unary_unary(f"/fedring.v1.SecureAggregationService/{method}")
    try:
        call(data, metadata=client.link.metadata, timeout=SECONDS)
    except grpc.RpcError as error:
        refused = Refused(error)
        return refused.code, refused.reason
    return None


def sealed_for(name: str, digest: int = DIGEST_BYTES) -> wire.SealedShares:
    """Return shares for a client that do not open, with digests of this length."""
    return wire.SealedShares(client_id=name, sealed=bytes(SEALED_BYTES), digests=bytes(2 * digest))


@pytest.mark.parametrize("step", METHODS)
def test_hostile_messages_are_refused_in_every_step_and_change_nothing(
    fleet: Fleet, control: Control, step: str
) -> None:
    state = Path(fleet.server.settings["state_dir"])
    with party(fleet, CLIENTS) as clients:
        job_id, events = start(control, clients)
        evil = clients[0]
        go_to(step, clients, evil)
        number = evil.command.round
        before = ask(state, "SELECT * FROM secure_messages ORDER BY client_id, kind")

        @given(st.sampled_from(sorted(METHODS.values())), hostile(number))
        def try_out(method: str, data: bytes) -> None:
            refused = send(evil, method, data)
            assert refused is not None
            assert refused[1] in REFUSALS.get(refused[0], ()), refused

        try_out()
        for method in METHODS.values():
            large = wire.UnmaskShares(round=number, shares=[bytes(MOST_BYTES)]).SerializeToString()
            assert send(evil, method, large) is not None
            assert send(evil, method, bytes(32 << 20)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "resource_exhausted")
        assert ask(state, "SELECT * FROM secure_messages ORDER BY client_id, kind") == before
        for each in STEPS[STEPS.index(step) :]:
            for call in CALLS[each]:
                for client in clients if each != step else [evil]:
                    getattr(client, call)()
        assert wait_for(fleet, "the end of the job", lambda: outcome(control, job_id, events)).state == "completed"


def test_messages_of_the_right_form_with_wrong_contents_have_one_reason_each(fleet: Fleet, control: Control) -> None:
    with party(fleet, CLIENTS) as clients:
        job_id, events = start(control, clients)
        evil, number = clients[0], clients[0].command.round

        def refused(method: str, message: Any) -> str:
            found = send(evil, method, message.SerializeToString())
            return found[1] if found else "taken"

        evil.command.round += 1
        other = evil.keys()
        evil.command.round -= 1
        assert refused("SendKeys", other) == "unknown_round"
        other.round = number
        assert refused("SendKeys", other) == "bad_secure_message"
        go_to("shares", clients, evil)
        assert refused("SendKeys", clients[1].keys()) == "other_message"
        sealed = [sealed_for(client.name) for client in clients]
        for dealt in (sealed, sealed[:0:-1], [*sealed[1:-1], sealed_for(clients[-1].name, digest=31)]):
            assert refused("SendShares", wire.SecureShares(round=number, shares=dealt)) == "bad_secure_message"
        evil.send_shares()
        for client in clients:
            client.take_peers()
        roster, evil.roster = evil.roster, evil.roster.__class__(evil.roster.members * 8)  # its sums are wider
        with pytest.raises(Refused, match="wrong_width"):
            evil.push()
        evil.roster = roster
        evil.sent.clear()
        for client in clients:
            client.push()
        for client in clients[1:]:
            client.sign_survivors()
        assert (
            refused("SignSurvivors", wire.SurvivorsSignature(round=number, signature=bytes(64))) == "bad_secure_message"
        )
        evil.sign_survivors()
        evil.step("unmask")
        right = evil.unmask_shares()
        for shares in (right.shares[1:], [*right.shares, right.shares[0]], [share[1:] for share in right.shares]):
            assert refused("SendUnmaskShares", wire.UnmaskShares(round=number, shares=shares)) == "bad_secure_message"
        evil.call("SendUnmaskShares", right)
        for client in clients[1:]:
            client.send_unmask_shares()
        assert wait_for(fleet, "the end of the job", lambda: outcome(control, job_id, events)).state == "completed"


def test_a_share_that_does_not_open_ends_the_round_for_all_that_it_was_sealed_for(tmp_path: Path) -> None:
    with SecureFleet(tmp_path, CLIENTS - 1) as fleet, Control(fleet.control) as control:
        with party(fleet, 1) as (evil,):
            events = control.events()
            job_id = control.start_job(secure_job(CLIENTS, max_abandoned=1)).job_id
            evil.begin()
            evil.send_keys()
            members = [wire.KeyStatement.FromString(each.statement) for each in evil.step("roster").roster.members]
            names = [member.client_id for member in members if member.client_id != evil.name]
            sealed = map(sealed_for, names)
            evil.call("SendShares", wire.SecureShares(round=evil.command.round, shares=sealed))
            failed = (event for event in events if event.kind == "client_failed")
            texts = wait_for(fleet, "the failures", lambda: sorted(next(failed).text for _ in names))
            fail(evil)
            job_end(fleet, control, job_id)
        assert [text.partition(": a share")[0] for text in texts] == [
            f"{name} could not train: bad_share" for name in names
        ]
        assert control.rounds(limit=1)[0].reason == "too_few_clients"
        fleet.wait_until_forgotten()
        assert fleet.run_round({}) == ("", CLIENTS - 1)


@pytest.mark.alone
def test_a_round_waits_for_silent_clients_no_longer_than_it_may(fleet: Fleet, control: Control) -> None:
    step_seconds, deadline = 3.0, 12.0
    with party(fleet, 14) as clients:
        # Of 13 clients with keys, 4 may be lost: one in each later step.
        keys = {"deadline_seconds": deadline, "min_clients_to_aggregate": 10}
        job_id, events = start(control, clients, secure_aggregation={"step_seconds": step_seconds}, **keys)
        left = list(clients)
        for step in STEPS:
            left.pop(0)
            for call in CALLS[step]:
                for client in left:
                    getattr(client, call)()
        assert wait_for(fleet, "the end of the job", lambda: outcome(control, job_id, events)).state == "completed"
        (round_,) = control.rounds(limit=1)
        assert {step: round_.secure.lost[step] for step in STEPS} == dict.fromkeys(STEPS, 1)
        assert round_.delivered == 11
        assert deadline - 1 < round_.seconds < deadline + 2 * step_seconds + 2
