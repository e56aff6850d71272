"""Readiness: the server serves while its storage works."""

import asyncio
import time
from contextlib import suppress

from fedring.daemon.notify import sd_notify
from fedring.rpc.health import Health
from fedring.server.running.rounds import Rounds, give_time_back
from fedring.server.state.facts import Facts
from fedring.server.state.failures import StorageError
from fedring.server.state.journal import Journal

_TRIAL_SECONDS = 1.0
_LONGEST_SECONDS = 30.0
_LEAST_BYTES = 1 << 20


async def look_after_storage(facts: Facts, rounds: Rounds, journal: Journal, health: Health) -> None:
    """Keep the health in step with the storage, until cancelled.

    A storage that fails is tried again and again.
    """
    storage = facts.storage
    with suppress(StorageError):
        await _try(facts, rounds)
    delay, mended = _TRIAL_SECONDS, -_LONGEST_SECONDS
    while True:
        await storage.fails.wait()
        # A round may need more space than the trial. Storage that fails again at once is not tried each second.
        delay = min(2 * delay, _LONGEST_SECONDS) if time.monotonic() < mended + delay else _TRIAL_SECONDS
        text = f"nothing can be kept, so updates are refused and no round goes on: {storage.fault}"
        sd_notify(f"STATUS={text}")
        journal.write("storage_failed", text)
        await health.set(serving=False, why=text)
        while storage.fault:
            await asyncio.sleep(delay)
            with suppress(StorageError):
                await _try(facts, rounds)
                with suppress(StorageError):  # a restart knows only the database: it would give less time, no more
                    await facts.db(facts.store.commands.delay, time.monotonic() - storage.since)
                give_time_back(rounds, storage.since)
                storage.mend()
        mended = time.monotonic()
        await health.set(serving=True)
        text = "the state directory takes updates again"
        sd_notify(f"STATUS={text}")
        journal.write("storage_works", text)


async def _try(facts: Facts, rounds: Rounds) -> None:
    """Check that the storage takes as much as a round publishes.

    Raises StorageFailed if it does not.
    """
    model, jobs = rounds.latest, [open_.job for open_ in rounds]
    # A delta comes with what it left out; an optimizer may keep two values for each of the model's, a transform one.
    delta = bool((model and model.residual_blob) or any(job.download_encoding != "full" for job in jobs))
    optimizer = bool((model and model.optimizer_blob) or any(job.server_optimizer for job in jobs))
    named = max((len(job.transforms) for job in jobs), default=0)
    size = (1 + 2 * delta + 2 * optimizer + named) * model.bytes if model else 0
    await facts.probe(max(_LEAST_BYTES, size))
