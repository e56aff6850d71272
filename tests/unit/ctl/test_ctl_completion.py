"""What Tab offers, asked for as the shells ask for it."""

import pytest
from tests.control_server import Server

from fedring.ctl.main import main
from fedring.v1 import control_pb2 as pb


def offers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str) -> list[str]:
    """Return what bash is offered for the last word of the line; words are split as bash splits them."""
    words = line.replace("=", " = ").split()
    monkeypatch.setenv("_FLCTL_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", " ".join(words))
    monkeypatch.setenv("COMP_CWORD", str(len(words) - (not line.endswith(" "))))
    assert main([]) == 0
    return capsys.readouterr().out.split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("flctl run job.toml enc", ["encoding="]),
        ("flctl run job.toml mode=", ["federated", "data_parallel", "pipeline"]),
        ("flctl run job.toml mode=d", ["data_parallel"]),
        ("flctl run job.toml mode=federated lr=3 evaluate", ["evaluate=", "evaluate_seconds=", "evaluate_on_server="]),
        ("flctl start-round evaluate=", ["true", "false"]),
        ("flctl start-round data_parallel.hook=d", ["dgc"]),
        ("flctl start-round lr=", []),
    ],
)
def test_keys_of_jobs_and_their_values_are_offered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str, expected: list[str]
) -> None:
    assert offers(monkeypatch, capsys, line) == expected


def test_ids_that_the_server_knows_are_offered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served = Server()
    served.script.jobs["key"] = pb.Job(job_id=41, name="nightly", state="running", rounds=3)
    try:
        for line, expected in (
            ("flctl stop --job ", ["41"]),
            ("flctl rounds ", ["1.2"]),
            ("flctl clients forget a", ["ann"]),
            ("flctl models export ", ["newest", "best", "8"]),
        ):
            monkeypatch.setenv("FLCTL_SERVER", served.address)
            assert offers(monkeypatch, capsys, line) == expected
            monkeypatch.delenv("FLCTL_SERVER")
    finally:
        served.stop()


def test_without_a_server_nothing_is_offered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert offers(monkeypatch, capsys, "flctl stop -s 127.0.0.1:1 --job ") == []


def test_a_shell_finds_nothing_to_evaluate_in_names_of_jobs_and_clients(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served = Server()
    served.script.jobs["key"] = pb.Job(job_id=41, name='x" \\$(touch y) `touch z` \x1b[1m', state="running", rounds=3)
    monkeypatch.setenv("FLCTL_SERVER", served.address)
    monkeypatch.setenv("_FLCTL_COMPLETE", "complete_zsh")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", "flctl stop --job ")
    try:
        assert main([]) == 0
    finally:
        served.stop()
    told = capsys.readouterr().out
    assert "touch y" in told
    assert not set("\\$`\x1b") & set(told)
