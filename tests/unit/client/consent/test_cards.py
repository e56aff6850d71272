"""Cards of jobs: what they cover, what a decision about one is worth, and what a damaged one does."""

import fcntl
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from zipfile import ZipFile

import pytest
from pydantic import ValidationError

from fedring.client.cards_command import app
from fedring.client.consent.approval import Approval
from fedring.client.consent.card import JOB_KEYS, ROUND_KEYS, card_of, differences
from fedring.client.consent.cards import (
    FOLDER,
    MAX_WAITING,
    CardError,
    Cards,
    Decision,
    KeptCard,
    day_of,
    end_of,
    read_kept,
)
from fedring.client.consent.code import InstalledCode
from fedring.client.consent.consent import FILE, Consent, Refusal
from fedring.daemon.durable import with_digest
from fedring.daemon.program import run
from fedring.v1 import federation_pb2 as pb

SITE = {"code": {"fedring": {"version": "1"}}, "own": {}}
LATER = 4e9
HERE = pb.JoinReply(epoch=0)


def command(job_id: int = 1, **changes: object) -> pb.TrainCmd:
    """Return a command of a job; the keys of rounds and of jobs may be changed."""
    job = pb.JobSpec(job_id=job_id, name="study", mode="federated", model="site_code:net", rounds=3, dp='{"clip": 1.0}')
    made = pb.TrainCmd(job=job, lr=0.1, epochs=1, batch_size=32, seed=5, round=1)
    for key, value in changes.items():
        setattr(made if key in ROUND_KEYS else made.job, key, value)
    return made


def test_a_card_names_all_settings_and_not_the_round() -> None:
    card = card_of(command(), SITE, [])
    other = command(job_id=7)
    other.round, other.seed, other.run_id, other.model_digest = 9, 6, "run", "blake3-x"
    other.model.payload = b"values"
    assert card_of(other, SITE, []).name == card.name
    assert set(card.facts["job"]) == set(JOB_KEYS)
    assert set(card.facts["round"]) == set(ROUND_KEYS)
    for changed in (command(lr=0.2), command(model="other:net"), command(rounds=4), command(dp='{"clip": 2.0}')):
        assert card_of(changed, SITE, []).name != card.name
    assert card_of(command(), {**SITE, "code": {}}, []).name != card.name


def test_a_key_that_is_free_may_differ_and_is_shown() -> None:
    card = card_of(command(), SITE, ["lr", "rounds"])
    assert card_of(command(lr=0.2, rounds=9), SITE, ["lr", "rounds"]).name == card.name
    assert card_of(command(epochs=2), SITE, ["lr", "rounds"]).name != card.name
    assert card.free == {"lr": 0.1, "rounds": 3}
    assert card_of(command(), SITE, ["lr"]).name != card.name  # what was free when it was approved counts


def test_how_the_server_spaces_its_tables_does_not_matter() -> None:
    assert card_of(command(dp='{ "clip":1.0 }'), SITE, []).name == card_of(command(), SITE, []).name
    broken = card_of(command(dp="{" * 9000), SITE, [])
    assert broken.facts["job"]["dp"] == "{" * 9000


def test_numbers_that_are_not_finite_have_a_card_too() -> None:
    assert card_of(command(lr=float("nan")), SITE, []).facts["round"]["lr"] == "NaN"


def test_the_difference_of_two_cards_names_the_keys() -> None:
    old, new = card_of(command(), SITE, []), card_of(command(lr=0.2, dp='{"clip": 1.0, "delta": 0.1}'), SITE, [])
    assert differences(old.facts, new.facts) == [("job.dp.delta", None, 0.1), ("round.lr", 0.1, 0.2)]


