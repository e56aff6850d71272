"""Errors of a command line, an environment or a value: both daemons use the same words, and say what to do."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from typer import Typer
from typer.testing import CliRunner

from fedring.client.config import ClientConfig
from fedring.client.main import app as fl_client
from fedring.ctl.main import main as flctl
from fedring.daemon.config import ConfigError, load_config
from fedring.daemon.exits import Exit
from fedring.server.config import ServerConfig
from fedring.server.main import app as fl_server
from fedring.version import VERSION

DAEMONS = [pytest.param(fl_server, id="server"), pytest.param(fl_client, id="client")]


def refused(app: Typer, *arguments: str) -> str:
    """Return the sentence with which a daemon refuses these arguments."""
    result = CliRunner().invoke(app, ["--check-config", *arguments])
    assert result.exit_code == Exit.CONFIG
    name, _, sentence = result.output.partition(": ")
    assert name in ("fl-server", "fl-client")
    assert sentence.count("\n") == 1
    return sentence.rstrip("\n")


def test_all_programs_print_their_version_in_one_form(capsys: pytest.CaptureFixture[str]) -> None:
    for app, name in ((fl_server, "fl-server"), (fl_client, "fl-client")):
        assert CliRunner().invoke(app, ["--version"]).output == f"{name} {VERSION}\n"
    assert flctl(["--version"]) == Exit.OK
    assert capsys.readouterr().out == f"flctl {VERSION}\n"


@pytest.mark.parametrize("app", DAEMONS)
def test_an_argument_that_is_neither_a_file_nor_a_key_is_named(app: Typer) -> None:
    neither = "is neither a configuration file (.toml, .json) nor key=value"
    assert refused(app, "insecure") == f"'insecure' {neither}"
    assert refused(app, "a.toml", "threads=1", "b.json").endswith("these are 2: a.toml, b.json")


@pytest.mark.parametrize(
    ("app", "name", "wanted"),
    [
        (fl_server, "FEDRING_SERVER_TRUSTED", 'a list such as ["a", "b"]'),
        (fl_server, "FEDRING_SERVER_JOB", 'a table such as {"key": "value"}'),
        (fl_server, "FEDRING_SERVER_JOB__MODEL_ARGS", 'a table such as {"key": "value"}'),
        (fl_server, "FEDRING_SERVER_JOB__PIPELINE__WARMUPS", 'a list such as ["a", "b"]'),
        (fl_client, "FEDRING_CLIENT_TRUSTED", 'a list such as ["a", "b"]'),
        (fl_client, "fedring_client_trusted", 'a list such as ["a", "b"]'),
        (fl_client, "FEDRING_CLIENT_TLS", 'a table such as {"key": "value"}'),
    ],
)
def test_a_variable_that_must_be_json_but_is_not_is_named(
    monkeypatch: pytest.MonkeyPatch, app: Typer, name: str, wanted: str
) -> None:
    for text in ("FEDRING_SERVER_JOB__MODEL", "FEDRING_CLIENT_MODEL"):
        monkeypatch.setenv(text, "my_project")
    monkeypatch.setenv(name, "my_project")
    assert refused(app) == f"environment variable {name} must be JSON, {wanted}"


def test_a_variable_may_be_json_or_text_if_its_key_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDRING_SERVER_TRUSTED", '["my_project"]')
    monkeypatch.setenv("FEDRING_SERVER_JOB__MODEL_ARGS", '{"hidden": 128}')
    monkeypatch.setenv("FEDRING_SERVER_JOB__MODEL_ARGS__NAME", "wide")
    monkeypatch.setenv("FEDRING_SERVER_JOB__PIPELINE__CUT", "time")
    config = load_config(ServerConfig).config
    assert (config.trusted, config.job.pipeline.cut) == (["my_project"], "time")
    assert config.job.model_args == {"hidden": 128, "name": "wide"}


@pytest.mark.parametrize("name", ["fedring_server_listn", "Fedring_Server_Listn", "FEDRING_SERVER_LISTN"])
def test_a_misspelt_variable_is_refused_in_upper_and_lower_case(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "127.0.0.1:9000")
    assert refused(fl_server) == f"unknown key 'listn' in environment variable {name}; did you mean 'listen'?"


def test_a_variable_may_be_in_lower_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("fedring_server_listen", "127.0.0.1:9000")
    assert load_config(ServerConfig).config.listen == "127.0.0.1:9000"


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("job=x", "job (from the command line): must be a table of keys, such as job.name"),
        ("job.server_optimizer=x", "job.server_optimizer (from the command line): must be a table of keys, such as "),
        ("tls=[1]", "tls (from the command line): must be a table of keys, such as tls.cert"),
        ("job.model_args=x", "job.model_args (from the command line): must be a table of keys"),
        ("trusted=fedring", 'trusted (from the command line): must be a list, such as ["a", "b"]'),
        ("trusted=[1]", 'trusted.0: must be text: "1", with the quotes'),
        ("threads=x", "threads (from the command line): must be a whole number, not 'x'"),
        ("job.rounds=1.5", "job.rounds (from the command line): must be a whole number, not 1.5"),
        ("job.rounds=0", "job.rounds (from the command line): must be greater than or equal to 1"),
        ("job.lr=x", "job.lr (from the command line): must be a number"),
        ("job.lr=nan", "job.lr (from the command line): must be a finite number"),
        ("insecure=perhaps", "insecure (from the command line): must be true or false"),
        ("data_root=3", "data_root (from the command line): must be a path"),
        ("web_host=", "web_host (from the command line): must have at least 1 character"),
        ("log_level=loud", "log_level (from the command line): must be 'debug', 'info', 'warning' or 'error'"),
        (
            "job.pipeline.micro_batches=x",
            "job.pipeline.micro_batches (from the command line): must be a whole number or 'auto'",
        ),
        ("job.pipeline.cut={}", 'job.pipeline.cut (from the command line): must be text or a list, such as ["a", "b"]'),
    ],
)
def test_the_error_of_a_wrong_value_says_what_the_value_must_be(override: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_config(ServerConfig, overrides=[override])
    assert str(refusal.value).startswith(sentence)
    assert "Input should" not in str(refusal.value)


def test_the_error_of_a_pattern_shows_its_description_and_not_the_pattern() -> None:
    with pytest.raises(ConfigError, match=r"must be a stable name, .*: 1 to 128 of A-Z a-z 0-9") as refusal:
        load_config(ClientConfig, flags={"client_id": "ward 7"})
    assert "^" not in str(refusal.value)


def test_one_error_is_shown_and_the_others_are_counted_by_their_keys() -> None:
    with pytest.raises(ConfigError, match=r"^threads \(from the command line\): .*; and 1 more$"):
        load_config(ServerConfig, overrides=["threads=0", "job.pipeline.micro_batches=x"])


def paths_in(table: BaseModel) -> Iterator[Path]:
    """Yield all paths in a configuration."""
    for _, value in table:
        if isinstance(value, BaseModel):
            yield from paths_in(value)
        elif isinstance(value, Path):
            yield value


@pytest.mark.parametrize(("model", "more"), [(ServerConfig, ["init_path=p"]), (ClientConfig, ["token_file=p"])])
def test_all_paths_start_at_the_directory_of_the_start(
    model: Any, more: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The code of a job may change to another one later."""
    monkeypatch.chdir(tmp_path)
    keys = [f"{key}=p" for key in ("data_root", "tls.cert", "tls.key", "tls.ca", "tls.crl")]
    paths = list(paths_in(load_config(model, overrides=[*keys, *more]).config))
    assert set(paths) == {tmp_path / "p", tmp_path / model.model_fields["state_dir"].default}
    assert len(paths) == 7
