"""Rounds with secure aggregation with a real store: what happens at the same time, and a disk that fails."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tests.unit.host import SIZE, Host, running, spec

from fedring.rpc.errors import UnknownRound
from fedring.secure.keys import draw_secrets
from fedring.secure.roster import signed_keys
from fedring.server.round.events import Delayed, Phase, Round, RoundRules, RoundState
from fedring.server.round.open_round import OpenRound
from fedring.server.secure.events import Group, ProtocolState, SecureRules, SecureStep, SignersChosen
from fedring.server.secure.exchange import SecureExchange
from fedring.server.secure.machine import SecureSteps
from fedring.server.secure.rounds import SecureRounds
from fedring.server.sessions.sessions import Session
from fedring.server.state.rows import ModelRow, RoundRow, UpdateRow
from fedring.server.state.sql.schema import SecureMessageRow
from fedring.signatures.proofs import Proof, public_bytes
from fedring.v1 import federation_pb2 as pb
from fedring.v1 import secure_pb2 as wire

NAMES = ("a", "b", "c")


def secure_rounds(host: Host) -> SecureRounds:
    (found,) = [kind for kind in host.parts.kinds if isinstance(kind, SecureRounds)]
    return found


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    async with running(tmp_path) as host:
        yield host


async def begun(host: Host, **keys: Any) -> tuple[int, list[Session], OpenRound]:
    """Start a job with secure aggregation; return its id, the sessions of its clients, and its first round."""
    sessions = [host.join(name) for name in NAMES]
    fixed = {"min_clients": 3, "min_clients_to_aggregate": 3, "max_abandoned": 1, "secure_aggregation": {}}
    job, _ = await host.jobs.start(spec(**fixed | keys), "")
    for session in sessions:
        await host.command(session)
    return job.job_id, sessions, host.round


def keys_of(name: str, command: pb.TrainCmd) -> wire.SecureKeys:
    key = Ed25519PrivateKey.generate()
    proof = Proof(public_key=public_bytes(key.public_key()))
    return wire.SecureKeys(round=command.round, keys=signed_keys(command, name, draw_secrets(), key, proof))


async def send_keys(host: Host, open_: OpenRound, names: Sequence[str] = NAMES) -> None:
    for name in names:
        await secure_rounds(host).take(name, keys_of(name, open_.command))


async def test_no_message_is_kept_of_a_round_that_ends_while_it_is_checked(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id, _, open_ = await begun(host)
    monkeypatch.setattr(secure_rounds(host), "_check", lambda _name, _proof: host.gate.pass_("check"))
    host.gate.close("check")
    late = asyncio.create_task(send_keys(host, open_, ["a"]))
    await host.gate.reached()
    await host.jobs.stop(job_id)
    assert await host.ended(job_id) == "stopped"
    host.gate.open()
    with pytest.raises(UnknownRound):
        await late
    assert await host.facts.db(host.store.kept.of_round, SecureMessageRow, open_.row.round) == []


async def test_a_round_is_not_given_up_while_the_disk_takes_no_messages(host: Host) -> None:
    _, sessions, open_ = await begun(host)
    host.facts.storage.fail("disk_full")
    host.rounds.handle(open_, Delayed(-600))  # the step's time is over
    async with asyncio.timeout(60):
        while open_.changed.is_set():  # until the runner has looked at what is due
            assert open_.phase is Phase.TRAINING
            await asyncio.sleep(0)
    assert open_.phase is Phase.TRAINING
    host.rounds.handle(open_, Delayed(600))  # as soon as the disk works again, the time that it has taken is given back
    host.facts.storage.mend()
    await send_keys(host, open_)
    async with asyncio.timeout(60):
        event = pb.ServerEvent.FromString(await sessions[0].outbox.get())
    assert event.secure.WhichOneof("step") == "roster"


def test_the_masks_of_a_group_are_made_anew_after_a_restart_between_two_groups() -> None:
    row = RoundRow(1, 1, 1, Phase.TRAINING, 0.0, selected=tuple("abcdef"))
    job = spec(min_clients=6, min_clients_to_aggregate=5, secure_aggregation={"group_size": 3})
    open_ = OpenRound(row, job, pb.TrainCmd(round=1), ModelRow(1, 0, "", "", "", SIZE, 0, 0.0))
    open_.accepted = {name: UpdateRow(1, name, "", "", (), 1, 1, 0.1, 1.0, 0.0) for name in "abcdef"}
    rules = SecureRules(60.0, 3)
    first, second = (
        Group(names, step, 0.0, names, names, names, frozenset(names))
        for names, step in ((("a", "b", "c"), SecureStep.DONE), (("d", "e", "f"), SecureStep.SURVIVORS))
    )
    state = ProtocolState(rules, frozenset("abcdef"), 0.0, frozenset("abcdef"), (first, second), frozenset("abcdef"))
    selected = frozenset("abcdef")
    round_ = Round(1, RoundRules(), Phase.AGGREGATING, 0.0, selected, selected, steps=SecureSteps(state))
    open_.state = RoundState(round=round_)
    noted = SecureExchange(open_).row(1, 0, SignersChosen(1, second.members))  # the first group's masks are in memory
    restored = SecureExchange(open_).restored(rules, noted, 0.0)
    assert [group.step for group in restored.groups] == [SecureStep.UNMASK, SecureStep.UNMASK]
