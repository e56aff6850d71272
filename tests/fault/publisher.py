"""A process that accepts updates and publishes rounds until it is killed, and prints what is durable.

    python -m tests.fault.publisher FOLDER CRASH_POINT

It dies at CRASH_POINT in its third round; with an empty CRASH_POINT it goes on until the test kills it.
"""

import os
import sys
from pathlib import Path

from fedring.server.state.blobs import FileBlobs
from fedring.server.state.rows import Acceptance, JobRow, ModelRow, PacketSpec, RoundRow, UpdateRow
from fedring.server.state.sql.store import Store

BATCH = 4


def main() -> None:
    """Publish rounds into the folder that the command line names."""
    publish_until_killed(Path(sys.argv[1]), sys.argv[2])


def open_state(root: Path) -> tuple[FileBlobs, Store]:
    """Open the blobs and the database in `root`."""
    return FileBlobs(root), Store(f"sqlite:///{root / 'facts.sqlite'}")


def publish_until_killed(root: Path, crash_at: str) -> None:
    """Publish rounds, print a line for each update and model that is durable, and die at `crash_at` in round 3."""
    blobs, store = open_state(root)
    blobs.sweep(store.named_blobs())
    job = store.jobs.create(JobRow(0, "kill", {}, 1 << 20, 0.0))
    while True:
        opened = store.rounds.create(RoundRow(0, job.job_id, 1, "training", 0.0))
        if opened.round % 3 == 0 and crash_at:
            os.environ["FL_CRASH_AT"] = crash_at
        rows, partials = [], []
        for client in range(BATCH):
            partial = blobs.open_partial(f"{opened.round}-{client}")
            for chunk in range(4):
                partial.write(f"{opened.round} {client} {chunk} ".encode() * 2000)
            packets = (PacketSpec("parameters", "delta", "fp32", 0, partial.size),)
            digest = partial.digest
            row = UpdateRow(
                opened.round, str(client), digest, digest, packets, 1, partial.size, 0.0, 0.0, 0.0, blob=digest
            )
            rows.append(row)
            partials.append(partial)
        blobs.seal_many(partials)
        if store.updates.accept(rows) != [Acceptance.NEW] * BATCH:
            raise SystemExit("an update was not new")
        for row in rows:
            print("update", row.round, row.client_id, row.digest, flush=True)
        model = blobs.open_partial("model", fresh=True)
        model.write(f"model {opened.round}".encode() * 100)
        size, blob = model.size, blobs.seal_many([model])[0]
        ended = RoundRow(opened.round, job.job_id, 1, "published", 0.0, ended_at=1.0, model_version=opened.round)
        store.models.publish(ModelRow(opened.round, opened.round, blob, blob, "", 1, size, 0.0), ended)
        print("model", opened.round, opened.round, blob, flush=True)


if __name__ == "__main__":
    main()
