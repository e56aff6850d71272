"""The chained log: what a kill, a bit, a month and a liar do to it."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from random import Random

import pytest

from fedring.control.failure import Failure
from fedring.ctl.admin.audit import contradictions, verify
from fedring.daemon import chain
from fedring.daemon.chain import Chain, DamagedChain, Line, files_of, parse_lines, read_chain

_ADDS = """
import sys
from pathlib import Path
from fedring.daemon.chain import Chain
log = Chain(Path(sys.argv[1]))
while True:
    print(log.add({"what": "a", "text": "x" * 300}, {"what": "b"}), flush=True)
"""


_OPEN: list[Chain] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Close all chains that a test has opened."""
    yield
    while _OPEN:
        _OPEN.pop().close()


def opened(folder: Path, *, keep_days: float = 0) -> Chain:
    _OPEN.append(Chain(folder, keep_days=keep_days))
    return _OPEN[-1]


def filled(folder: Path, count: int = 5) -> Chain:
    log = opened(folder)
    for number in range(count):
        log.add({"what": "step", "round": number})
    return log


@pytest.mark.parametrize("torn", [b"", b'{"at":"2026'])
def test_a_month_without_a_whole_line_does_not_begin_the_chain_anew(tmp_path: Path, torn: bytes) -> None:
    """So it is after a full disk, or a kill, at the first line of a month."""
    log = filled(tmp_path, 2)
    log.close()
    (last,) = files_of(tmp_path)
    last.rename(tmp_path / "2026-01.jsonl")
    (tmp_path / last.name).write_bytes(torn)
    opened(tmp_path).add({"what": "step"})
    assert [line.number for line in read_chain(tmp_path)] == [1, 2, 3]


def test_each_line_names_the_one_before(tmp_path: Path) -> None:
    log = filled(tmp_path)
    lines = read_chain(tmp_path)
    assert [line.number for line in lines] == [1, 2, 3, 4, 5]
    assert [line.before for line in lines] == ["", *(line.head for line in lines[:-1])]
    assert lines[-1].head == log.head
    assert lines[2].facts["round"] == 2
    assert (files_of(tmp_path)[0].stat().st_mode & 0o777) == 0o600


def test_a_head_does_not_tell_what_its_line_says(tmp_path: Path) -> None:
    heads = set[str]()
    for name in ("a", "b"):  # both lines say the same at the same time, as far as anybody else can guess
        head = opened(tmp_path / name).add({"what": "trains", "epsilon": 1.25})
        (line,) = read_chain(tmp_path / name)
        assert line.head == head
        guessed = {key: value for key, value in line.facts.items() if key != "salt"}
        text = json.dumps(guessed, sort_keys=True, separators=(",", ":")).encode()
        assert hashlib.sha256(text).hexdigest() != head
        heads.add(str(line.facts["salt"]))
    assert sorted(map(len, heads)) == [32, 32]


def test_lines_without_a_salt_are_read_and_followed(tmp_path: Path) -> None:
    first = '{"at":"2026-11-27T08:50:01.123Z","before":"","n":1,"what":"start"}'
    (tmp_path / "2026-11.jsonl").write_text(f"{first}\n")
    opened(tmp_path).add({"what": "stop"})
    assert [line.before for line in read_chain(tmp_path)] == ["", hashlib.sha256(first.encode()).hexdigest()]


