"""The chained log of a client: what a server can put into it."""

import hashlib
from contextlib import closing
from pathlib import Path

from fedring.client.consent.audit import FOLDER, Audit, AuditTable
from fedring.daemon.chain import read_chain


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
