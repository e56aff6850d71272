"""What clients, operators and programs beside the server get of each version of a prepared state."""

import queue
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

import grpc
import safetensors.numpy

from fedring.codec import decode
from fedring.codec.digest import name_of
from fedring.ctl.control import ENDED
from fedring.ctl.failure import Failure
from fedring.train import load_model
from fedring.train.errors import SeamError
from fedring.train.models import vector
from fedring.v1 import control_pb2
from fedring.v1 import federation_pb2 as pb
from tests.fault.patience import patiently
from tests.fault.prepared import LAST, NAMES, ROUNDS, SIZE, Prepared, Values, push
from tests.fleets import Control, Fleet
from tests.system.wire import Refused, WireClient
from tests.waiting import until

DAMAGED = ("damaged_blob", "is damaged")
MISSING = ("unknown_model", "is not kept", "keeps no model")
"""What refusals say; the latter of what was never published."""


@dataclass(slots=True)
class Seen:
    """What came of all attempts."""

    right: int = 0
    wrong: list[str] = field(default_factory=list)  # other values than the version has
    unsound: list[str] = field(default_factory=list)  # other values than the digest beside them is of
    refused: list[str] = field(default_factory=list)


def deliver_last(fleet: Fleet, prepared: Prepared, *, facts: bool) -> list[str]:
    """Deliver the missing update, as often as the server asks for it, and wait for what follows.

    Returns what became of the update, and of the job. With `facts` the database is damaged: then it is enough that
    the round has ended.
    """
    words = [patiently(fleet, "an answer to the update", lambda: push_last(fleet, prepared))]
    with ExitStack() as stack:
        control = stack.enter_context(Control(fleet.control))
        others = [stack.enter_context(WireClient(fleet.listen, name)) for name in NAMES[:2]]

        def ended() -> bool:
            for client in others:
                deliver_again(client, prepared)
            job = next(iter(control.jobs(job_id=prepared.job_id)), None)
            over = job is None or job.state in ENDED
            return over or (facts and all(row.phase in ("published", "abandoned") for row in last_round(control)))

        patiently(fleet, "the end of the job", lambda: until(ended))
        for job in control.jobs(job_id=prepared.job_id):
            words.append(f"{job.state}: {job.reason}" if job.reason else job.state)
            assert facts or job.state == "completed" or job.reason.startswith("damaged_blob"), words
        words += [f"without {', '.join(row.missing)}" for row in last_round(control) if row.missing]
    return words


def deliver_again(client: WireClient, prepared: Prepared) -> None:
    """Deliver the client's update once more if the server asks for it: it may have lost what it had accepted."""
    with suppress(queue.Empty, Refused):
        event = client.events.get_nowait()
        if event.HasField("train") and event.train.round == prepared.command.round:
            push(client, prepared.command, prepared.updates[client.client_id])


def push_last(fleet: Fleet, prepared: Prepared) -> str:
    """What the server says to c in the end."""
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


def look(fleet: Fleet, prepared: Prepared) -> Seen:
    """Get each version in every way that there is."""
    seen = Seen()
    state, out = fleet.directory / "state" / "server", fleet.directory / "exported"
    with Control(fleet.control) as control, WireClient(fleet.listen, "onlooker") as client:
        truth: dict[int, Values | None] = {**prepared.models, LAST: last_model(control, prepared)}

        def fetched(version: int, held: str = "") -> Values:
            header, payload = client.fetch(version, held)
            values = values_of(header, payload, truth.values())
            sound = name_of(values.tobytes()) == header.model_digest
            if not sound and not header.base_digest:  # who holds another base notices, and asks for the whole
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


def attempt(seen: Seen, get: Callable[[int], Values], version: int, truth: Values | None) -> None:
    """Note what one way of getting a version gives."""
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
    """The model that a client has after this answer, if it held what it said."""
    (packet,) = header.packets
    values = decode(payload, name=packet.encoding, length=SIZE)
    if header.base_digest:
        values += next(base for base in known if base is not None and name_of(base.tobytes()) == header.base_digest)
    return values


def last_round(control: Control) -> list[control_pb2.Round]:
    """The round that was open, if it is known."""
    return control.rounds(number=ROUNDS)


def last_model(control: Control, prepared: Prepared) -> Values | None:
    """What the last version must be by the clients that the round has counted; None if it was not published."""
    for row in last_round(control):
        if row.model_version == LAST:
            return prepared.result(frozenset(NAMES) - set(row.missing))
    return None
