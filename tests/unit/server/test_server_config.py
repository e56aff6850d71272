"""fl-server's configuration: its sources, and the values that it refuses."""

from pathlib import Path
from typing import Any

import pytest

from fedring.daemon.config import ConfigError, Loaded, describe, load_config
from fedring.server.config import ServerConfig
from fedring.server.guard.ports import warn_of_insecurity
from fedring.server.main import load


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("lisen=1:1", "unknown key 'lisen' on the command line; did you mean 'listen'?"),
        ("job.epoch=3", "unknown key 'job.epoch' on the command line; did you mean 'job.epochs'?"),
        ("job.server_optimizer.nam=1", "did you mean 'job.server_optimizer.name'?"),
        ("qqqq=1", "unknown key 'qqqq' on the command line; valid keys: listen, "),
        ("keep_models=0", "keep_models (from the command line): must be greater than 0"),
        ("job.lr=-1", "job.lr (from the command line): must be greater than 0"),
        ("listen=here", "listen (from the command line): 'here' is not host:port"),
        (
            "listen=0.0.0.0:8443",
            "'0.0.0.0:8443' can be reached from other hosts in plaintext: set tls.cert and tls.key",
        ),
        ("tls.ca=ca.crt", "tls.ca needs tls.cert and tls.key"),
        ("tls.cert=server.crt", "tls.cert and tls.key belong together"),
        ("tls.cart=server.crt", "did you mean 'tls.cert'?"),
        ("lost_after_seconds=1", "lost_after_seconds must be above heartbeat_seconds"),
        ("=3", "'=3' is not of the form key=value"),
    ],
)
def test_a_configuration_error_is_one_sentence(override: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(ServerConfig, overrides=[override])
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_later_source_overrides_an_earlier_one_and_each_value_names_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "server.toml"
    path.write_text("keep_models = 1\nthreads = 1\n[job]\nrounds = 1\nepochs = 1\nlr = 1.0\n")
    monkeypatch.setenv("FEDRING_SERVER_THREADS", "2")
    monkeypatch.setenv("FEDRING_SERVER_JOB__ROUNDS", "2")
    loaded = load([str(path), "job.lr=3", "drain_seconds=3"], {"state_dir": Path("x"), "listen": None})
    config = loaded.config
    assert (config.keep_models, config.threads, config.drain_seconds) == (1, 2, 3)
    assert config.state_dir == Path("x").absolute()
    assert (config.job.epochs, config.job.rounds, config.job.lr) == (1, 2, 3.0)
    lines = describe(loaded).splitlines()
    assert f"keep_models = 1  # file {path}" in lines
    assert "job.rounds = 2  # environment" in lines
    assert "job.lr = 3.0  # the command line" in lines
    assert f'state_dir = "{config.state_dir}"  # the command line' in lines
    assert 'listen = "127.0.0.1:8443"  # default' in lines


def test_a_file_may_be_json_or_toml(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"keep_models": 3, "job": {"rounds": 5}}')
    (tmp_path / "a.toml").write_text("keep_models = 3\njob.rounds = 5\n")
    first, second = (load([str(tmp_path / name)], {}).config for name in ("a.json", "a.toml"))
    assert first == second


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.toml", "a = = 1", "is not valid TOML"),
        ("a.json", "{", "is not valid JSON"),
        ("a.json", "[1]", "must hold a table of keys, not a list"),
        ("a.toml", "[jop]\nrounds = 1", "unknown key 'jop'"),
    ],
)
def test_the_error_names_the_file_that_is_not_valid(tmp_path: Path, name: str, text: str, sentence: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=sentence) as refused:
        load([str(tmp_path / name)], {})
    assert name in str(refused.value)


def test_the_error_names_the_file_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match=r"cannot read nowhere\.toml: No such file"):
        load(["nowhere.toml"], {})


def test_an_unknown_variable_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDRING_SERVER_KEEP_MODEL", "3")
    with pytest.raises(ConfigError, match=r"FEDRING_SERVER_KEEP_MODEL; did you mean 'keep_models'\?"):
        load([], {})


def test_plaintext_is_allowed_on_loopback_and_on_other_addresses_if_insecure_is_set() -> None:
    for address in ("127.0.0.1:0", "localhost:1", "[::1]:5", "unix:/tmp/x.sock"):
        assert ServerConfig.model_validate({"listen": address}).listen == address
    assert isinstance(load_config(ServerConfig, overrides=["listen=0.0.0.0:1", "insecure=true"]), Loaded)


TLS = ("tls.cert=server.crt", "tls.key=server.key")


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["tokens=true", "insecure=true"], "tokens must not travel in plaintext"),
        ([*TLS], "nothing says who may call: set tls.ca, or tokens = true"),
        ([*TLS, "insecure=true"], ""),
        ([*TLS, "tokens=true"], ""),
        ([*TLS, "tls.ca=ca.crt"], ""),
    ],
)
def test_an_address_beyond_loopback_needs_client_certificates_or_tokens_unless_insecure_is_set(
    overrides: list[str], sentence: str
) -> None:
    reachable = ["listen=0.0.0.0:8443", "control_listen=0.0.0.0:8444", *overrides]
    if not sentence:
        assert load_config(ServerConfig, overrides=reachable).config.tls.on
        return
    with pytest.raises(ConfigError, match=sentence):
        load_config(ServerConfig, overrides=reachable)


@pytest.mark.parametrize(
    ("keys", "warnings"),
    [
        ({}, 0),
        ({"listen": "0.0.0.0:1", "insecure": True}, 1),
        ({"listen": "0.0.0.0:1", "insecure": True, "tls": {"cert": "a", "key": "b"}}, 1),
        ({"listen": "0.0.0.0:1", "control_listen": "0.0.0.0:2", "insecure": True}, 2),
        ({"listen": "0.0.0.0:1", "tls": {"cert": "a", "key": "b", "ca": "c"}}, 0),
    ],
)
def test_the_log_warns_of_each_insecure_address(
    keys: dict[str, Any], warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_insecurity(ServerConfig.model_validate(keys))
    assert len(caplog.messages) == warnings
    assert all(message.startswith("insecure: ") for message in caplog.messages)
