"""Whether the server is of use: it serves while its storage works."""

import asyncio
from contextlib import suppress

from fedring.daemon.notify import sd_notify
from fedring.rpc.health import Health
from fedring.server.blobs import StorageFailed
from fedring.server.coordinator import Coordinator

_TRIAL_SECONDS = 1.0
_LEAST_BYTES = 1 << 20


async def look_after_storage(coordinator: Coordinator, health: Health) -> None:
    """Keep health true to the storage, and while it fails try it each second, until cancelled."""
    storage, journal = coordinator.facts.storage, coordinator.journal
    with suppress(StorageFailed):
        await _try(coordinator)
    while True:
        await storage.fails.wait()
        text = f"nothing can be kept, so updates are refused and no round goes on: {storage.fault}"
        sd_notify(f"STATUS={text}")
        journal.write("storage_failed", text)
        await health.set(serving=False)
        while storage.fault:
            try:
                await _try(coordinator)
                coordinator.stood_still(storage.since)
                storage.mend()
            except StorageFailed:
                await asyncio.sleep(_TRIAL_SECONDS)
        await health.set(serving=True)
        text = "the state directory takes updates again"
        sd_notify(f"STATUS={text}")
        journal.write("storage_works", text)


async def _try(coordinator: Coordinator) -> None:
    """Return if as much as a round publishes can be kept: less is of no use to it; StorageFailed if not."""
    model = coordinator.latest
    # Beside the model: its delta and what that left out, and of an optimizer up to two values for each of the model's.
    models = 1 + 2 * bool(model and model.residual_blob) + 2 * bool(model and model.optimizer_blob)
    await coordinator.facts.probe(max(_LEAST_BYTES, models * model.bytes if model else 0))
