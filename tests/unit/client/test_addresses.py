"""Addresses in settings and options: anything else is refused, in every one of them."""

from collections.abc import Callable

import pytest
from pydantic import ValidationError
from pydantic_settings import BaseSettings

from fedring.client.config import ClientConfig
from fedring.daemon.config import ConfigError, load_config
from fedring.daemon.exits import Exit
from fedring.ring.errors import RingError
from fedring.ring.options import RingOptions
from fedring.ring.transport.channels import dial
from fedring.rpc.address import check_peer_address
from fedring.server.config import ServerConfig

Call = Callable[..., tuple[int, str, str]]

SETTINGS: list[tuple[type[BaseSettings], str]] = [
    (ServerConfig, "listen"),
    (ServerConfig, "control_listen"),
    (ServerConfig, "metrics_listen"),
    (ServerConfig, "health_listen"),
    (ClientConfig, "server"),
    (ClientConfig, "metrics_listen"),
    (ClientConfig, "health_listen"),
    (ClientConfig, "peer_listen"),
    (ClientConfig, "peer_address"),
    (RingOptions, "listen"),
    (RingOptions, "advertise"),
]


@pytest.mark.parametrize(("model", "key"), SETTINGS)
def test_a_port_above_65535_is_refused_in_every_setting(model: type[BaseSettings], key: str) -> None:
    assert getattr(model.model_validate({key: "127.0.0.1:65535"}), key) == "127.0.0.1:65535"
    for port in ("65536", "99999", "1" * 5000):
        with pytest.raises(
            ConfigError, match=rf"^{key} \(from the command line\): .* is not host:port: the largest port is 65535$"
        ):
            load_config(model, flags={key: f"127.0.0.1:{port}"})


@pytest.mark.parametrize(("model", "key"), SETTINGS)
@pytest.mark.parametrize("text", ["here:", "here:https", "127.0.0.1:²", "unix:"])
def test_text_that_is_no_address_is_refused_in_every_setting(model: type[BaseSettings], key: str, text: str) -> None:
    with pytest.raises(ValidationError, match="is not host:port"):
        model.model_validate({key: text})


@pytest.mark.parametrize(("model", "key"), [row for row in SETTINGS if row[1] not in ("peer_address", "advertise")])
def test_an_address_without_a_port_is_refused(model: type[BaseSettings], key: str) -> None:
    for text in ("here", "8443"):
        with pytest.raises(ValidationError, match=f"'{text}' is not host:port"):
            model.model_validate({key: text})


@pytest.mark.parametrize("key", ["peer_listen", "peer_address", "metrics_listen"])
def test_an_address_for_other_hosts_cannot_be_a_unix_socket(key: str) -> None:
    with pytest.raises(ValidationError, match="'unix:/run/x' is not host:port"):
        ClientConfig.model_validate({key: "unix:/run/x"})


@pytest.mark.parametrize("host", ["ward-7", "ward-7:7600", "[::1]", "[::1]:7600", "10.0.0.5"])
def test_the_address_for_peers_may_leave_out_the_port(host: str) -> None:
    assert ClientConfig.model_validate({"peer_address": host}).peer_address == host


@pytest.mark.parametrize("text", ["foo", "foo:bar", "127.0.0.1:99999", ""])
@pytest.mark.parametrize(
    ("verb", "option"),
    [("status", "--server"), ("rounds", "-s"), ("health", "--server"), ("health", "--listen")],
)
def test_flctl_calls_an_option_that_is_no_address_a_usage_error(flctl: Call, verb: str, option: str, text: str) -> None:
    code, out, err = flctl(verb, option, text)
    assert (code, out) == (Exit.USAGE, "")
    name = "--server" if option == "-s" else option
    assert err.startswith(f"flctl: {name}: {text!r} is not host:port")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(("name", "option"), [("SERVER", "--server"), ("LISTEN", "--listen"), ("HEALTH", "--at")])
def test_flctl_refuses_such_an_address_from_the_environment_as_well(
    flctl: Call, monkeypatch: pytest.MonkeyPatch, name: str, option: str
) -> None:
    monkeypatch.setenv(f"FLCTL_{name}", "foo")
    assert flctl("health") == (Exit.USAGE, "", f"flctl: {option}: 'foo' is not host:port\n")


def test_flctl_can_use_a_unix_socket(flctl: Call) -> None:
    code, _, err = flctl("health", "--at", "unix:/does/not/exist")
    assert (code, err.count("no answer from unix:/does/not/exist")) == (Exit.UNAVAILABLE, 1)


@pytest.mark.parametrize(
    "address", ["node-7:80", "node_7.example.org:1", "127.0.0.1:65535", "[::1]:7", "[fe80::1%eth0]:7"]
)
def test_a_peer_is_a_host_and_a_port(address: str) -> None:
    assert check_peer_address(address) == address


@pytest.mark.parametrize(
    "address",
    [
        "unix:/run/x:1",
        "dns://127.0.0.1:53/host:1",
        "ipv4:127.0.0.1:80",
        "unix-abstract:x:1",
        "a/b:1",
        "a b:1",
        "::1:7",
        "",
        ":1",
        "host",
        "host:x",
        "host:70000",
        "h" * 254 + ":1",
        "ｈost:1",
        "host\n:1",
        "xds:///a:1",
        "[::1:7",
        "-h:1",
    ],
)
def test_a_peer_cannot_choose_another_way_to_connect(address: str) -> None:
    with pytest.raises(ValueError, match="is not host:port"):
        check_peer_address(address)
    with pytest.raises(RingError, match="cannot be reached"):
        dial(address, RingOptions())
