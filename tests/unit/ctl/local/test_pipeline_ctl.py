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


def test_print_shows_the_workers_of_each_stage_and_the_stages_it_uses(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["pipeline", "print", "1f1b", "--stages", "3", "--replicas", "1,2,1", "--skips", "0-2", "-m", "4"]
    assert main([*arguments, "--output", "json"]) == Exit.OK
    table = json.loads(capsys.readouterr().out)
    assert table["replicas"] == [1, 2, 1]
    assert [[f"{a['kind']}{a['micro_batch']}" for a in actions] for actions in table["workers"]][1:3] == [
        ["F0", "F2", "B0", "B2", "U3"],
        ["F1", "F3", "B1", "B3", "U3"],
    ]
    assert {"tensor": "skip0", "source": 0, "target": 2} in table["edges"]
    assert main(arguments) == Exit.OK
    out = capsys.readouterr().out
    assert "worker 2 (stage 1, replica 1): F1 F3 B1 B3 U" in out
    rows = [line.split() for line in out.splitlines()]
    assert ["1", "1,", "2", "0", "2", "1"] in rows
    assert ["2", "3", "0,", "1", "1", "1"] in rows


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b", "pipedream"])
def test_draw_writes_a_picture(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "schedule.png"
    replicas = ["--replicas", "1,2,1,1"] if name == "1f1b" else []
    assert main(["pipeline", "draw", name, *replicas, "--out", str(path)]) == Exit.OK
    assert path.read_bytes().startswith(b"\x89PNG")
    assert "bubble" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["interleaved_1f1b", "--stages", "4", "--workers", "3"], "evenly"),
        (["gpipe", "--interval", "2"], "for pipedream"),
        (["gpipe", "--stages", "3", "--replicas", "1,2"], "replicas=[1, 2] do not fit 3 stages"),
        (["gpipe", "--replicas", "1,x"], "--replicas '1,x' must be whole numbers above 0"),
        (["pipedream", "--stages", "2", "--replicas", "1,2", "--interval", "3"], "among 2 workers"),
        (["1f1b", "--skips", "2-1"], "--skips '2-1' must be two stages, as in 0-2"),
        (["1f1b", "--skips", "0-4"], "below 4"),
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
