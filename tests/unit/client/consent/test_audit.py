"""The chained log of a client: what a server can put into it."""

import hashlib
import threading
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from fedring.client import connect
from fedring.client.consent.audit import FOLDER, Audit, AuditTable
from fedring.daemon.chain import read_chain
from fedring.v1 import federation_pb2 as pb

if TYPE_CHECKING:
    from tests.scripted_server import ScriptedServer

SECONDS = 60.0


def test_a_server_cannot_end_the_client_by_words_too_long_for_a_line(tmp_path: Path) -> None:
    name, promise = "\N{MICROSCOPE}" * 100_000, '{"noise_multiplier": 1.0}' + " " * 100_000
    with closing(Audit(AuditTable.model_validate({"chain": True}), tmp_path)) as audit:
        audit.try_to_note(
            "trains", round=7, name=name, model=name, promises=(promise, promise, promise), reason="r" * 500
        )
        audit.try_to_note("accepted", server_head=name)
    trains, accepted = read_chain(tmp_path / FOLDER)
    assert (trains.facts["round"], trains.facts["reason"]) == (7, "r" * 500)
    digest = hashlib.sha256(promise.encode()).hexdigest()
    for told in trains.facts["promises"]:
        assert told.startswith('{"noise_multiplier": 1.0}   ')
        assert told.endswith(f"... (100025 characters with the SHA-256 {digest})")
    assert accepted.facts["server_head"].startswith("\N{MICROSCOPE}" * 500 + "...")


def test_what_a_client_refuses_is_in_its_log_also_evaluations(
    server: "ScriptedServer", settings: dict[str, Any]
) -> None:
    model = nn.Linear(2, 2)
    job = pb.JobSpec(mode="sideways", rounds=1)
    with connect(**settings, model=model, evaluate=lambda model: (1, 1, 0.5), audit={"chain": True}) as federation:
        thread = threading.Thread(target=lambda: list(federation))
        thread.start()
        server.joins.get(timeout=SECONDS)
        server.train(server.command(model, job=job))
        assert server.failures.get(timeout=SECONDS).reason == "unknown_mode"
        covered = pb.JobSpec(mode="federated", rounds=1, dp='{"noise_multiplier": 1.0}')
        server.send(pb.ServerEvent(evaluate=server.evaluation(1, round=2, job=covered)))
        assert server.evaluations.get(timeout=SECONDS).total == 0
        federation.close()
        thread.join()
    refused = [line.facts for line in read_chain(settings["state_dir"] / FOLDER) if line.facts["what"] == "refuses"]
    assert [(each["round"], each["reason"]) for each in refused] == [(1, "unknown_mode"), (2, "privacy_policy")]
    assert refused[1]["asked"] == "evaluates"
