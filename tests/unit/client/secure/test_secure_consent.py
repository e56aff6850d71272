"""Rounds with masks of jobs that nobody at the site has approved."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from tests.honest_clients import SECONDS
from tests.secure_server import SecureServer

from fedring.client import connect
from fedring.client.consent.cards import Cards, Decision
from fedring.client.consent.consent import Consent
from fedring.client.secure.state import FOLDER
from fedring.v1 import federation_pb2 as pb


@contextmanager
def approved_in_round_2(state_dir: Path) -> Iterator[SecureServer]:
    """A server whose client exchanges keys in round 2, for the job that its site has turned down in round 1."""
    permits, looked = Consent.permits, threading.Event()

    def look(consent: Consent, command: pb.TrainCmd) -> bool:
        try:
            return permits(consent, command)
        finally:
            looked.set()

    with SecureServer() as server, mock.patch.object(Consent, "permits", look):
        settings: dict[str, Any] = {"server": server.address, "client_id": "ann", "state_dir": state_dir}
        with connect(**settings, approval={"mode": "cards"}) as federation:
            thread = threading.Thread(target=lambda: list(federation))
            thread.start()
            server.until(lambda: "ann" in server.matched)
            server.train("ann", server.command(1))
            server.until(lambda: server.failures.get((1, "ann")) == "not_approved")
            assert looked.wait(SECONDS)  # also the part of the client that exchanges keys
            (kept,), _ = Cards(state_dir).all()
            Cards(state_dir).decide(kept, Decision(time.time(), 0, approved=True))
            server.train("ann", server.command(2))  # which the client takes after the first one
            server.await_all(server.keys, 2, ["ann"])
            yield server
            federation.close()
            thread.join(SECONDS)


def has_secrets_of_round_2_only(state_dir: Path) -> bool:
    return [path.name.endswith("-0-2.json") for path in (state_dir / FOLDER).iterdir()] == [True]


def test_a_client_exchanges_no_keys_before_its_site_has_approved_the_job(tmp_path: Path) -> None:
    with approved_in_round_2(tmp_path) as server:
        assert (1, "ann") not in server.keys
        assert has_secrets_of_round_2_only(tmp_path)


def test_a_job_that_is_not_approved_ends_no_round_of_another(tmp_path: Path) -> None:
    with approved_in_round_2(tmp_path) as server:
        server.train("ann", server.command(3, batch_size=9))
        server.until(lambda: server.failures.get((3, "ann")) == "not_approved")
        assert has_secrets_of_round_2_only(tmp_path)
