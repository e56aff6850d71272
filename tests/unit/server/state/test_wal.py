"""The scan of SQLite's log: it finds a commit that SQLite would forget, and takes no sound log for a damaged one."""

import random
import shutil
import sqlite3
import struct
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from fedring.server.state.wal import Scan, scan

PAGE = 1024
FRAME = 24 + PAGE
SEED = 20_240_501
FLIPS = 200


def scanned(log: bytes) -> Scan:
    """Scan the bytes of a log."""
    return scan(lambda offset, size: log[offset : offset + size], len(log))


def flipped(log: bytes, bit: int) -> bytes:
    """Return a log with one bit flipped."""
    changed = bytearray(log)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def zeroed(log: bytes, start: int, size: int) -> bytes:
    """Return a log in which some bytes are zero."""
    return log[:start] + bytes(size) + log[start + size :]


def starts_of(log: bytes) -> list[int]:
    """Return where the frames of a log begin."""
    return list(range(32, len(log) - FRAME + 1, FRAME))


def commits_of(log: bytes) -> list[int]:
    """Return where the frames begin that end a commit."""
    return [start for start in starts_of(log) if struct.unpack_from(">I", log, start + 4)[0]]


class Database:
    """A database whose log is read between commits, as a killed process would leave it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "facts"
        self.connection = sqlite3.connect(self.path, isolation_level=None)
        for pragma in (f"page_size = {PAGE}", "journal_mode = WAL", "wal_autocheckpoint = 0", "cache_size = 10"):
            self.connection.execute(f"PRAGMA {pragma}").close()
        self.connection.execute("CREATE TABLE rows (id INTEGER PRIMARY KEY, value BLOB)")

    @property
    def log(self) -> bytes:
        return self.path.with_name("facts-wal").read_bytes()

    def add(self, count: int, size: int, end: str = "COMMIT") -> None:
        """Add rows in one transaction."""
        self.connection.execute("BEGIN")
        self.connection.executemany("INSERT INTO rows (value) VALUES (?)", [(bytes([7]) * size,)] * count)
        self.connection.execute(end)

    def checkpoint(self, mode: str = "PASSIVE") -> None:
        self.connection.execute(f"PRAGMA wal_checkpoint({mode})").close()

    def recovered(self, log: bytes) -> int:
        """Return how many rows SQLite finds with this log."""
        copy = self.path.with_name("copy")
        shutil.copy(self.path, copy)
        copy.with_name("copy-wal").write_bytes(log)
        with closing(sqlite3.connect(copy)) as connection:
            ((found,),) = connection.execute("SELECT count(*) FROM rows")
        return int(found)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = Database(tmp_path)
    yield database
    database.connection.close()


@pytest.fixture
def log(database: Database) -> bytes:
    """A log of a table and twelve commits, each of several frames, the last of which has three."""
    database.checkpoint("TRUNCATE")
    for number in range(11):
        database.add(1 + number % 3, 700)
    database.add(2, 900)
    return database.log


def test_a_sound_log_has_all_its_commits(log: bytes) -> None:
    assert scanned(log) == Scan(len(commits_of(log)))
    assert len(commits_of(log)) == 12


def test_sqlite_forgets_all_that_follows_a_flipped_bit(database: Database, log: bytes) -> None:
    third = commits_of(log)[2]
    assert database.recovered(log) > 20
    assert database.recovered(flipped(log, 8 * (third + 100))) == 3, "in silence: this is why the log is scanned"


def test_every_flipped_bit_before_the_last_commit_is_noticed(log: bytes) -> None:
    rng = random.Random(SEED)
    end = commits_of(log)[-2] + FRAME
    for bit in (rng.randrange(8 * end) for _ in range(FLIPS)):
        assert scanned(flipped(log, bit)).damage, bit
    for start in (0, commits_of(log)[3], starts_of(log)[2], commits_of(log)[-2]):
        for bit in range(8 * start, 8 * start + 8 * 32):
            assert scanned(flipped(log, bit)).damage, (start, bit)


def test_a_flipped_bit_in_the_last_commit_ends_the_log_before_it(log: bytes) -> None:
    rng = random.Random(SEED)
    for bit in (rng.randrange(8 * (commits_of(log)[-2] + FRAME), 8 * len(log)) for _ in range(FLIPS // 4)):
        assert scanned(flipped(log, bit)) == Scan(11), "it may be a write that was cut short"


def test_a_write_that_was_cut_short_over_an_older_log_is_not_damage(database: Database) -> None:
    """A kill between the two writes of a frame leaves the page that was there before, which can differ in one bit."""
    database.connection.execute("CREATE TABLE counters (value INTEGER)").close()
    database.connection.execute("INSERT INTO counters VALUES (2)").close()
    images = []
    for _ in range(3):  # each commit is the only one of its log
        database.checkpoint()
        database.connection.execute("UPDATE counters SET value = value + 1").close()
        images.append(database.log[: 32 + FRAME])
    before, after = images[1:]
    assert sum((x ^ y).bit_count() for x, y in zip(before[56:], after[56:], strict=True)) == 1, "4 became 5"
    assert scanned(after[:56] + before[56:]) == Scan(0)


def test_damage_is_placed_where_the_bit_was_flipped(log: bytes) -> None:
    assert scanned(flipped(log, 8 * 20)) == Scan(0, "its header")
    fourth = commits_of(log)[3]
    number = starts_of(log).index(fourth) + 1
    assert scanned(flipped(log, 8 * fourth + 9)) == Scan(3, f"frame {number}")


def test_a_zeroed_sector_is_noticed_unless_it_may_be_the_torn_last_commit(log: bytes) -> None:
    ends = commits_of(log)[-2]  # without this header, the last two commits look like one
    for start in range(512, ends + FRAME - 512, 512):
        damaged = zeroed(log, start, 512)
        in_doubt = start < ends + 24 and ends + 4 < start + 512
        assert bool(scanned(damaged).damage) or in_doubt or damaged == log, start
    assert scanned(zeroed(log, len(log) - 512, 512)) == Scan(11)


def test_a_torn_end_is_not_damage(database: Database, log: bytes) -> None:
    for length in {*range(len(log) - FRAME - 50, len(log), 7), *range(0, len(log), 1001), 0, 31, 32, 33}:
        assert scanned(log[:length]).damage == "", length
        assert scanned(log[:length] + bytes(len(log) - length)).damage == "" or length < 32
    first = commits_of(log)[-2] + FRAME
    for lost in range(first, len(log), FRAME):  # of the last commit, one frame did not reach the disk
        assert scanned(zeroed(log, lost, FRAME)) == Scan(11)
        assert scanned(zeroed(log, lost + 24, 512)) == Scan(11)


def test_what_follows_the_end_of_a_log_that_was_begun_again_is_not_damage(database: Database) -> None:
    for _ in range(9):
        database.add(3, 700)
    before = database.log
    database.checkpoint()
    database.add(1, 100)
    assert len(database.log) == len(before), "the frames of the earlier log are still there"
    assert scanned(database.log) == Scan(1)
    rng = random.Random(SEED)
    end = commits_of(database.log)[0] + FRAME
    for bit in (rng.randrange(8 * end, 8 * len(before)) for _ in range(FLIPS // 10)):
        changed = flipped(database.log, bit)
        assert scanned(changed) == Scan(1), "nobody reads these frames"
        assert database.recovered(changed) == database.recovered(database.log)


def test_what_a_transaction_that_was_rolled_back_has_left_is_not_damage(database: Database) -> None:
    database.add(1, 100)
    database.add(60, 700, "ROLLBACK")  # too much for the cache: its frames are in the log
    rolled_back = database.log
    commits = scanned(rolled_back).commits
    assert scanned(rolled_back).damage == ""
    database.add(2, 700)
    assert len(database.log) == len(rolled_back)
    assert scanned(database.log) == Scan(commits + 1)
    last = commits_of(database.log)[-1]
    for torn in (last - FRAME, last):
        assert scanned(zeroed(database.log, torn + 500, 512)) == Scan(commits)


def test_logs_of_random_transactions_are_sound(database: Database) -> None:
    rng = random.Random(SEED)
    steps: list[Callable[[], None]] = [
        lambda: database.add(rng.randrange(1, 9), rng.randrange(2000)),
        lambda: database.add(rng.randrange(1, 90), rng.randrange(2000), rng.choice(["COMMIT", "ROLLBACK"])),
        lambda: database.checkpoint(rng.choice(["PASSIVE", "RESTART", "TRUNCATE"])),
    ]
    for number in range(150):
        rng.choices(steps, [6, 3, 1])[0]()
        assert scanned(database.log).damage == "", number


def test_big_endian_checksums_are_read_as_sqlite_writes_them() -> None:
    def sums(data: bytes, before: tuple[int, int]) -> tuple[int, int]:
        s, t = before
        for x, y in struct.iter_unpack(">2I", data):
            s = (s + x + t) % (1 << 32)
            t = (t + y + s) % (1 << 32)
        return s, t

    rng = random.Random(SEED)
    header = struct.pack(">6I", 0x377F0683, 3007000, 512, 0, 5, 6)
    pages = [(struct.pack(">2I", number, number), rng.randbytes(512)) for number in (1, 2, 3)]
    checksums = [sums(header, (0, 0))]
    for head, page in pages:
        checksums.append(sums(head + page, checksums[-1]))
    log = header + struct.pack(">2I", *checksums[0])
    for (head, page), checksum in zip(pages, checksums[1:], strict=True):
        log += head + struct.pack(">4I", 5, 6, *checksum) + page
    assert scanned(log) == Scan(3)
    assert scanned(flipped(log, 8 * 700)).damage == "frame 2"


def test_any_bytes_are_scanned_without_an_error(log: bytes) -> None:
    rng = random.Random(SEED)
    for _ in range(50):
        assert scanned(rng.randbytes(rng.randrange(33, 3000))) == Scan(0, "its header")
        assert scanned(log[:32] + rng.randbytes(rng.randrange(5 * FRAME))) == Scan(0)
