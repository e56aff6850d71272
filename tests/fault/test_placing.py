"""Restores into a shared state that fail or lose the lead, and leave to others what is theirs."""

from contextlib import suppress
from pathlib import Path

import pytest

from fedring.server.state.backup.contents import BackupError
from fedring.server.state.failures import StorageFailed
from fedring.server.state.shared import placing
from fedring.server.state.shared.object_blobs import open_objects, placing_terms, write_object
from fedring.server.state.shared.placing import led_place
from tests.fault.shared_place import Place


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "place")


def test_a_restore_that_fails_at_its_beginning_forgets_no_earlier_one_that_was_killed(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: object) -> None:
        raise StorageFailed("disk_error", "the bucket does not answer")

    write_object(open_objects(place.blob_url), "placing", b"3")
    with monkeypatch.context() as patch, suppress(BackupError):
        patch.setattr(placing, "placing_terms", read)
        with led_place(place.state_url, place.blob_url) as led:
            led.announce("0" * 32)
    assert placing_terms(open_objects(place.blob_url)) == {3}


def test_a_restore_that_has_lost_the_lead_takes_no_id_from_the_server_that_leads(place: Place) -> None:
    with suppress(KeyError), led_place(place.state_url, place.blob_url) as led:
        led.announce("0" * 32)
        place.end_session()
        with place.led():
            pass
        raise KeyError
    assert (place.folder / "objects" / "state_id").read_text() == place.meta()["state_id"]
