"""Read each version of a prepared state as clients, operators and programs on the server's host do."""

import queue
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

import grpc
import safetensors.numpy

from fedring.codec import decode
from fedring.codec.digest import name_of
from fedring.control.calls import ENDED
from fedring.control.failure import Failure
from fedring.train import load_model
from fedring.train.errors import SeamError
from fedring.train.models import vector
from fedring.v1 import control_pb2
from fedring.v1 import federation_pb2 as pb
from tests.fault.faulty_fleet import wait_for
from tests.fault.prepared_state import LAST, NAMES, ROUNDS, SIZE, PreparedState, Values, push
from tests.fleets import Control, Fleet
from tests.system.wire import Refused, WireClient
from tests.waiting import until

DAMAGED = ("damaged_blob", "is damaged", "malformed database schema")
MISSING = ("unknown_model", "is not kept", "keeps no model")
"""What the sentences of refusals contain: for damaged versions, and for versions that were never published."""


@dataclass(slots=True)
class Downloads:
    """The outcomes of all attempts to read a version."""

    right: int = 0
    wrong: list[str] = field(default_factory=list)  # the values are not those of the version
    unsound: list[str] = field(default_factory=list)  # the values do not have the digest that came with them
    refused: list[str] = field(default_factory=list)


def deliver_missing_update(fleet: Fleet, prepared: PreparedState, *, facts: bool) -> list[str]:
    """Deliver the update of c, and those of others for which the server asks again, until the job has ended.

    Args:
        fleet: its server has a copy of the prepared state.
        prepared: the state.
        facts: whether the database is damaged; then it is enough that the round has ended.

    Returns:
        Words on what became of the update and of the job.
    """
    words = [wait_for(fleet, "an answer to the update", lambda: push_missing_update(fleet, prepared))]
    with ExitStack() as stack:
        control = stack.enter_context(Control(fleet.control))
        others = [stack.enter_context(WireClient(fleet.listen, name)) for name in NAMES[:2]]

        def ended() -> bool:
            for client in others:
                redeliver(client, prepared)
            job = next(iter(control.jobs(job_id=prepared.job_id)), None)
            over = job is None or job.state in ENDED
            return over or (facts and all(row.phase in ("published", "abandoned") for row in last_round(control)))

        wait_for(fleet, "the end of the job", lambda: until(ended))
        for job in control.jobs(job_id=prepared.job_id):
            words.append(f"{job.state}: {job.reason}" if job.reason else job.state)
            assert facts or job.state == "completed" or job.reason.startswith("damaged_blob"), words
        words += [f"without {', '.join(row.missing)}" for row in last_round(control) if row.missing]
    return words


def redeliver(client: WireClient, prepared: PreparedState) -> None:
    """Deliver the client's update again if the server asks for it, as it does when its accepted copy is damaged."""
    with suppress(queue.Empty, Refused):
        event = client.events.get_nowait()
        if event.HasField("train") and event.train.round == prepared.command.round:
            push(client, prepared.command, prepared.updates[client.client_id])


def push_missing_update(fleet: Fleet, prepared: PreparedState) -> str:
    """Push the update of c until the server accepts it or refuses it for good; return which, with the reason."""
    while True:
        try:
            with WireClient(fleet.listen, "c") as client:
                push(client, prepared.command, prepared.updates["c"])
                return "accepted"
        except Refused as error:
            if error.reason == "internal":
                raise
            if error.code is not grpc.StatusCode.UNAVAILABLE:
                return f"c: {error.reason}"


def read_all_versions(fleet: Fleet, prepared: PreparedState) -> Downloads:
    """Fetch each version whole and as a delta, export it, and load it from the state folder."""
    seen = Downloads()
    state, out = fleet.directory / "state" / "server", fleet.directory / "exported"
    with Control(fleet.control) as control, WireClient(fleet.listen, "reader") as client:
        truth: dict[int, Values | None] = {**prepared.models, LAST: last_model(control, prepared)}

        def fetched(version: int, held: str = "") -> Values:
            header, payload = client.fetch(version, held)
            values = values_of(header, payload, truth.values())
            sound = name_of(values.tobytes()) == header.model_digest
            if not sound and not header.base_digest:  # a client notices a wrong delta, and asks for the whole model
                seen.unsound.append(f"model {version}")
            return values

        def as_a_delta(version: int) -> Values:
            before = truth.get(version - 1)
            return fetched(version, "" if before is None else name_of(before.tobytes()))

        def exported(version: int) -> Values:
            control.export_model(version, out)
            return safetensors.numpy.load_file(out)["values"]

        def loaded(version: int) -> Values:
            return load_model(version, vector(SIZE), state_dir=state).get_parameter("values").detach().numpy()

        for version in range(1, LAST + 1):
            for get in (fetched, as_a_delta, exported, loaded):
                attempt(seen, get, version, truth[version])
    return seen


def attempt(seen: Downloads, get: Callable[[int], Values], version: int, truth: Values | None) -> None:
    """Call `get` for the version, and add the outcome to `seen`; `truth` is None for a version that must not exist."""
    try:
        values = get(version)
    except (Refused, Failure, SeamError) as error:
        text = f"{get.__name__} {version}: {error} ({getattr(error, 'reason', '')})"
        if any(word in text for word in MISSING):
            (seen.refused if truth is None else seen.wrong).append(text)
        elif any(word in text for word in DAMAGED):
            seen.refused.append(text)
        else:
            raise
        return
    if truth is not None and values.tobytes() == truth.tobytes():
        seen.right += 1
    else:
        seen.wrong.append(f"{get.__name__} {version}")


def values_of(header: pb.ModelHeader, payload: bytes, known: Iterable[Values | None]) -> Values:
    """Decode the parameters that a client has after this answer; a delta is added to the base in `known`."""
    (packet,) = header.packets
    values = decode(payload, name=packet.encoding, length=SIZE)
    if header.base_digest:
        values += next(base for base in known if base is not None and name_of(base.tobytes()) == header.base_digest)
    return values


def last_round(control: Control) -> list[control_pb2.Round]:
    """Return the round that was open, or nothing if the server does not know it."""
    return control.rounds(number=ROUNDS)


def last_model(control: Control, prepared: PreparedState) -> Values | None:
    """Compute the last version from the updates that the round has counted; return None if it was not published."""
    for row in last_round(control):
        if row.model_version == LAST:
            return prepared.expected_result(frozenset(NAMES) - set(row.missing))
    return None