@pytest.mark.parametrize(
    ("old", "new", "keys"),
    [
        ('{"a": 1}', '{"a": true}', ["job.model_args.a"]),
        ('{"a": 1}', '{"a": 1.0}', ["job.model_args.a"]),
        ("{}", '{"a": null}', ["job.model_args", "job.model_args.a"]),
        ('{"a": {"b": 1}}', '{"a.b": 1}', ['job.model_args."a.b"', "job.model_args.a.b"]),
        ('{"b": 1}', '{"b": 1, "\\u001b[1A\\u001b[2K": 2}', ['job.model_args."\\u001b[1A\\u001b[2K"']),
        ('{"b": 1}', '{"b": 1, "c\\nround.lr": 2}', ['job.model_args."c\\nround.lr"']),
    ],
)
def test_no_difference_of_two_cards_is_hidden(old: str, new: str, keys: list[str]) -> None:
    cards = [card_of(command(model_args=text), SITE, []) for text in (old, new)]
    assert cards[0].name != cards[1].name
    assert [key for key, _, _ in differences(cards[0].facts, cards[1].facts)] == keys


def test_only_the_newest_decision_counts(tmp_path: Path) -> None:
    cards, now = Cards(tmp_path), time.time()
    kept = cards.find(card_of(command(), SITE, []))
    assert "not approved" in kept.refusal(now)
    kept = cards.decide(kept, Decision(now, now + 10, approved=True, note="vote 1"))
    assert kept.refusal(now) == ""
    assert "has ended" in kept.refusal(now + 10)
    kept = cards.decide(kept, Decision(now, 0, approved=True))  # a second approval, without an end
    assert kept.refusal(LATER) == ""
    assert "stands before" in kept.refusal(now - 86_400)
    kept = cards.decide(kept, Decision(now, 0, approved=False))
    assert "revoked" in kept.refusal(now)
    again = Cards(tmp_path).named(kept.short)
    assert (again, len(again.decisions)) == (kept, 3)


@pytest.mark.parametrize("bit", range(0, 4000, 37))
def test_a_flipped_bit_never_approves(tmp_path: Path, bit: int) -> None:
    cards = Cards(tmp_path)
    kept = cards.decide(cards.find(card_of(command(), SITE, [])), Decision(time.time(), 0, approved=False))
    path = tmp_path / FOLDER / kept.card.name
    data = bytearray(path.read_bytes())
    data[bit // 8 % len(data)] ^= 1 << bit % 8
    path.write_bytes(data)
    with pytest.raises(CardError, match="damaged"):
        cards.find(kept.card)


def test_a_card_under_another_name_is_damaged(tmp_path: Path) -> None:
    cards = Cards(tmp_path)
    approved = cards.decide(cards.find(card_of(command(), SITE, [])), Decision(time.time(), 0, approved=True))
    asked = card_of(command(lr=9.0), SITE, [])
    (tmp_path / FOLDER / approved.card.name).rename(tmp_path / FOLDER / asked.name)
    with pytest.raises(CardError, match="another card"):
        cards.find(asked)


@pytest.mark.parametrize("text", [b"", b"{}", b"[]", b'{"card": 1, "free": {}, "seen": 0, "decisions": []}'])
def test_other_forms_are_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"form|table|Expecting"):
        read_kept(with_digest(text))


def test_a_server_cannot_fill_the_disk_with_cards(tmp_path: Path) -> None:
    cards = Cards(tmp_path)
    decided = cards.decide(cards.find(card_of(command(), SITE, [])), Decision(time.time(), 0, approved=True))
    for number in range(MAX_WAITING + 5):
        cards.find(card_of(command(epochs=number + 2), SITE, []))
    kept, damaged = cards.all()
    assert (len(kept), damaged) == (MAX_WAITING + 1, [])
    assert decided in kept


def test_decisions_at_the_same_moment_are_all_kept(tmp_path: Path) -> None:
    cards = Cards(tmp_path)
    kept, begin = cards.find(card_of(command(), SITE, [])), Barrier(8)

    def decide(number: int) -> None:
        begin.wait()
        Cards(tmp_path).decide(kept, Decision(float(number), 0, approved=False))

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(decide, range(8)))
    assert sorted(each.at for each in cards.named(kept.short).decisions) == list(range(8))


