"""The page that Prometheus reads: its address, who may read it, and its content."""

import importlib.util
import socket
import threading
import urllib.error
import urllib.request
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import pytest
from pydantic import ValidationError
from tests.conftest import ROOT
from tests.metrics_page import Page

from fedring.client.config import ClientConfig
from fedring.daemon import metrics
from fedring.daemon.config import ConfigError
from fedring.daemon.metrics import Registry, serving
from fedring.server.config import ServerConfig
from fedring.version import VERSION


def test_the_page_can_be_read_only_while_it_is_served() -> None:
    registry = Registry()
    registry.counter("fl_test_total", "What is tested.", result=("good", "bad")).labels("good").inc(3)
    with serving("127.0.0.1:0", registry) as address:
        page = Page(address)
    assert page.by("result", "fl_test_total") == {"good": 3}
    assert page("fl_test_total", result="bad") == 0
    assert page("fl_build_info", version=VERSION) == 1
    assert page("process_open_fds") > 0
    assert not any(sample.name.endswith("_created") for sample in page.samples)
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://{address}/metrics", timeout=5)


def test_without_an_address_nothing_listens() -> None:
    with serving("", Registry()) as address:
        assert address == ""


def test_an_address_in_use_is_a_configuration_error() -> None:
    with (
        serving("127.0.0.1:0", Registry()) as address,
        pytest.raises(ConfigError, match=f"metrics_listen {address}"),
        serving(address, Registry()),
    ):
        pass


@pytest.mark.parametrize("address", ["127.0.0.1:http", "127.0.0.1:70000", "not.a.host.invalid:9464"])
def test_an_invalid_address_is_a_configuration_error(address: str) -> None:
    with pytest.raises(ConfigError), serving(address, Registry()):
        pass


@pytest.mark.parametrize("config", [ServerConfig, ClientConfig])
def test_the_page_is_served_on_loopback_unless_insecure_or_metrics_insecure_is_set(
    config: type[ServerConfig] | type[ClientConfig],
) -> None:
    assert config.model_validate({"metrics_listen": "127.0.0.1:9464"}).metrics_listen == "127.0.0.1:9464"
    assert config.model_validate({"metrics_listen": "0.0.0.0:9464", "insecure": True}).insecure
    assert config.model_validate({"metrics_listen": "0.0.0.0:9464", "metrics_insecure": True}).metrics_insecure
    with pytest.raises(ValidationError, match="metrics_insecure"):
        config.model_validate({"metrics_listen": "0.0.0.0:9464"})
    with pytest.raises(ValidationError, match="host:port"):
        config.model_validate({"metrics_listen": "9464:"})


def test_the_page_that_documents_all_metrics_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("metrics_page", ROOT / "docs" / "metrics.py")
    assert spec is not None
    assert spec.loader is not None
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    target: Path = page.TARGET
    assert target.read_text(encoding="utf-8") == page.render()


def test_connections_that_say_nothing_take_no_more_than_their_places_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = metrics.CONNECTION_SECONDS
    monkeypatch.setattr(metrics, "CONNECTION_SECONDS", 0.1)
    before = threading.active_count()
    with serving("127.0.0.1:0", Registry()) as address, ExitStack() as stack:
        host, _, port = address.partition(":")
        dial = partial(socket.create_connection, (host, int(port)), timeout=60.0)
        lines = [stack.enter_context(dial()) for _ in range(3 * metrics.MOST_PER_ADDRESS)]
        for line in lines:
            with suppress(ConnectionError):
                line.sendall(b"GET /metrics HTTP/1.1\r\nHo")
        for line in lines:
            with suppress(ConnectionError):
                assert line.recv(1) == b""  # closed at once, or when its time was over
            assert threading.active_count() <= before + 1 + metrics.MOST_PER_ADDRESS
        monkeypatch.setattr(metrics, "CONNECTION_SECONDS", usual)  # so that a slow answer is not cut off
        while threading.active_count() > before + 1:  # A place becomes free after its connection's end is seen.
            threading.Event().wait(0.01)
        assert Page(address)("fl_build_info", version=VERSION) == 1


def test_one_address_leaves_places_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "CONNECTION_SECONDS", 3600.0)  # so that only those without a place are closed
    before = threading.active_count()
    with serving("127.0.0.1:0", Registry()) as address, ExitStack() as stack:
        host, _, port = address.partition(":")
        place = (host, int(port))
        lines = [
            stack.enter_context(socket.create_connection(place, timeout=60.0, source_address=("127.0.0.2", 0)))
            for _ in range(metrics.MOST_CONNECTIONS)
        ]
        for line in lines[metrics.MOST_PER_ADDRESS :]:
            with suppress(ConnectionError):
                assert line.recv(1) == b""
        assert threading.active_count() <= before + 1 + metrics.MOST_PER_ADDRESS
        assert Page(address)("fl_build_info", version=VERSION) == 1
