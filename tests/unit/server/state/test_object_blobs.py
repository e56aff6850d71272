"""Blobs in an object store: what a leader of an earlier term deletes is nothing that a later one has written."""

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import obstore
import pytest
from obstore.exceptions import GenericError
from obstore.store import ObjectStore
from tests.damage import flip
from tests.proxy import Change, Proxy
from tests.s3 import s3_server
from tests.waiting import until

from fedring.daemon.config import ConfigError
from fedring.server.aggregation.versions import ModelVersions
from fedring.server.state.blob_interfaces import Partial
from fedring.server.state.blobs import FileBlobs, FilePartial, FileReader
from fedring.server.state.checked import read_checked
from fedring.server.state.failures import DamagedBlob, StorageError, StorageFailed
from fedring.server.state.shared.object_blobs import (
    PLACING,
    ObjectBlobs,
    note_placing,
    open_objects,
    placing_terms,
    put_aside_unfinished,
    state_ids,
    write_object,
)


def opened(folder: Path, term: int, *, url: str = "") -> ObjectBlobs:
    (folder / "objects").mkdir(exist_ok=True)
    store = open_objects(url or (folder / "objects").as_uri())
    return ObjectBlobs(store, FileBlobs(folder / f"local-{term}", durable=False), term)


def sealed(blobs: ObjectBlobs, data: bytes) -> str:
    partial = blobs.open_partial("some", fresh=True)
    partial.write(data)
    return blobs.seal_many([partial])[0]


@pytest.fixture
def first(tmp_path: Path) -> Iterator[ObjectBlobs]:
    blobs = opened(tmp_path, 1)
    yield blobs
    blobs.close()


def test_the_next_leader_reads_what_the_first_one_wrote(tmp_path: Path, first: ObjectBlobs) -> None:
    digest, empty = sealed(first, b"model"), sealed(first, b"")
    second = opened(tmp_path, 2)
    with second.reader(digest) as blob:
        assert blob.read(1, 3) == b"ode"
    with second.reader(empty) as blob:
        assert blob.size == 0
    assert second.range_reader(digest)(0, 5) == b"model"
    with pytest.raises(StorageError, match="missing_blob"):
        second.reader("blake3-" + "0" * 64)
    second.close()


def test_a_late_deletion_of_a_deposed_leader_takes_nothing_from_the_next_one(
    tmp_path: Path, first: ObjectBlobs
) -> None:
    digest = sealed(first, b"model")
    second = opened(tmp_path, 2)
    assert sealed(second, b"model") == digest
    first.delete(digest)
    third = opened(tmp_path, 3)  # has no copy of its own
    with third.reader(digest) as blob:
        assert blob.read(0, 5) == b"model"
    second.close()
    third.close()