def test_another_process_goes_on(tmp_path: Path) -> None:
    head = filled(tmp_path).head
    again = opened(tmp_path)
    assert again.head == head
    again.add({"what": "step"})
    assert [line.number for line in read_chain(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_a_month_follows_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    months = iter(
        [datetime(2026, 11, 30, tzinfo=UTC), datetime(2026, 12, 1, tzinfo=UTC), datetime(2026, 11, 30, tzinfo=UTC)]
    )

    class Clock(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return next(months)

    monkeypatch.setattr(chain, "datetime", Clock)
    log = opened(tmp_path)
    for _ in range(3):  # in the last one, the clock was set back: the chain does not go back to an older file
        log.add({"what": "step"})
    assert [path.name for path in files_of(tmp_path)] == ["2026-11.jsonl", "2026-12.jsonl"]
    assert [line.number for line in read_chain(tmp_path)] == [1, 2, 3]
    files_of(tmp_path)[0].unlink()  # as its age does
    assert [line.number for line in read_chain(tmp_path)] == [2, 3]


def test_old_months_are_deleted(tmp_path: Path) -> None:
    (tmp_path / "2020-01.jsonl").write_bytes(b"")
    os.utime(tmp_path / "2020-01.jsonl", (1e9, 1e9))
    (tmp_path / "other.txt").write_text("kept")
    opened(tmp_path, keep_days=30).add({"what": "step"})
    assert len(files_of(tmp_path)) == 1
    assert (tmp_path / "other.txt").exists()


def test_every_flipped_bit_is_found_or_cuts_the_end(tmp_path: Path) -> None:
    filled(tmp_path, 3)
    (path,) = files_of(tmp_path)
    data, whole = path.read_bytes(), read_chain(tmp_path)
    unnoticed = 0
    for bit in range(len(data) * 8):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        try:
            found = parse_lines(bytes(changed).splitlines(keepends=True))
        except ValueError:
            continue
        unnoticed += [line.head for line in found][:-1] == [line.head for line in whole][: len(found) - 1]
    last = len(data.splitlines()[-1])
    assert unnoticed <= last * 8  # only in the last line, whose digest nobody has noted


@pytest.mark.parametrize("change", ["remove", "swap", "add", "edit"])
def test_a_changed_middle_is_found(tmp_path: Path, change: str) -> None:
    filled(tmp_path)
    (path,) = files_of(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    match change:
        case "remove":
            del lines[2]
        case "swap":
            lines[1], lines[2] = lines[2], lines[1]
        case "add":
            lines.insert(2, lines[2])
        case "edit":
            lines[2] = json.dumps(json.loads(lines[2]) | {"round": 9}).encode() + b"\n"
    path.write_bytes(b"".join(lines))
    with pytest.raises(DamagedChain, match="is not what was written"):
        read_chain(tmp_path)
    with pytest.raises(DamagedChain):
        opened(tmp_path)


def test_a_torn_line_is_cut_off_at_the_next_start(tmp_path: Path) -> None:
    head = filled(tmp_path).head
    (path,) = files_of(tmp_path)
    with path.open("ab") as file:
        file.write(b'{"at": "2026')
    assert opened(tmp_path).head == head
    assert len(read_chain(tmp_path)) == 5


def test_a_disk_that_is_full_leaves_the_chain_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = filled(tmp_path)
    monkeypatch.setattr(os, "fdatasync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        log.add({"what": "lost"})
    monkeypatch.undo()
    log.add({"what": "next"})
    assert [line.facts["what"] for line in read_chain(tmp_path)] == ["step"] * 5 + ["next"]


def test_a_kill_leaves_all_lines_that_were_told(tmp_path: Path) -> None:
    random = Random(7)
    for _ in range(4):
        process = subprocess.Popen([sys.executable, "-c", _ADDS, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        told = [process.stdout.readline().strip() for _ in range(random.randrange(3, 30))]
        process.kill()
        told += process.communicate()[0].split("\n")[:-1]
        opened(tmp_path)
        assert {each for each in told if len(each) == 64} <= {line.head for line in read_chain(tmp_path)}


def sides(folder: Path, rounds: int = 3) -> tuple[list[Line], list[Line]]:
    """Return the logs of a client and a server that have told each other their heads."""
    client, server = opened(folder / "client"), opened(folder / "server")
    client.add({"what": "start", "side": "client", "client": "a"})
    server.add({"what": "start", "side": "server"})
    for number in range(rounds):
        head = client.add({"what": "sends", "client": "a", "round": number, "update": f"u{number}"})
        answer = server.add(
            {"what": "update", "client": "a", "round": number, "update": f"u{number}", "client_head": head},
            {"what": "update", "client": "b", "round": number, "update": f"v{number}", "client_head": ""},
        )
        client.add({"what": "accepted", "round": number, "update": f"u{number}", "server_head": answer})
    return read_chain(folder / "client"), read_chain(folder / "server")


def rewritten(folder: Path, lines: list[Line], keep: int, **changes: object) -> list[Line]:
    """Return a log with the same lines, but for one, and with right digests."""
    log = opened(folder)
    for index, line in enumerate(lines):
        facts = {key: value for key, value in line.facts.items() if key not in ("at", "before", "n")}
        log.add(facts | (changes if index == keep else {}))
    return read_chain(folder)


def test_honest_sides_agree(tmp_path: Path) -> None:
    client, server = sides(tmp_path)
    assert list(contradictions(client, server)) == []
    verify(tmp_path / "client", tmp_path / "server")
    verify(tmp_path / "server", tmp_path / "client")


def test_a_client_that_writes_its_history_anew_is_found(tmp_path: Path) -> None:
    client, server = sides(tmp_path)
    forged = rewritten(tmp_path / "forged", client, 3, round=9)
    assert "line 4 of the server names a head that the client does not have" in " ".join(contradictions(forged, server))
    with pytest.raises(Failure, match="contradict"):
        verify(tmp_path / "forged", tmp_path / "server")


def test_a_server_that_writes_its_history_anew_is_found(tmp_path: Path) -> None:
    client, server = sides(tmp_path)
    forged = rewritten(tmp_path / "forged", server, 1, round=9)
    assert "names a head that the server does not have" in " ".join(contradictions(client, forged))


@pytest.mark.parametrize("key", ["what", "update", "server_head", "client", "side"])
def test_a_log_of_the_other_side_may_hold_anything(
    tmp_path: Path, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    client, _ = sides(tmp_path)
    for value in ([1], {"a": 1}, 7, None, "\x1b]0;owned\x07"):
        place = tmp_path / f"forged-{key}-{value!r:.5}"
        rewritten(place, client, len(client) - 1, **{key: value})
        with suppress(Failure):
            verify(place, tmp_path / "server")
    assert not {"\x1b", "\x07"} & set("".join(capsys.readouterr()))


def test_a_log_whose_end_was_cut_off_is_found(tmp_path: Path) -> None:
    client, server = sides(tmp_path)
    assert "the client does not have" in " ".join(contradictions(client[:3], server))
    assert "the server does not have" in " ".join(contradictions(client, server[:3]))


def test_months_that_were_deleted_are_no_contradiction(tmp_path: Path) -> None:
    client, server = sides(tmp_path)
    assert list(contradictions(client[3:], server)) == []
    assert list(contradictions(client, server[3:])) == []


def test_two_logs_of_one_side_cannot_be_compared(tmp_path: Path) -> None:
    sides(tmp_path)
    with pytest.raises(Failure, match="must be a client's"):
        verify(tmp_path / "client", tmp_path / "client")
    with pytest.raises(Failure, match="holds no chained log"):
        verify(tmp_path / "none")
