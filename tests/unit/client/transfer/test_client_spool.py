"""The spool: what is on disk between any two steps, and how the next process reads it."""

import os
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.kept import kept_file, words_in

from fedring.client.policy.privacy import SitePolicy
from fedring.client.policy.secret import ClientSecret
from fedring.client.protection import Protection
from fedring.client.secure.protection import SummedUpdates
from fedring.client.transfer.kept import KeptState
from fedring.client.transfer.residual import RESIDUAL, Residual, residual_in, with_residual
from fedring.client.transfer.spool import Spool, Spooled
from fedring.codec.digest import name_of, update_name
from fedring.v1 import federation_pb2 as pb

HASH = b"h" * 32
LINE = "a line of models"
CLIENT = "alice"
NOTHING = pb.LastAccepted()  # from a server that knows of no update


def offer_of(payload: bytes, *, run: str = "run", round_: int = 1, epoch: int = 0) -> pb.UpdateOffer:
    """Return an offer of a payload."""
    header = pb.UpdateHeader(run_id=run, epoch=epoch, round=round_, schema_hash=HASH, total_bytes=len(payload))
    sent, digest = header.SerializeToString(), name_of(payload)
    return pb.UpdateOffer(header=sent, payload_digest=digest, name=update_name(sent, digest))


def write(spool: Spool, residual: float, *, run: str = "run", round_: int = 1, epoch: int = 0) -> Spooled:
    """Spool an update whose residual is four times the given value."""
    offer = offer_of(b"abcdef", run=run, round_=round_, epoch=epoch)
    return leave(spool, offer, [b"abc", b"def"], np.full(4, residual, np.float32))


def leave(
    spool: Spool, offer: pb.UpdateOffer, parts: list[bytes], residual: Residual | None, *, schema: bytes = HASH
) -> Spooled:
    """Spool an update that leaves a residual."""
    header = pb.UpdateHeader.FromString(offer.header)
    kept = with_residual(spool.kept.load(LINE), residual, header, offer.name, schema=schema)
    return spool.write(offer, parts, KeptState(LINE, kept))


def residual(
    spool: Spool,
    last: pb.LastAccepted = NOTHING,
    *,
    run: str = "run",
    schema: bytes = HASH,
    after: tuple[int, int] = (0, 0),
) -> Residual | None:
    """Return what past updates of the run left out."""
    return residual_in(spool.kept.load(LINE), run, schema, last, after=after)[0]


def noted(spooled: Spooled) -> pb.LastAccepted:
    """Return what a server says once it has accepted an update."""
    header = spooled.header
    return pb.LastAccepted(epoch=header.epoch, round=header.round, name=spooled.offer.name)


def test_a_spooled_update_can_be_read_in_parts(tmp_path: Path) -> None:
    write(Spool(tmp_path, CLIENT), 1.0)
    pending = Spool(tmp_path, CLIENT).pending()
    assert pending is not None
    with pending.reader() as read:
        assert read(2, 3) == b"cde"
    assert pending.header.round == 1


def test_an_offer_is_read_with_exactly_the_bytes_that_were_written(tmp_path: Path) -> None:
    # Another language may write the round first, and a newer version may add a field.
    header = b"\x10\x03" + b"\x0a\x03run" + b"\xf8\x07\x01" + b"\x38\x06"
    digest = name_of(b"abcdef")
    offer = pb.UpdateOffer(header=header, payload_digest=digest, name=update_name(header, digest))
    Spool(tmp_path, CLIENT).write(offer, [b"abcdef"], None)
    pending = Spool(tmp_path, CLIENT).pending()
    assert pending is not None
    assert pb.UpdateHeader.FromString(header).SerializeToString() != header
    assert (pending.offer, pending.offer.header) == (offer, header)
    assert (pending.header.run_id, pending.header.round, pending.header.total_bytes) == ("run", 3, 6)


