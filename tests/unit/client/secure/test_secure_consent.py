"""Rounds with masks of jobs that nobody at the site has approved."""

import threading
import time
from pathlib import Path
from typing import Any

from tests.honest_clients import SECONDS
from tests.secure_server import SecureServer

from fedring.client import connect
from fedring.client.consent.cards import Cards, Decision
from fedring.client.secure.state import FOLDER


def test_a_client_exchanges_no_keys_before_its_site_has_approved_the_job(tmp_path: Path) -> None:
    with SecureServer() as server:
        settings: dict[str, Any] = {"server": server.address, "client_id": "ann", "state_dir": tmp_path}
        with connect(**settings, approval={"mode": "cards"}) as federation:
            thread = threading.Thread(target=lambda: list(federation))
            thread.start()
            server.until(lambda: "ann" in server.matched)
            server.train("ann", server.command(1))
            server.until(lambda: server.failures.get((1, "ann")) == "not_approved")
            (kept,), _ = Cards(tmp_path).all()
            Cards(tmp_path).decide(kept, Decision(time.time(), 0, approved=True))
            server.train("ann", server.command(2))  # which the client takes after the first one
            server.await_all(server.keys, 2, ["ann"])
            assert (1, "ann") not in server.keys
            assert [path.name.endswith("-0-2.json") for path in (tmp_path / FOLDER).iterdir()] == [True]
            federation.close()
            thread.join(SECONDS)


def test_a_job_that_is_not_approved_ends_no_round_of_another(tmp_path: Path) -> None:
    with SecureServer() as server:
        settings: dict[str, Any] = {"server": server.address, "client_id": "ann", "state_dir": tmp_path}
        with connect(**settings, approval={"mode": "cards"}) as federation:
            thread = threading.Thread(target=lambda: list(federation))
            thread.start()
            server.until(lambda: "ann" in server.matched)
            server.train("ann", server.command(1))
            server.until(lambda: server.failures.get((1, "ann")) == "not_approved")
            (kept,), _ = Cards(tmp_path).all()
            Cards(tmp_path).decide(kept, Decision(time.time(), 0, approved=True))
            server.train("ann", server.command(2))
            server.await_all(server.keys, 2, ["ann"])
            server.train("ann", server.command(3, batch_size=9))
            server.until(lambda: server.failures.get((3, "ann")) == "not_approved")
            assert [path.name.endswith("-0-2.json") for path in (tmp_path / FOLDER).iterdir()] == [True]
            federation.close()
            thread.join(SECONDS)
