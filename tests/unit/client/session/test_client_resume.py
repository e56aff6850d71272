"""The resume secret: it is shown in each Join, private, and never found in part."""

import logging
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fedring.client import connect
from fedring.client.session.resume_secret import ResumeSecret

if TYPE_CHECKING:
    from tests.scripted_server import ScriptedServer

SECONDS = 60.0
ONE, OTHER = "0123456789abcdef" * 2, "f" * 32


def test_a_secret_is_found_again_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    (tmp_path / "resume_secret.new").write_text("left by a kill")
    for secret in (ONE, OTHER):
        ResumeSecret(tmp_path).keep(secret)
        assert ResumeSecret(tmp_path).text == secret
        assert stat.S_IMODE((tmp_path / "resume_secret").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["resume_secret"]


def test_a_kill_leaves_the_old_secret_or_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = ResumeSecret(tmp_path)
    secret.keep(ONE)
    for step in ("unlink", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(Path, step, _die)
            with pytest.raises(SystemExit):
                ResumeSecret(tmp_path).keep(OTHER)
        assert ResumeSecret(tmp_path).text == ONE


def _die(*_: object, **__: object) -> None:
    raise SystemExit


@pytest.mark.parametrize("content", [b"", b"0123", b"\xff" * 32, ONE.upper().encode(), f"{ONE}{ONE}".encode()])
def test_a_damaged_secret_counts_as_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "resume_secret").write_bytes(content)
    assert ResumeSecret(tmp_path).text == ""


def test_text_that_is_no_secret_is_not_kept(tmp_path: Path) -> None:
    secret = ResumeSecret(tmp_path)
    secret.keep(ONE)
    for text in ("", "x" * 10_000, ONE.upper(), f"{ONE}\n"):
        secret.keep(text)
    assert secret.text == ResumeSecret(tmp_path).text == ONE


def test_a_client_that_cannot_write_its_secret_still_uses_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "resume_secret").mkdir()
    caplog.set_level(logging.WARNING)
    secret = ResumeSecret(tmp_path)
    assert secret.text == ""
    secret.keep(ONE)
    assert secret.text == ONE
    told = [record.getMessage() for record in caplog.records]
    assert ["cannot be read" in text for text in told] == [True, False]
    assert "cannot be written" in told[1]


def test_a_client_shows_the_secret_that_it_was_given_even_after_a_restart(
    server: "ScriptedServer", settings: dict[str, Any]
) -> None:
    server.secret = ONE
    with connect(**settings):
        assert server.joins.get(timeout=SECONDS).resume_secret == ""
        while not server.reports.get(timeout=SECONDS).matched:
            pass
        server.stop()
        server.start()
        assert server.joins.get(timeout=SECONDS).resume_secret == ONE
    with connect(**settings):
        assert server.joins.get(timeout=SECONDS).resume_secret == ONE