def test_a_card_that_is_being_approved_is_not_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Cards.all

    def approved_meanwhile(self: Cards) -> tuple[list[KeptCard], list[str]]:
        """Approve the oldest card, as another process does, unless a lock keeps it waiting."""
        found = read(self)
        fd = os.open(tmp_path / FOLDER, os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            held.append(fd)
        else:
            fcntl.flock(fd, fcntl.LOCK_UN)
            self.decide(found[0][0], Decision(time.time(), 0, approved=True))
        os.close(fd)
        return found

    held: list[int] = []
    cards = Cards(tmp_path)
    oldest = cards.find(card_of(command(), SITE, []))
    monkeypatch.setattr(Cards, "all", approved_meanwhile)
    for number in range(MAX_WAITING):
        cards.find(card_of(command(epochs=number + 2), SITE, []))
    monkeypatch.undo()
    if not held:
        assert cards.find(oldest.card).refusal(time.time()) == ""
    cards.decide(oldest, Decision(time.time(), 0, approved=True))  # the other process goes on, though it was dropped
    assert cards.find(oldest.card).refusal(time.time()) == ""


def test_a_card_that_the_disk_cannot_read_hides_no_other(tmp_path: Path) -> None:
    cards = Cards(tmp_path)
    good, bad = (cards.find(card_of(command(epochs=epochs), SITE, [])) for epochs in (1, 2))
    (tmp_path / FOLDER / bad.card.name).unlink()
    (tmp_path / FOLDER / bad.card.name).mkdir()  # which cannot be read as a file
    kept, damaged = cards.all()
    assert (kept, len(damaged)) == ([good], 1)
    with pytest.raises(CardError, match="damaged"):
        cards.find(bad.card)


def module(folder: Path, text: str) -> Path:
    package = folder / "site_code"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").write_text(text)
    return package / "__init__.py"


def test_the_installed_source_is_on_the_card_by_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = module(tmp_path, "A = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    code = InstalledCode(["fedring", "site_code.inner:net as model"])
    assert set(code.facts) == {"fedring", "torch", "site_code"}
    assert list(code.facts["site_code"]["files"]) == ["__init__.py"]
    assert code.changed() == ""
    stamp = file.stat()
    file.write_text("A = 2\n")
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # which an installer may do, too
    assert code.changed() == "site_code"
    assert InstalledCode(["site_code"]).facts["site_code"] != code.facts["site_code"]
    assert "site_code" not in sys.modules  # nothing is imported


def test_code_in_a_linked_folder_or_without_source_is_on_the_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, elsewhere = module(tmp_path, "from . import inner\n").parent, tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "__init__.py").write_text("A = 1\n")
    (elsewhere / "again").symlink_to(package)  # a circle, which must end
    (package / "inner").symlink_to(elsewhere)
    (package / "compiled.pyc").write_bytes(b"code")
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "inner.pyc").write_bytes(b"made of the source")
    monkeypatch.syspath_prepend(tmp_path)
    code = InstalledCode(["site_code"])
    assert list(code.facts["site_code"]["files"]) == ["__init__.py", "compiled.pyc", "inner/__init__.py"]
    assert code.changed() == ""
    (elsewhere / "__init__.py").write_text("A = 22\n")
    assert code.changed() == "site_code"
    again = InstalledCode(["site_code"])
    (package / "compiled.pyc").write_bytes(b"other code")
    assert again.changed() == "site_code"


