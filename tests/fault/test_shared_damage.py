"""A server's copies of objects are damaged: while the objects are sound, that costs no round, no update and no job."""

from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from tests.damage import flip
from tests.fault.shared_place import Place
from tests.fault.test_damage import MODEL, ONES, deliver
from tests.fleets import Control, Fleet
from tests.system.wire import Refused, WireClient, outcome, parameters, run
from tests.waiting import until


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "place")


@pytest.fixture
def fleet(tmp_path: Path, place: Place) -> Iterator[Fleet]:
    with Fleet(tmp_path / "fleet", place.settings) as fleet:
        yield fleet


def copy_of(fleet: Fleet, digest: object) -> Path:
    """Return the server's own copy of a blob."""
    return Path(str(fleet.server.settings["state_dir"])) / "shared" / "blobs" / str(digest)


def model_blob(place: Place, version: int) -> str:
    ((name,),) = place.ask(f"SELECT blob FROM models WHERE version = {version}")
    return str(name)


def fetched(client: WireClient, version: int) -> bytes:
    """Fetch a version, as often as fl-client would."""
    found = []

    def fetch() -> bool:
        try:
            found.append(client.fetch(version)[1])
        except Refused as refused:
            if refused.code != grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
        return bool(found)

    until(fetch)
    return found[0]


def test_a_round_whose_base_and_updates_have_damaged_copies_ends_with_the_right_model(
    fleet: Fleet, place: Place
) -> None:
    with Control(fleet.control) as control, WireClient(fleet.listen, "a") as a, WireClient(fleet.listen, "b") as b:
        job_id, events = run(control, rounds=2, min_clients=2, **MODEL)
        for number in (1, 2):
            deliver(a, ONES)
            ((update,),) = place.ask(f"SELECT blob FROM updates WHERE round = {number}")
            flip(copy_of(fleet, update), seed=number)
            flip(copy_of(fleet, model_blob(place, number)), seed=number)
            deliver(b, 3 * ONES)
        assert outcome(control, job_id, events).state == "completed"
        assert [(row.reason, row.delivered) for row in control.rounds()] == [("", 2), ("", 2)]
        assert np.array_equal(parameters(a, 3), parameters(a, 1) + 4 * ONES)


def test_a_model_with_a_damaged_copy_is_served_from_the_object_store(fleet: Fleet, place: Place) -> None:
    with Control(fleet.control) as control, WireClient(fleet.listen, "a") as a:
        job_id, events = run(control, rounds=2, **MODEL)
        deliver(a)
        deliver(a)
        outcome(control, job_id, events)
        for version in (2, 3):
            sound = a.fetch(version)[1]
            for seed in range(3):
                flip(copy_of(fleet, model_blob(place, version)), seed=seed)
                assert fetched(a, version) == sound


def test_only_a_damaged_object_is_damage(fleet: Fleet, place: Place) -> None:
    with Control(fleet.control) as control, WireClient(fleet.listen, "a") as a:
        job_id, events = run(control, rounds=1, **MODEL)
        a.expect("train")
        name = model_blob(place, 1)
        (sound,) = (place.folder / "objects").glob(f"blobs/*/{name}")
        for path in (copy_of(fleet, name), sound):
            flip(path)
        with pytest.raises(Refused) as refused:
            fetched(a, 1)
        assert refused.value.code == grpc.StatusCode.DATA_LOSS
        assert outcome(control, job_id, events).reason.startswith(f"damaged_blob: model 1 is damaged: blobs/{name}")