@pytest.fixture
def _others_may_read() -> Iterator[None]:
    """Let everybody read new files, unless their maker says otherwise."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.usefixtures("_others_may_read")
def test_only_the_owner_can_read_what_a_client_keeps(tmp_path: Path) -> None:
    spool, leaves = Spool(tmp_path, CLIENT), np.ones(4, np.float32)
    seen: dict[str, int] = {}

    def see() -> None:
        for path in tmp_path.iterdir():
            seen[path.name] = path.stat().st_mode & 0o777

    for number in (1, 2):  # the second one replaces the first
        spooled = leave(spool, offer_of(b"abc", round_=number), [b"abc"], leaves)
        see()
        spool.kept.put("another line", spool.kept.load(LINE))
        spool.accept(spooled)
        see()
    spool.payload_part.write_bytes(b"abc")
    spool.ledger.charge(pb.TrainCmd(job=pb.JobSpec(dp='{"noise_multiplier": 1.0}')), "update")
    spool.adopt(offer_of(b"abc", round_=3), spool.payload_part)
    see()
    assert len(seen) == 6
    assert set(seen.values()) == {0o600}


@pytest.mark.usefixtures("_others_may_read")
def test_what_an_earlier_version_has_left_is_closed_to_others(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    for name in ("update", "kept-1.safetensors", "update.left", "update.payload", "my notes"):
        (tmp_path / name).touch()
    Spool(tmp_path, CLIENT)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes.pop("checkpoints") == 0o700
    assert modes.pop("my notes") == 0o644  # not ours
    assert set(modes.values()) == {0o600}


@pytest.mark.parametrize("again", [True, False])
def test_a_spooled_update_is_sound_until_a_bit_of_its_payload_is_flipped(tmp_path: Path, again: bool) -> None:
    spooled = write(Spool(tmp_path, CLIENT), 1.0)
    if again:  # read it like a process that did not make it
        pending = Spool(tmp_path, CLIENT).pending()
        assert pending is not None
        spooled = pending
    assert spooled.is_sound
    data = bytearray((tmp_path / "update").read_bytes())
    data[-1] ^= 1
    (tmp_path / "update").write_bytes(data)
    assert spooled.is_sound is not again  # The process that made the update sends it from memory.


def test_a_spooled_update_is_dropped_if_a_bit_of_its_offer_was_flipped(tmp_path: Path) -> None:
    spooled = write(Spool(tmp_path, CLIENT), 1.0)
    sound = (tmp_path / "update").read_bytes()
    fields = [spooled.offer.header[:5], spooled.offer.payload_digest.encode(), spooled.offer.name.encode()]
    for place in (sound.index(field) + len(field) - 1 for field in fields):
        (tmp_path / "update").write_bytes(sound[:place] + bytes([sound[place] ^ 1]) + sound[place + 1 :])
        assert Spool(tmp_path, CLIENT).pending() is None  # The server could not be asked about it.


@pytest.mark.parametrize("size", [1, 7, 30, -1])
def test_an_incomplete_update_is_dropped_and_the_residual_is_kept(tmp_path: Path, size: int) -> None:
    spool = Spool(tmp_path, CLIENT)
    spool.accept(write(spool, 1.0))
    write(spool, 2.0)
    update = tmp_path / "update"
    os.truncate(update, size if size > 0 else update.stat().st_size + size)
    again = Spool(tmp_path, CLIENT)
    assert again.pending() is None
    assert Spool(tmp_path, CLIENT).size == 0
    np.testing.assert_array_equal(residual(again), np.full(4, 1.0, np.float32))


def test_a_shorter_update_leaves_no_bytes_of_a_longer_one_before_it(tmp_path: Path) -> None:
    spool = Spool(tmp_path, CLIENT)
    spool.accept(spool.write(offer_of(b"x" * 100), [b"x" * 100], None))
    write(spool, 1.0, round_=2)
    pending = Spool(tmp_path, CLIENT).pending()
    assert pending is not None
    with pending.reader() as read:
        assert read(0, 100) == b"abcdef"


def test_after_a_write_that_was_interrupted_neither_the_new_nor_the_old_update_is_pending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite = os.pwrite

    def die(fd: int, data: bytes, offset: int) -> int:
        if any(data):  # the last step of a write; the one before it is dropped by zeros
            raise KeyboardInterrupt
        return pwrite(fd, data, offset)

    spool = Spool(tmp_path, CLIENT)
    write(spool, 1.0)
    assert spool.size == (tmp_path / "update").stat().st_size
    monkeypatch.setattr(os, "pwrite", die)
    with pytest.raises(KeyboardInterrupt):
        spool.write(offer_of(b"ABCDEF", round_=2), [b"ABC", b"DEF"], None)
    assert (Spool(tmp_path, CLIENT).pending(), spool.size) == (None, 0)


def test_nothing_is_pending_before_the_first_update_and_after_an_accepted_one(tmp_path: Path) -> None:
    spool = Spool(tmp_path, CLIENT)
    assert spool.pending() is None
    spool.accept(write(spool, 1.0))
    assert Spool(tmp_path, CLIENT).pending() is None


@pytest.mark.parametrize("taken", [True, False])
def test_what_was_placed_before_a_kill_is_kept_whatever_the_server_says_then(tmp_path: Path, taken: bool) -> None:
    spool = Spool(tmp_path, CLIENT)
    first = write(spool, 1.0)
    spool.accept(first)
    second = write(spool, 2.0, round_=2)
    placed = kept_file(tmp_path)
    assert placed is not None
    (tmp_path / "update.left").rename(placed)
    again = Spool(tmp_path, CLIENT)
    pending = again.pending()
    assert pending is not None
    if taken:
        again.accept(pending)
    else:
        again.drop()
    last = noted(second if taken else first)
    np.testing.assert_array_equal(residual(again, last), np.full(4, 2.0, np.float32))


@pytest.mark.parametrize("value", [3e38, -2e30, np.inf, np.nan])
def test_a_residual_with_which_no_update_could_be_sent_ends_at_once(
    tmp_path: Path, value: float, caplog: pytest.LogCaptureFixture
) -> None:
    spool, left = Spool(tmp_path, CLIENT), np.array([1.0, value, 0.0, 0.0], np.float32)
    spool.accept(leave(spool, offer_of(b"abc"), [b"abc"], left))
    assert caplog.text.count("dropped the residual of past updates") == 1
    assert residual(spool) is None
    assert residual(Spool(tmp_path, CLIENT)) is None
    second = np.full(4, -1e30, np.float32)  # as much as a server takes
    spool.accept(leave(spool, offer_of(b"abc", round_=2), [b"abc"], second))
    np.testing.assert_array_equal(residual(spool), second)


@pytest.mark.parametrize(("run", "schema"), [("other", HASH), ("run", b"x" * 32)])
def test_a_residual_of_another_run_or_model_is_not_used(tmp_path: Path, run: str, schema: bytes) -> None:
    spool = Spool(tmp_path, CLIENT)
    spool.accept(write(spool, 1.0))
    assert residual(Spool(tmp_path, CLIENT), run=run, schema=schema) is None


@pytest.mark.parametrize("restarted", [True, False])
@pytest.mark.parametrize("left_by_masked", [True, False])
def test_what_masked_updates_left_out_does_not_come_into_others(
    tmp_path: Path, left_by_masked: bool, restarted: bool
) -> None:
    spool, left = Spool(tmp_path, CLIENT), np.full(4, 1.0, np.float32)
    secret = ClientSecret(lambda: bytes(32))
    masks = SummedUpdates(pb.TrainCmd(), CLIENT, SitePolicy.model_validate({}), secret)
    schemas = {masked: (masks if masked else Protection()).residual_schema(HASH) for masked in (True, False)}
    spool.accept(leave(spool, offer_of(b"abc"), [b"abc"], left, schema=schemas[left_by_masked]))
    next_spool = Spool(tmp_path, CLIENT) if restarted else spool
    for masked, schema in schemas.items():
        found = residual(next_spool, schema=schema)
        assert (found is not None) == (masked == left_by_masked)


def test_an_update_that_leaves_nothing_out_takes_the_residual_along(tmp_path: Path) -> None:
    spool = Spool(tmp_path, CLIENT)
    spool.accept(write(spool, 1.0))
    spool.accept(leave(spool, offer_of(b"abc", round_=2), [b"abc"], None))
    for each in (spool, Spool(tmp_path, CLIENT)):
        assert residual(each) is None


def test_a_residual_names_the_update_that_left_it_out(tmp_path: Path) -> None:
    spool = Spool(tmp_path, CLIENT)
    spooled = write(spool, 1.0, round_=7, epoch=3)
    spool.accept(spooled)
    path = kept_file(tmp_path)
    assert path is not None
    wanted = {"run": "run", "schema": HASH.hex(), "epoch": "3", "round": "7", "name": spooled.offer.name}
    assert words_in(path)[RESIDUAL] == wanted


OTHER = name_of(b"another update")


@pytest.mark.parametrize("restarted", [True, False])
@pytest.mark.parametrize(
    ("last", "kept"),
    [
        (NOTHING, True),  # the server was restored, or has forgotten the client
        (pb.LastAccepted(epoch=9, round=9), True),  # a record without a name says nothing
        (pb.LastAccepted(epoch=3, round=6, name=OTHER), True),  # an older update: the server was restored
        (pb.LastAccepted(epoch=2, round=9, name=OTHER), True),  # an older update, although of a later round
        (pb.LastAccepted(epoch=3, round=8, name=OTHER), False),  # a newer update, which took the residual along
        (pb.LastAccepted(epoch=4, round=1, name=OTHER), False),  # a newer update, although of an earlier round
        (pb.LastAccepted(epoch=3, round=7, name=OTHER), False),  # another update of the same round
    ],
    ids=["none", "nameless", "older round", "older epoch", "newer round", "newer epoch", "other"],
)
def test_a_residual_is_not_used_once_a_newer_update_has_been_accepted(
    tmp_path: Path, last: pb.LastAccepted, kept: bool, restarted: bool
) -> None:
    spool = Spool(tmp_path, CLIENT)
    spool.accept(write(spool, 1.0, round_=7, epoch=3))
    found = residual(Spool(tmp_path, CLIENT) if restarted else spool, last)
    assert (found is not None) == kept


@pytest.mark.parametrize("restarted", [True, False])
def test_a_residual_of_the_update_that_the_server_names_is_kept(tmp_path: Path, restarted: bool) -> None:
    spool = Spool(tmp_path, CLIENT)
    left = np.full(4, 1.0, np.float32)
    spooled = write(spool, 1.0, round_=7, epoch=3)
    spool.accept(spooled)
    again = Spool(tmp_path, CLIENT) if restarted else spool
    np.testing.assert_array_equal(residual(again, noted(spooled)), left)
    np.testing.assert_array_equal(residual(again, noted(spooled)), left)


def test_a_server_that_names_no_epoch_goes_by_the_numbers_of_rounds(tmp_path: Path) -> None:
    spool = Spool(tmp_path, CLIENT)
    last = write(spool, 1.0, round_=7, epoch=3)
    spool.accept(last)
    assert residual(spool, noted(last), after=(0, 6)) is not None
    assert residual(spool, noted(last), after=(0, 7)) is None


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize(
    ("after", "kept"), [((0, 0), True), ((0, 6), True), ((0, 7), False), ((0, 8), False), ((5, 3), False)]
)
def test_a_residual_of_a_model_that_the_job_does_not_continue_is_not_used(
    tmp_path: Path, after: tuple[int, int], kept: bool, restarted: bool
) -> None:
    spool = Spool(tmp_path, CLIENT)
    last = write(spool, 1.0, round_=7)
    spool.accept(last)
    spool = Spool(tmp_path, CLIENT) if restarted else spool
    for _ in range(2):
        assert (residual(spool, noted(last), after=after) is not None) is kept


@pytest.mark.parametrize(("version", "payload"), [(2, b"abcdef"), (4, b"abcde"), (4, b""), (0, b"abcdef")])
def test_a_file_that_this_version_cannot_have_written_is_dropped_and_the_residual_is_kept(
    tmp_path: Path, version: int, payload: bytes
) -> None:
    spool = Spool(tmp_path, CLIENT)
    spool.accept(write(spool, 1.0))
    write(spool, 2.0, round_=2)
    head = offer_of(b"abcdef").SerializeToString()
    (tmp_path / "update").write_bytes(struct.pack("<2sBBI", b"SP", version, 0, len(head)) + head + payload)
    spool = Spool(tmp_path, CLIENT)
    assert spool.pending() is None
    assert (spool.size, (tmp_path / "update.left").exists()) == (0, False)
    np.testing.assert_array_equal(residual(spool), np.full(4, 1.0, np.float32))


def test_a_payload_that_is_a_file_is_adopted_without_a_copy(tmp_path: Path) -> None:
    spool = Spool(tmp_path, CLIENT)
    write(spool, 1.0)
    spool.payload_part.write_bytes(b"abcdef")
    inode = spool.payload_part.stat().st_ino
    adopted = spool.adopt(offer_of(b"abcdef", round_=2), spool.payload_part)
    assert not (tmp_path / "update.left").exists()
    assert spool.size > len(b"abcdef")
    for pending in (adopted, Spool(tmp_path, CLIENT).pending()):
        assert pending is not None
        assert (pending.header.round, pending.is_sound) == (2, True)
        assert pending.path.stat().st_ino == inode
    spool.accept(adopted)
    assert Spool(tmp_path, CLIENT).pending() is None
    assert [path.name for path in tmp_path.iterdir()] == ["update"]


def test_a_payload_that_was_being_put_together_at_a_kill_is_deleted(tmp_path: Path) -> None:
    Spool(tmp_path, CLIENT).payload_part.write_bytes(b"half")
    Spool(tmp_path, CLIENT)
    assert list(tmp_path.iterdir()) == []


def test_an_adopted_payload_that_is_cut_short_is_dropped(tmp_path: Path) -> None:
    spool = Spool(tmp_path, CLIENT)
    spool.payload_part.write_bytes(b"abcdef")
    path = spool.adopt(offer_of(b"abcdef"), spool.payload_part).path
    path.write_bytes(b"abc")
    assert Spool(tmp_path, CLIENT).pending() is None
    assert not path.exists()
