"""flctl pipeline print and draw, for people and for programs."""

import json
from pathlib import Path

import pytest

from fedring.ctl.main import main
from fedring.daemon.exits import Exit


def test_print_shows_every_action_and_what_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pipeline", "print", "1f1b", "--stages", "2", "--micro-batches", "3"]) == Exit.OK
    out = capsys.readouterr().out
    assert "worker 0: F0 F1 B0 F2 B1 B2 U" in out
    assert "worker 1: F0 B0 F1 B1 F2 B2 U" in out
    assert "bubble 25.00 %" in out


def test_print_as_json_has_the_versions(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["pipeline", "print", "pipedream", "--stages", "2", "-m", "3", "--versions", "vertical"]
    assert main([*arguments, "--output", "json"]) == Exit.OK
    table = json.loads(capsys.readouterr().out)
    assert [need["versions"] for need in table["needs"]] == [2, 2]
    assert table["workers"][1][0] == {"kind": "F", "stage": 1, "micro_batch": 0, "version": 0}


def test_actions_of_a_worker_with_several_stages_name_the_stage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pipeline", "print", "interleaved_1f1b", "--stages", "4", "--workers", "2", "-m", "2"]) == Exit.OK
    assert "worker 0: F0@0 F1@0 F0@2 F1@2" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b", "pipedream"])
def test_draw_writes_a_picture(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "schedule.png"
    assert main(["pipeline", "draw", name, "--out", str(path)]) == Exit.OK
    assert path.read_bytes().startswith(b"\x89PNG")
    assert "bubble" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["interleaved_1f1b", "--stages", "4", "--workers", "3"], "evenly"),
        (["gpipe", "--interval", "2"], "for pipedream"),
        (["pipedream", "--stages", "4", "--interval", "1", "--versions", "macrobatch"], "interval of at least"),
    ],
)
def test_an_impossible_schedule_is_explained(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pipeline", "print", *arguments]) == Exit.USAGE
    assert text in capsys.readouterr().err


def test_a_missing_folder_of_the_picture_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pipeline", "draw", "gpipe", "--out", str(tmp_path / "no" / "where.png")]) == Exit.USAGE
    assert "there is no folder" in capsys.readouterr().err
