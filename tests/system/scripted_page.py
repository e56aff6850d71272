"""The page, served with states that a test sets: many machines, rare failures, and jobs that have long ended."""

import asyncio
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fedring.web.serve import WebServer
from tests.system.browser import SECONDS

JOB = {
    "job_id": 7, "name": "large", "state": "running", "reason": "", "rounds": 2000, "rounds_done": 990,
    "created_at": "2026-01-01T00:00:00.000+00:00", "mode": "federated", "model": "m", "data": "d",
    "encoding": "packed", "download_encoding": "uniform",
}  # fmt: skip
ROUND = {
    "round": 1, "job_id": 7, "job_round": 1, "phase": "published", "reason": "", "selected": 3, "delivered": 3,
    "model_version": 2, "seconds": 1.5, "evaluate_seconds": 0.1, "train_seconds_max": 1.0, "upload_bytes": 3000,
    "download_bytes": 9000, "started_at": "2026-01-01T00:00:00.000+00:00", "missing": [], "accuracy": 0.5, "loss": 1.0,
    "server_accuracy": None, "server_loss": None, "upload_by_encoding": {"packed": 3000}, "peer_bytes": 0,
    "base_version": 1, "stalled": [], "stragglers": [], "metrics": {},
}  # fmt: skip
SERVER = {
    "version": "1",
    "run_id": "r",
    "started_at": ROUND["started_at"],
    "clients": 3,
    "watching": 3,
    "model_version": 2,
}


class Script:
    """A source of states that a test sets."""

    def __init__(self) -> None:
        self.now: dict[str, Any] = {
            "server": SERVER, "round": None, "waits_for": None, "clients": [], "group": None,
            "jobs": [], "models": [], "events": [],
        }  # fmt: skip
        self.history: list[dict[str, Any]] = []
        self.settings: dict[int, dict[str, Any]] = {}
        self.changed: list[str] = []
        self.parts: dict[int, list[dict[str, Any]]] = {}
        self.unknown: set[int] = set()  # ids of jobs
        self.all_clients: list[dict[str, Any]] = []  # of which `now` has the first

    def play(self, other: "Script") -> None:
        """Take the states of another one, so that one server can serve several tests."""
        vars(self).clear()
        vars(self).update(vars(other))

    async def state(self) -> Mapping[str, Any]:
        return dict(self.now)

    async def rounds(self, job_id: int, after: int, *, clients: bool = False) -> Mapping[str, Any]:
        job = JOB | {"job_id": job_id or 7, "settings": self.settings.get(job_id, {}), "changed": self.changed}
        rows = [row for row in self.history if row["round"] > after and row["job_id"] == (job_id or 7)]
        return {
            "job": None if job_id in self.unknown else job,
            "rounds": [row | {"clients": self.parts.get(row["round"], [])} for row in rows] if clients else rows,
        }

    async def clients(self, search: str, skip: int) -> Mapping[str, Any]:
        found = [client for client in self.all_clients if search.lower() in client["client_id"]]
        return {"clients": found[skip : skip + 200], "total": len(found)}

    async def events(self, after: int) -> Mapping[str, Any]:
        return {"events": []}


@contextmanager
def served(script: Script) -> Iterator[str]:
    """Serve the page on a free port, with an event loop in a thread of its own; return its URL."""
    loop = asyncio.new_event_loop()
    server = WebServer(script, "127.0.0.1", 0)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    run = asyncio.run_coroutine_threadsafe(server.run(), loop)
    try:
        yield server.url
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(5), loop).result(SECONDS)
        run.result(SECONDS)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
