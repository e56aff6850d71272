"""Checked reading: the bytes that were used have the right digest, and are read once if they are read in order."""

import hashlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from fedring.codec import NAMES, Encoding, encode
from fedring.codec.digest import name_of
from fedring.codec.errors import CodecError
from fedring.server.aggregation.contributions import open_packet
from fedring.server.aggregation.walk import in_order, tiles
from fedring.server.state.blobs import FileBlobs
from fedring.server.state.checked import CheckedReader, Room, read_checked
from fedring.server.state.failures import DamagedBlob, StorageFailed
from fedring.server.state.rows import lay_out

SIZE = 1_000_000
DATA = np.random.default_rng(0).bytes(SIZE)
NAME = name_of(DATA)
OLD_NAME = hashlib.sha256(DATA).hexdigest()  # as protocol 1 named blobs


class File:
    """Bytes on a disk, and how many of them were read."""

    def __init__(self, data: bytes = DATA) -> None:
        self.data, self.bytes_read = data, 0
        self._lock = threading.Lock()

    def read(self, offset: int, size: int) -> bytes:
        with self._lock:
            self.bytes_read += len(part := self.data[offset : offset + size])
        return part


def test_bytes_read_in_order_are_read_once() -> None:
    file = File()
    reader = CheckedReader(file.read, SIZE, NAME)
    for start in range(0, SIZE, 777):
        assert reader.read(start, min(777, SIZE - start)) == DATA[start : start + 777]
    reader.check()
    assert file.bytes_read == SIZE


def test_bytes_read_in_turns_by_threads_are_read_once() -> None:
    file = File()
    reader = CheckedReader(file.read, SIZE, NAME)

    def read(start: int, stop: int) -> bytes:
        return reader.read(start, stop - start)

    spans = [(start, min(start + 5000, SIZE)) for start in range(0, SIZE, 5000)]
    with ThreadPoolExecutor(4) as executor:
        assert b"".join(in_order(executor, read, spans)) == DATA
    reader.check()
    assert file.bytes_read == SIZE


@pytest.mark.parametrize("room", [Room(), Room(0)])
def test_everything_is_checked_in_the_end_in_whatever_order_it_was_read(room: Room) -> None:
    file = File()
    reader = CheckedReader(file.read, SIZE, NAME, room)
    for start in np.random.default_rng(1).permutation(1000).tolist():
        reader.read(1000 * start, 1000)
    reader.check()
    file.data = DATA[:500_000] + bytes([DATA[500_000] ^ 1]) + DATA[500_001:]
    again = CheckedReader(file.read, SIZE, NAME, room)
    again.read(SIZE - 10, 10)
    with pytest.raises(DamagedBlob, match=f"blobs/{NAME} does not hold what was written"):
        again.check()


def test_bytes_that_were_digested_before_they_were_used_are_not_trusted() -> None:
    file = File()
    reader = CheckedReader(file.read, SIZE, NAME)
    reader.read(0, SIZE)
    file.data = bytes([DATA[0] ^ 1]) + DATA[1:]
    assert reader.read(0, 10) != DATA[:10]
    with pytest.raises(DamagedBlob):
        reader.check()


def test_the_bytes_that_wait_for_earlier_ones_are_limited_over_all_readers() -> None:
    room = Room(25_000)
    readers = [CheckedReader(File().read, SIZE, NAME, room) for _ in range(10)]
    for reader in readers:
        reader.read(10_000, 10_000)
    assert room.take(5_000), "two of them wait"
    assert not room.take(1)
    for reader in readers:
        reader.check()
    assert room.take(20_000), "nothing waits any more"


@pytest.mark.parametrize("cut", [0, 1, SIZE - 1])
def test_a_file_cut_short_is_damaged(cut: int, tmp_path: Path) -> None:
    with pytest.raises(DamagedBlob):
        CheckedReader(File(DATA[:cut]).read, SIZE, NAME).check()
    blobs = FileBlobs(tmp_path)
    (tmp_path / "blobs" / NAME).write_bytes(DATA[:cut])
    with pytest.raises(DamagedBlob):
        read_checked(blobs, NAME)
    (tmp_path / "blobs" / NAME).unlink()
    with pytest.raises(DamagedBlob, match="is missing"):
        read_checked(blobs, NAME)
    blobs.close()


@pytest.mark.parametrize("room", [Room(), Room(0)])
def test_blobs_that_are_named_by_sha256_are_checked_by_sha256(room: Room, tmp_path: Path) -> None:
    sound, damaged = File(), File(DATA[:-1] + bytes([DATA[-1] ^ 1]))
    for file in (sound, damaged):
        reader = CheckedReader(file.read, SIZE, OLD_NAME, room)
        for start in np.random.default_rng(1).permutation(100).tolist():
            reader.read(10_000 * start, 10_000)
        reader.read(0, 10)  # again, so that everything is read once more in the end
        if file is sound:
            reader.check()
            continue
        with pytest.raises(DamagedBlob, match=f"blobs/{OLD_NAME} does not hold what was written"):
            reader.check()
    blobs = FileBlobs(tmp_path)
    (tmp_path / "blobs" / OLD_NAME).write_bytes(DATA)
    assert read_checked(blobs, OLD_NAME) == DATA
    (tmp_path / "blobs" / OLD_NAME).write_bytes(damaged.data)
    with pytest.raises(DamagedBlob, match="does not hold what was written"):
        read_checked(blobs, OLD_NAME)
    blobs.close()


def test_a_disk_that_may_work_later_is_not_reported_as_damage() -> None:
    def read(offset: int, size: int) -> bytes:
        raise StorageFailed("disk_error", "too many open files")

    with pytest.raises(StorageFailed):
        CheckedReader(read, SIZE, NAME).check()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunk", [1000, 8192])
def test_every_encoding_is_checked_however_it_is_read(name: str, chunk: int) -> None:
    length = 1_500_000
    values = np.random.default_rng(2).standard_normal(length).astype(np.float32)
    payload = encode(values, Encoding(name, chunk=chunk, keep_ratio=0.05))
    digest = name_of(payload)
    packets = lay_out([("parameters", "delta", name, len(payload))])

    def walk(data: bytes) -> Callable[[], None]:
        reader = CheckedReader(File(data).read, len(data), digest)
        decoder = open_packet(reader.read, packets[0], length)
        with ThreadPoolExecutor(2) as executor:
            for _ in in_order(executor, decoder.decode, tiles(length)):
                pass
        return reader.check

    walk(payload)()
    for bit in _bits(payload):
        damaged = bytearray(payload)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            check = walk(bytes(damaged))
        except CodecError:
            continue  # the decoder noticed it
        with pytest.raises(DamagedBlob):
            check()


def _bits(payload: bytes) -> Iterator[int]:
    yield from np.random.default_rng(3).integers(0, 8 * len(payload), 3).tolist()
