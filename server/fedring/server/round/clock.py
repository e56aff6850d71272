"""The time that a round has left, kept so that a restart gives it no more."""

import asyncio
import time
from contextlib import suppress
from dataclasses import replace

from fedring.server.round import machine as rd
from fedring.server.round.coordinator import Coordinator
from fedring.server.state.blobs import StorageError

_PERIOD = 1.0
"""Seconds between two notes. Each note says what will be left when the next one is due: a kill gives no notice."""


async def keep_time(coordinator: Coordinator) -> None:
    """Keep noting how long the round in progress may still take, until cancelled."""
    while True:
        await asyncio.sleep(_PERIOD)
        await save_time(coordinator, less=_PERIOD)


async def save_time(coordinator: Coordinator, *, less: float = 0.0) -> None:
    """Note the seconds that the round in progress has left, `less` those that are as good as gone."""
    open_, round_ = coordinator.open, coordinator.state.round
    if open_ is None or round_ is None or round_.phase not in (rd.Phase.WAITING, rd.Phase.TRAINING):
        return
    left = max(0.0, rd.deadline(round_) - time.monotonic() - less)
    open_.row = replace(open_.row, seconds_left=left)
    with suppress(StorageError):  # a disk that is full, or a database that somebody else holds: the next note will do
        await coordinator.facts.db(coordinator.facts.store.save_seconds_left, open_.row.round, round_.phase, left)