@pytest.mark.parametrize("inside", ["zipped_code.py", "zipped_code/__init__.py"])
def test_code_in_an_archive_is_on_the_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: str) -> None:
    archive = tmp_path / "code.zip"

    def write(text: str) -> None:
        with ZipFile(archive, "w") as file:
            file.writestr(inside, text)

    write("A = 1\n")
    monkeypatch.syspath_prepend(archive)
    code = InstalledCode(["zipped_code"])
    assert list(code.facts["zipped_code"]["files"]) == ["code.zip"]
    assert code.changed() == ""
    write("A = 22\n")
    assert code.changed() == "zipped_code"


def why(refused: Refusal | None) -> str:
    return "" if refused is None else refused.text


def test_consent_is_asked_for_once_for_each_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = module(tmp_path, "A = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    approval = Approval.model_validate({"mode": "cards", "free": ["rounds"]})
    consent = Consent(approval, tmp_path, ["fedring", "site_code"], {"model": ""})
    evaluation = pb.EvaluateCmd(job=command().job)
    assert "not approved" in why(consent.refusal(command()))
    assert "no card" in why(consent.refusal_to_evaluate(evaluation))
    assert consent.waiting(HERE) == [1]

    cards = Cards(tmp_path)
    (kept,), _ = cards.all()
    cards.decide(kept, Decision(time.time(), 0, approved=True))
    assert consent.waiting(HERE) == []
    assert why(consent.refusal(command(job_id=2, rounds=50))) == ""
    assert why(consent.refusal_to_evaluate(evaluation)) == ""
    assert "not approved" in why(consent.refusal(command(lr=0.5)))
    assert consent.waiting(HERE) == [1]
    file.write_text("A = 2\n")  # in mid-job
    assert "restart fl-client" in why(consent.refusal(command()))
    restarted = Consent(approval, tmp_path, ["fedring", "site_code"], {"model": ""})
    assert restarted.waiting(HERE) == []  # or the server would not ask, and nobody here could see the card
    assert "not approved" in why(restarted.refusal(command()))
    waiting = [each for each in cards.all()[0] if each.refusal(time.time())]
    assert any(differences(kept.card.facts, each.card.facts)[0][0] == "code.site_code.digest" for each in waiting)
    less_free = Consent(Approval.model_validate({"mode": "cards"}), tmp_path, ["fedring", "site_code"], {"model": ""})
    assert less_free.waiting(HERE) == []
    another = Consent(approval, tmp_path, ["fedring", "site_code"], {"model": "site_code:other"})
    assert another.waiting(HERE) == []
    assert "not approved" in why(another.refusal(command()))


def test_a_job_whose_refusal_is_told_has_waited_whatever_was_decided_since(tmp_path: Path) -> None:
    consent = Consent(Approval.model_validate({"mode": "cards"}), tmp_path, ["fedring"], {})
    assert "not approved" in why(consent.refusal(command()))
    cards = Cards(tmp_path)
    cards.decide(cards.all()[0][0], Decision(time.time(), 0, approved=True))
    assert consent.waiting(HERE, 1) == [1]
    assert consent.waiting(HERE, 2) == consent.waiting(HERE) == []
    assert consent.refusal(command()) is None
    assert consent.waiting(HERE, 1) == []


def test_a_job_that_waits_is_known_after_a_restart(tmp_path: Path) -> None:
    def started() -> Consent:
        return Consent(Approval.model_validate({"mode": "cards"}), tmp_path, ["fedring"], {})

    consent = started()
    for number in (1, 2):
        consent.refusal(command(number, epochs=number))
    assert started().waiting(HERE) == [1, 2]
    cards = Cards(tmp_path)
    cards.decide(cards.all()[0][0], Decision(time.time(), 0, approved=True))  # which no process of the client sees
    again = started()
    assert again.waiting(HERE) == [2]
    assert again.refusal(command(1)) is None
    assert len(json.loads((tmp_path / FILE).read_bytes().partition(b"\n")[2])) == 1
    (dropped,) = [kept for kept in cards.all()[0] if kept.card.name == again.card]
    again.refusal(command(3, epochs=3))
    (tmp_path / FOLDER / dropped.card.name).unlink()
    assert started().waiting(HERE) == [2, 3]
    (tmp_path / FOLDER / again.card).write_bytes(b"damaged")
    assert started().waiting(HERE) == [2]
    for text in (b"", b"[]", with_digest(b"3"), with_digest(b'[["", 0, 2, "beef"]]')):
        (tmp_path / FILE).write_bytes(text)
        assert started().waiting(HERE) == []


def test_an_evaluation_needs_a_card_with_the_same_values_and_types(tmp_path: Path) -> None:
    consent = Consent(Approval.model_validate({"mode": "cards"}), tmp_path, ["fedring"], {})
    assert "not approved" in why(consent.refusal(command(model_args='{"layers": 1}')))
    cards = Cards(tmp_path)
    (kept,), _ = cards.all()
    cards.decide(kept, Decision(time.time(), 0, approved=True))
    asked = {text: command(model_args=text).job for text in ('{ "layers": 1 }', '{"layers": true}', '{"layers": 1.0}')}
    found = [why(consent.refusal_to_evaluate(pb.EvaluateCmd(job=job))) for job in asked.values()]
    assert found == ["", *["this site has approved no card of this job"] * 2]


def test_without_the_table_nobody_is_asked(tmp_path: Path) -> None:
    consent = Consent(Approval.model_validate({}), tmp_path, ["fedring"], {})
    assert why(consent.refusal(command())) == ""
    assert why(consent.refusal_to_evaluate(pb.EvaluateCmd(job=command().job))) == ""
    assert list(tmp_path.iterdir()) == []


def test_a_free_key_that_no_card_has_is_told() -> None:
    with pytest.raises(ValidationError, match="no card has the key 'code'"):
        Approval.model_validate({"mode": "cards", "free": ["code"]})


def fl_client_cards(*words: str) -> int:
    return run(app, "fl-client cards", words)


def test_people_show_approve_and_revoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ("--state-dir", str(tmp_path))
    assert fl_client_cards("list", *where) == 0
    assert "no cards yet" in capsys.readouterr().out
    old = Cards(tmp_path).find(card_of(command(), SITE, ["lr"]))
    assert fl_client_cards("approve", old.short, "--until", "2996-03-01", "--note", "ethics 2026/114", *where) == 0
    assert "approved until 2996-03-02 00:00 UTC" in capsys.readouterr().out
    new = Cards(tmp_path).find(card_of(command(epochs=5, name="\x1b[2Jstudy"), SITE, ["lr"]))
    assert fl_client_cards("show", new.short, *where) == 0
    shown = capsys.readouterr().out
    assert "round.epochs: 1 -> 5" in shown
    assert "\x1b" not in shown
    assert fl_client_cards("show", new.short, "--json", *where) == 0
    assert json.loads(capsys.readouterr().out)["differences"]["with"] == old.card.name
    assert fl_client_cards("revoke", old.short, *where) == 0
    assert fl_client_cards("list", *where, "--json") == 0
    listed = json.loads(capsys.readouterr().out.splitlines()[-1])["cards"]
    assert [each["approved"] for each in listed] == [False, False]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("show", "zzz"), "no card in"),
        (("approve", "zzz", "--until", "tomorrow"), "is no day such as"),
        (("approve", "zzz", "--until", "2001-01-01"), "is over"),
        (("revoke", ""), "no card in"),
    ],
)
def test_mistakes_are_one_sentence(
    words: tuple[str, ...], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fl_client_cards(*words, "--state-dir", str(tmp_path)) == 1
    assert sentence in capsys.readouterr().err
    assert fl_client_cards(*words, "--state-dir", str(tmp_path / "none")) == 78
    assert "there is no state folder" in capsys.readouterr().err


def test_a_day_ends_when_the_next_one_begins() -> None:
    assert day_of(end_of("2027-03-01")) == "2027-03-02 00:00 UTC"