def test_a_blob_is_read_while_and_after_it_could_not_be_written_again(
    tmp_path: Path, first: ObjectBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = sealed(first, b"model")
    second = opened(tmp_path, 2)

    def fail(*args: object, **options: object) -> None:
        with second.reader(digest) as blob:
            assert blob.read(0, 5) == b"model"
        second._local.delete(digest)
        raise GenericError("the network is away")

    with monkeypatch.context() as patched:
        patched.setattr("obstore.put", fail)
        with pytest.raises(StorageFailed, match="the network is away"):
            sealed(second, b"model")
    with second.reader(digest) as blob:
        assert blob.read(0, 5) == b"model"
    second.delete(digest)  # the other object, which is not there, is no error
    assert not second.has(digest)
    assert not list((tmp_path / "objects" / "blobs").glob(f"*/{digest}"))
    second.close()


def test_an_object_that_was_changed_is_not_read(tmp_path: Path, first: ObjectBlobs) -> None:
    digest = sealed(first, b"model")
    (tmp_path / "objects" / "blobs" / "1" / digest).write_bytes(b"mOdel")
    second = opened(tmp_path, 2)
    with pytest.raises(StorageError, match="does not hold what was written to it"):
        second.reader(digest)
    second.close()


def copy_of(folder: Path, term: int, digest: str) -> Path:
    return folder / f"local-{term}" / "blobs" / digest


def checked(blobs: ObjectBlobs, digest: str) -> bytes:
    """Read a blob as its users do: again, if the damage was only that of a copy."""
    found = list[bytes]()

    def read() -> bool:
        try:
            found.append(read_checked(blobs, digest))
        except DamagedBlob as damage:
            judged = blobs.judge(damage)
            if judged is damage:
                raise
            assert isinstance(judged, StorageFailed)
        except StorageFailed:
            pass
        return bool(found)

    until(read)
    return found[0]


@pytest.mark.parametrize("how", ["flipped", "cut", "lost"])
def test_a_damaged_copy_is_fetched_again(tmp_path: Path, first: ObjectBlobs, how: str) -> None:
    digest = sealed(first, b"model")
    copy = copy_of(tmp_path, 1, digest)
    for _ in range(2):
        if how == "lost":
            copy.unlink()
        else:
            copy.write_bytes(b"mOdel" if how == "flipped" else b"mod")
        assert checked(first, digest) == b"model"
        assert copy.read_bytes() == b"model"


@pytest.mark.parametrize("what", ["flipped", "gone"])
def test_damage_of_both_the_copy_and_the_object_is_damage(tmp_path: Path, first: ObjectBlobs, what: str) -> None:
    digest = sealed(first, b"model")
    copy_of(tmp_path, 1, digest).write_bytes(b"mOdel")
    path = tmp_path / "objects" / "blobs" / "1" / digest
    path.unlink() if what == "gone" else path.write_bytes(b"moDel")
    for _ in range(2):
        with pytest.raises(DamagedBlob):
            checked(first, digest)
    path.write_bytes(b"model")  # somebody has put it back
    assert checked(first, digest) == b"model"


def test_an_older_object_is_read_if_the_newest_one_is_damaged(tmp_path: Path, first: ObjectBlobs) -> None:
    digest = sealed(first, b"model")
    second = opened(tmp_path, 2)
    sealed(second, b"model")
    for path in (tmp_path / "objects" / "blobs" / "2" / digest, copy_of(tmp_path, 2, digest)):
        path.write_bytes(b"mOdel")
    assert checked(second, digest) == b"model"
    second.close()


def test_a_disk_that_damages_each_copy_is_not_asked_for_ever(
    tmp_path: Path, first: ObjectBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest, fetched = sealed(first, b"model"), list[None]()
    copy = copy_of(tmp_path, 1, digest)
    copy.write_bytes(b"mOdel")
    seal = FileBlobs.seal_many

    def damage(blobs: FileBlobs, partials: Sequence[Partial]) -> list[str]:
        names = seal(blobs, partials)
        copy.write_bytes(b"mOdel")
        fetched.append(None)
        return names

    monkeypatch.setattr(FileBlobs, "seal_many", damage)
    with pytest.raises(DamagedBlob):
        checked(first, digest)
    assert 0 < len(fetched) <= 16


def test_a_damaged_copy_that_a_full_disk_does_not_replace_is_no_damage(
    tmp_path: Path, first: ObjectBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest, refused = sealed(first, b"model"), list[None]()
    copy_of(tmp_path, 1, digest).write_bytes(b"mOdel")
    write = FilePartial.write

    def refuse(partial: FilePartial, data: bytes | memoryview) -> None:
        refused.append(None)
        if len(refused) < 4:
            raise StorageFailed("disk_full", "no space left on device")
        write(partial, data)

    monkeypatch.setattr(FilePartial, "write", refuse)
    assert checked(first, digest) == b"model"
    assert len(refused) == 4


def test_threads_that_miss_a_copy_together_fetch_it_once(
    tmp_path: Path, first: ObjectBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest, fetched, together = sealed(first, b"model"), list[str](), threading.Barrier(4)
    copy_of(tmp_path, 1, digest).unlink()
    get, local_reader = obstore.get, FileBlobs.reader

    def count(store: ObjectStore, key: str) -> "obstore.GetResult":
        fetched.append(key)
        return get(store, key)

    def miss(blobs: FileBlobs, name: str) -> FileReader:
        try:
            return local_reader(blobs, name)
        except StorageError:
            together.wait(60)
            raise

    monkeypatch.setattr("obstore.get", count)
    monkeypatch.setattr(FileBlobs, "reader", miss)
    with ThreadPoolExecutor(4) as threads:
        assert set(threads.map(lambda _: first.range_reader(digest)(0, 5), range(4))) == {b"model"}
    assert len(fetched) == 1


def test_a_blob_that_cannot_be_fetched_now_may_be_a_model(
    tmp_path: Path, first: ObjectBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that starts looks for models of rounds that its database has lost."""
    digest = sealed(first, b"model")
    second = opened(tmp_path, 2)

    def fail(*_: object) -> None:
        raise GenericError("the network is away")

    assert ModelVersions(second).round_of(sealed(second, b"no model"), "run") == 0
    monkeypatch.setattr("obstore.get", fail)
    with pytest.raises(StorageFailed, match="the network is away"):
        ModelVersions(second).round_of(digest, "run")
    second.close()


@pytest.mark.parametrize("size", [5, 20 << 20], ids=["in one part", "in several"])
def test_an_upload_that_the_disk_has_damaged_becomes_no_object(tmp_path: Path, first: ObjectBlobs, size: int) -> None:
    partial = first.open_partial("some", fresh=True)
    partial.write(bytes(size))
    flip(tmp_path / "local-1" / "partial" / "some")
    with pytest.raises(StorageFailed, match="does not hold what was written to it"):
        first.seal_many([partial])
    assert not [path for path in (tmp_path / "objects" / "blobs").rglob("*") if path.is_file()]


def test_an_id_that_is_no_small_object_is_not_read(tmp_path: Path, first: ObjectBlobs) -> None:
    (tmp_path / "objects" / "state_id").write_bytes(bytes(5000))
    with pytest.raises(StorageError, match="the object state_id has 5000 bytes, which no fl-server has written"):
        state_ids(open_objects((tmp_path / "objects").as_uri()))


def test_a_blob_that_no_row_names_is_put_aside_and_removed_later(tmp_path: Path, first: ObjectBlobs) -> None:
    digest, kept = sealed(first, b"lost"), sealed(first, b"kept")
    second = opened(tmp_path, 2)
    assert second.unnamed({kept}) == [digest]
    assert second.sweep({kept}) == 1
    aside = tmp_path / "objects" / "unnamed" / digest
    assert aside.read_bytes() == b"lost"
    second.forget_unnamed(60.0)
    assert aside.exists()
    second.forget_unnamed(0.0)
    assert not aside.exists()
    assert second.unnamed(()) == [kept]
    second.close()


def test_a_blob_that_a_deposed_leader_still_deletes_cannot_be_put_aside_any_more(
    tmp_path: Path, first: ObjectBlobs
) -> None:
    digests = [sealed(first, data) for data in (b"pruned", b"lost")]
    second = opened(tmp_path, 2)
    first.delete(digests[0])  # whose row it had removed just before the second one began to lead
    assert second.sweep(()) == 2
    assert second.unnamed(()) == []
    assert (tmp_path / "objects" / "unnamed" / digests[1]).read_bytes() == b"lost"
    second.forget_unnamed(0.0)
    second.close()


@pytest.mark.parametrize("committed", [True, False])
def test_a_killed_restore_puts_aside_what_it_has_replaced_or_else_what_it_has_written(
    tmp_path: Path, committed: bool
) -> None:
    written = list[str]()
    for term, data in ((1, b"replaced"), (2, b"in both"), (5, b"placed"), (7, b"of a later leader")):
        blobs = opened(tmp_path, term)
        written.append(sealed(blobs, data))
        blobs.close()
    replaced, kept, placed, later = written
    store = open_objects((tmp_path / "objects").as_uri())
    write_object(store, PLACING, b"4 5")
    put_aside_unfinished(store, lambda: {kept, placed} if committed else {kept, replaced}, 5 if committed else 3)
    left = {path.name for path in (tmp_path / "objects" / "blobs").rglob("*") if path.is_file()}
    assert left == ({kept, placed, later} if committed else {replaced, kept, later})
    assert placing_terms(store) == ({4} if committed else {4, 5}), "these may still be running"


def test_only_the_latest_restores_are_remembered(tmp_path: Path) -> None:
    (tmp_path / "objects").mkdir()
    store = open_objects((tmp_path / "objects").as_uri())
    note_placing(store, range(1000))
    assert placing_terms(store) == set(range(936, 1000))
    note_placing(store, ())
    assert not placing_terms(store)


def test_a_blob_that_is_too_large_for_one_copy_is_put_aside_part_by_part(
    tmp_path: Path, first: ObjectBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bytes(range(256)) * 80_000
    digest = sealed(first, data)

    def refuse(*_: object) -> None:  # as S3 does with more than 5 GiB
        raise GenericError("The specified copy source is larger than the maximum allowable size for a copy source")

    monkeypatch.setattr("obstore.copy", refuse)
    second = opened(tmp_path, 2)
    assert second.sweep(()) == 1
    assert (tmp_path / "objects" / "unnamed" / digest).read_bytes() == data
    assert second.unnamed(()) == []
    second.close()


def test_a_blob_that_is_still_being_written_is_let_go_only_when_that_has_ended(
    tmp_path: Path, first: ObjectBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its descriptor may be another file's from then on."""
    partials = [first.open_partial(name, fresh=True) for name in ("fails", "slow")]
    for number, partial in enumerate(partials):
        partial.write(bytes([number]))
    failed, read = threading.Event(), list[bytes]()

    def put_slowly(store: ObjectStore, key: str, parts: Iterator[bytes], **_: object) -> None:
        if key.endswith(partials[0].digest):
            failed.set()
            raise GenericError("the network is away")
        assert failed.wait(60)
        time.sleep(0.2)  # as long as the other one's failure may take to be noticed
        read.extend(parts)

    monkeypatch.setattr("obstore.put", put_slowly)
    with pytest.raises(StorageFailed, match="the network is away"):
        first.seal_many(partials)
    assert read == [b"\1"]


@pytest.mark.parametrize("url", ["nonsense://x", "s3:", "a b"])
def test_a_store_that_there_is_not_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="blob_url"):
        open_objects(url)


def test_a_trial_of_the_object_store_leaves_nothing_behind(tmp_path: Path, first: ObjectBlobs) -> None:
    before = sorted((tmp_path / "objects").rglob("*"))
    first.probe(100)
    assert sorted((tmp_path / "objects").rglob("*")) == before


def test_an_s3_server_keeps_what_was_sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "s3"
    folder.mkdir()
    with s3_server(folder, "models") as env:
        for key, value in env.items():
            monkeypatch.setenv(key, value)
        one, large = opened(tmp_path, 1, url="s3://models/run"), bytes(range(256)) * 80_000
        digests = [sealed(one, b"model"), sealed(one, large), sealed(one, b"")]  # the second one in several parts
        one.probe(100)
        two = opened(tmp_path, 2, url="s3://models/run")
        for digest, data in zip(digests, [b"model", large, b""], strict=True):
            with two.reader(digest) as blob:
                assert blob.read(0, blob.size) == data
        assert two.sweep(digests[:1]) == 2
        two.delete(digests[0])
        three = opened(tmp_path, 3, url="s3://models/run")
        assert three.unnamed(()) == []
        three.close()
    partial = two.open_partial("late")
    with pytest.raises(StorageFailed):
        two.seal_many([partial])
    one.close()
    two.close()


def test_a_deletion_that_was_held_up_on_its_way_takes_nothing_from_the_next_leader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, goes_on = threading.Event(), threading.Event()

    def hold_deletions(number: int) -> Change:
        def change(data: bytes) -> bytes:
            if data.startswith(b"DELETE ") or b"?delete" in data:
                asked.set()
                goes_on.wait(60)
            return data

        return change

    (folder := tmp_path / "s3").mkdir()
    with s3_server(folder, "models") as env:
        with Proxy(env["AWS_ENDPOINT_URL"].removeprefix("http://"), hold_deletions) as slow:
            for key, value in {**env, "AWS_ENDPOINT_URL": f"http://{slow.address}"}.items():
                monkeypatch.setenv(key, value)
            one = opened(tmp_path, 1, url="s3://models/run")
            monkeypatch.setenv("AWS_ENDPOINT_URL", env["AWS_ENDPOINT_URL"])
            digest = sealed(one, b"model")
            deletion = threading.Thread(target=one.delete, args=(digest,))
            deletion.start()
            assert asked.wait(60)
            two = opened(tmp_path, 2, url="s3://models/run")
            assert sealed(two, b"model") == digest
            goes_on.set()
            deletion.join()
            one.close()
        three = opened(tmp_path, 3, url="s3://models/run")  # has no copy of its own
        with three.reader(digest) as blob:
            assert blob.read(0, 5) == b"model"
        assert three.unnamed(()) == [digest]
        two.close()
        three.close()
