"""The way through an HTTP proxy, as gRPC takes it, for the handshakes that say why there is none."""

import socket
import threading

import pytest

from fedring.rpc.probe import Listener, connection_to, listener_at, proxy_for


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("grpc_proxy", "https_proxy", "http_proxy", "no_grpc_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({}, ""),
        ({"https_proxy": "http://p:3128"}, "p:3128"),
        ({"https_proxy": "http://ann:secret@p"}, "p:80"),
        ({"http_proxy": "http://p:1", "https_proxy": "http://q:2", "grpc_proxy": "http://r:3"}, "r:3"),
        ({"https_proxy": "https://p:3128"}, ""),  # gRPC takes none that is called with TLS
        ({"https_proxy": "http://p:port"}, ""),
        ({"https_proxy": "http://p:3128", "no_proxy": "other.org, example.org"}, ""),
        ({"https_proxy": "http://p:3128", "no_proxy": "example.com"}, "p:3128"),
        ({"https_proxy": "http://p:3128", "no_proxy": "example.org", "no_grpc_proxy": "x"}, "p:3128"),
    ],
)
def test_the_proxy_is_that_of_grpc(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], wanted: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert proxy_for("fl.example.org:443") == wanted
    assert proxy_for("unix:/run/fl.sock") == ""


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"HTTP/1.1 403 Forbidden\r\n\r\n", "403 Forbidden"),
        (b"", "no answer"),
        (b"SSH-2.0-x\r\n", "SSH-2.0-x"),
        (b"A" * 70_000, "AAA"),
    ],
)
def test_a_proxy_that_makes_no_tunnel_is_told(monkeypatch: pytest.MonkeyPatch, answer: bytes, says: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        asked: list[bytes] = []

        def refuse() -> None:
            for _ in range(2):
                with listener.accept()[0] as caller:
                    asked.append(caller.recv(1000))
                    caller.sendall(answer)

        thread = threading.Thread(target=refuse)
        thread.start()
        monkeypatch.setenv("https_proxy", f"http://ann:pass%20word@127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(OSError, match=says) as refused:
            connection_to("fl.example.org:443", 60.0)
        assert len(str(refused.value)) < 400
        assert listener_at("fl.example.org:443") is Listener.NOBODY
        thread.join()
        assert b"CONNECT fl.example.org:443 HTTP/1.1" in asked[0]
        assert b"Proxy-Authorization: Basic YW5uOnBhc3Mgd29yZA==" in asked[0]
