"""Jobs, rounds, updates and models for tests of the store."""

from fedring.server.state.rows import JobRow, ModelRow, PacketSpec, RoundRow, UpdateRow
from fedring.server.state.sql.store import Store


def a_job(store: Store, rounds: int = 3, key: str | None = None) -> JobRow:
    return store.jobs.create(JobRow(0, "digits", {"lr": 0.5}, rounds, 1.5, idempotency_key=key))


def a_round(store: Store, job: JobRow, *, ended: bool = False) -> RoundRow:
    return store.rounds.create(RoundRow(0, job.job_id, 1, "training", 2.5, ended_at=9.0 if ended else None))


def an_update(number: int, client: str, digest: str = "ab", *, epoch: int = 0, name: str = "") -> UpdateRow:
    """Return an update. Its payload's digest, and its name if none is given, are made of two letters."""
    packets = (PacketSpec("parameters", "delta", "uniform", 0, 90), PacketSpec("buffers", "delta", "fp64", 90, 10))
    payload, metrics = f"blake3-{digest * 32}", {"loss": 0.25}
    name = name or f"blake3-{digest[::-1] * 32}"
    return UpdateRow(number, client, payload, name, packets, 64, 100, 1.5, 2.5, 3.5, metrics, blob=payload, epoch=epoch)


def a_model(version: int, *, number: int = 0, residual: str = "", optimizer: str = "") -> ModelRow:
    blob = f"{version:064x}"
    return ModelRow(
        version, number, blob, blob, "cd" * 32, 10, 99, 4.5, residual_blob=residual, optimizer_blob=optimizer
    )
