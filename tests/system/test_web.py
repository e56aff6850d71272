"""The page's paths, headers and JSON, from a real fl-server over a real socket."""

import gzip
import json
import re
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
import zstandard

from fedring.web.app import STATIC
from fedring.web.feed import MOST_VIEWERS
from fedring.web.headers import POLICY
from tests import forks
from tests.fleets import Control, Fleet

CLIENTS, ROUNDS = 2, 3
SECONDS = 60.0


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Start a server with its page, and without clients."""
    with Fleet(tmp_path_factory.mktemp("web"), {"web_port": 0}) as fleet:
        yield fleet


def ask(fleet: Fleet, path: str, *, method: str = "GET", **headers: str) -> tuple[HTTPResponse, bytes]:
    """Request exactly this path; return the response and its body."""
    connection = open_connection(fleet)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        return response, response.read()
    finally:
        connection.close()


def folder(fleet: Fleet) -> str:
    """Return the folder of the page's files, which changes with them."""
    found = re.search(rb'src="([0-9a-f]{16})/app.js"', ask(fleet, "/")[1])
    assert found
    return found[1].decode()


def open_connection(fleet: Fleet) -> HTTPConnection:
    place = urlsplit(fleet.web)
    return HTTPConnection(place.hostname or "", place.port, timeout=SECONDS)


def read(fleet: Fleet, path: str) -> Any:
    response, body = ask(fleet, path)
    assert response.status == 200, body
    assert response.headers["content-type"] == "application/json"
    return json.loads(body)


class Stream:
    """An open stream of events."""

    def __init__(self, fleet: Fleet) -> None:
        self._connection = open_connection(fleet)
        self._connection.request("GET", "/api/stream")
        self.response = self._connection.getresponse()

    def news(self) -> Any:
        """Return the data of the next message."""
        while not (line := self.response.readline()).startswith(b"data: "):
            assert line, "the stream has ended"
        return json.loads(line.removeprefix(b"data: "))

    def close(self) -> None:
        self.response.close()
        self._connection.close()


class TestFiles:
    def test_the_page_and_its_files_are_served(self, fleet: Fleet) -> None:
        response, body = ask(fleet, "/")
        assert response.headers["content-type"] == "text/html; charset=utf-8"
        assert b"<title>fedring</title>" in body
        assert ask(fleet, "/index.html")[1] == body
        for path in STATIC.iterdir():
            if path.name != "index.html":
                response, body = ask(fleet, f"/{folder(fleet)}/{path.name}")
                assert (response.status, body) == (200, path.read_bytes())

    def test_plotly_comes_from_its_python_package(self, fleet: Fleet) -> None:
        response, body = ask(fleet, f"/{folder(fleet)}/plotly.min.js")
        assert response.headers["content-type"].startswith("text/javascript")
        assert b"plotly.js" in body[:100]

    def test_a_browser_keeps_a_file_for_good_and_asks_for_the_page_again(self, fleet: Fleet) -> None:
        for path, kept in {f"/{folder(fleet)}/app.js": "public, max-age=31536000, immutable", "/": "no-cache"}.items():
            response, _ = ask(fleet, path)
            assert (response.headers["cache-control"], response.headers["vary"]) == (kept, "Accept-Encoding")
            again, nothing = ask(fleet, path, If_None_Match=f'"other", W/{response.headers["etag"]}')
            assert (again.status, nothing, again.headers["etag"]) == (304, b"", response.headers["etag"])

    @pytest.mark.parametrize(
        ("accepted", "encoding"),
        [
            ("gzip, deflate, br, zstd", "zstd"),
            ("gzip, deflate", "gzip"),
            ("zstd;q=0, gzip;q=0.5", "gzip"),
            ("br", None),
            ("", None),
        ],
    )
    def test_files_are_compressed_as_the_browser_wants(self, fleet: Fleet, accepted: str, encoding: str | None) -> None:
        plain, whole = ask(fleet, f"/{folder(fleet)}/app.js")
        response, body = ask(fleet, f"/{folder(fleet)}/app.js", Accept_Encoding=accepted)
        assert response.headers["content-encoding"] == encoding
        assert (response.headers["etag"] == plain.headers["etag"]) == (encoding is None)
        if encoding == "zstd":
            body = zstandard.decompress(body)
        elif encoding == "gzip":
            body = gzip.decompress(body)
        assert body == whole

    def test_another_folder_has_no_files(self, fleet: Fleet) -> None:
        for path in (
            "/app.js",
            "/0123456789abcdef/app.js",
            f"/{folder(fleet)}/none.js",
            f"/{folder(fleet)}/index.html",
        ):
            assert ask(fleet, path)[0].status == 404

    def test_the_pages_files_contain_no_urls_of_other_hosts(self) -> None:
        for path in STATIC.iterdir():
            text = path.read_text().replace("http://www.w3.org/2000/svg", "")
            assert "http://" not in text.replace("http://HOST", "")
            assert "https://" not in text
            assert len(text.splitlines()) < 400

    @pytest.mark.parametrize(
        "path",
        [
            "/../app.py",
            "/%2e%2e/app.py",
            "/..%2fapp.py",
            "/static/../../app.py",
            "//etc/passwd",
            "/..%5capp.py",
            "/%00",
        ],
    )
    def test_no_path_leads_to_files_outside_of_the_page(self, fleet: Fleet, path: str) -> None:
        response, body = ask(fleet, path)
        assert response.status == 404
        assert body == b"Not Found"

    def test_the_page_answers_health_checks(self, fleet: Fleet) -> None:
        assert ask(fleet, "/healthz")[1] == b"ok\n"


class TestSecurity:
    @pytest.mark.parametrize(
        ("path", "status"),
        [("/", 200), ("/healthz", 200), ("/api/state", 200), ("/none", 404), ("/api/rounds?job=x", 400)],
    )
    def test_every_response_has_the_security_headers(self, fleet: Fleet, path: str, status: int) -> None:
        response, _ = ask(fleet, path)
        assert response.status == status
        assert response.headers["content-security-policy"] == POLICY
        assert "unsafe" not in POLICY
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["referrer-policy"] == "no-referrer"
        assert response.headers["x-frame-options"] == "DENY"
        assert response.headers["set-cookie"] is None
        assert response.headers["access-control-allow-origin"] is None
        assert response.headers["server"] is None

    @pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE"])
    def test_only_get_is_allowed(self, fleet: Fleet, method: str) -> None:
        for path in ("/", "/api/state", "/api/stream"):
            response, _ = ask(fleet, path, method=method)
            assert (response.status, response.headers["allow"]) == (405, "GET")
            assert response.headers["content-security-policy"] == POLICY

    @pytest.mark.parametrize(
        "host", ["evil.example", "127.0.0.1.evil.example", "evil.example:80", "1.2.3", "localhost.a"]
    )
    def test_a_foreign_name_for_this_host_is_refused_and_the_key_is_named(self, fleet: Fleet, host: str) -> None:
        for path in ("/", "/api/state", "/api/stream", "/healthz"):
            response, body = ask(fleet, path, Host=host)
            name = host.partition(":")[0]
            assert (response.status, body.decode()) == (
                421,
                f"fl-server does not know the name {name!r}: add it to web_allowed_hosts, or use the IP address\n",
            )
            assert response.headers["content-security-policy"] == POLICY

    @pytest.mark.parametrize(
        "host", ["", "127.0.0.1@evil", "evil@127.0.0.1", "[evil]", "[::1", "a b", "a/b", "a:b", "<b>"]
    )
    def test_what_is_no_host_is_refused(self, fleet: Fleet, host: str) -> None:
        response, body = ask(fleet, "/", Host=host)
        assert (response.status, body) == (400, b"the Host header is missing or is not a host\n")

    @pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "localhost.", "127.0.0.1", "[::1]:9", "10.1.2.3:80"])
    def test_the_names_of_this_host_and_addresses_are_answered(self, fleet: Fleet, host: str) -> None:
        assert ask(fleet, "/healthz", Host=host)[0].status == 200

    def test_scripts_of_other_sites_are_refused_but_links_work(self, fleet: Fleet) -> None:
        for site in ("cross-site", "same-site"):
            foreign, _ = ask(fleet, "/api/stream", Sec_Fetch_Site=site, Sec_Fetch_Mode="cors")
            assert foreign.status == 403
            assert ask(fleet, "/", Sec_Fetch_Site=site, Sec_Fetch_Mode="navigate")[0].status == 200
        own, _ = ask(fleet, "/api/state", Sec_Fetch_Site="same-origin", Sec_Fetch_Mode="cors")
        assert own.status == 200

    def test_garbage_is_refused_and_the_page_stays_up(self, fleet: Fleet) -> None:
        place = urlsplit(fleet.web)
        for garbage in (b"\x16\x03\x01\x00\xff", b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 10_000, b"GET /\r\n\r\n"):
            with socket.create_connection((place.hostname, place.port), timeout=SECONDS) as raw:
                answer = b""
                with suppress(ConnectionError):  # the server may close the connection before it has read everything
                    raw.sendall(garbage)
                    answer = raw.recv(100)
                assert answer.startswith(b"HTTP/1.1 400") or answer == b""
        assert ask(fleet, "/healthz")[0].status == 200

    def test_unfinished_requests_from_one_address_do_not_block_others(self, tmp_path: Path) -> None:
        with Fleet(tmp_path, {"web_port": 0}) as fleet, ExitStack() as stack:
            place = urlsplit(fleet.web)
            for _ in range(600):
                raw = stack.enter_context(socket.create_connection((place.hostname, place.port), timeout=SECONDS))
                with suppress(ConnectionError):  # the server may have closed it already
                    raw.sendall(b"GET / HTTP/1.1\r\nHo")
            other = HTTPConnection(place.hostname or "", place.port, SECONDS, source_address=("127.0.0.2", 0))
            with closing(other):
                other.request("GET", "/")
                assert other.getresponse().status == 200


class TestEmpty:
    def test_a_new_server_has_an_empty_state(self, fleet: Fleet) -> None:
        state = read(fleet, "/api/state")
        assert state["jobs"] == state["models"] == state["clients"] == []
        assert state["round"] is state["waits_for"] is state["group"] is None
        assert read(fleet, "/api/rounds") == {"job": None, "rounds": []}
        assert read(fleet, "/api/events") == {"events": state["events"]}
        assert read(fleet, "/api/clients") == {"clients": [], "total": 0}
        assert read(fleet, f"/api/clients?search=a&skip={'9' * 19}") == {"clients": [], "total": 0}

    @pytest.mark.parametrize(
        "path",
        [
            "/api/rounds?job=-1",
            "/api/rounds?after=1e3",
            "/api/events?after=٣",
            "/api/clients?skip=-1",
            "/api/rounds?job=" + "9" * 99,
        ],
    )
    def test_a_malformed_number_is_refused(self, fleet: Fleet, path: str) -> None:
        response, body = ask(fleet, quote(path, safe="/?=&"))
        assert (response.status, body.partition(b" ")[2]) == (400, b"must be a number, 0 or above")

    def test_large_numbers_give_empty_lists(self, fleet: Fleet) -> None:
        assert read(fleet, f"/api/rounds?job={10**19 - 1}&after={10**19 - 1}") == {"job": None, "rounds": []}
        assert read(fleet, f"/api/events?after={10**19 - 1}") == {"events": []}


class TestStreams:
    def test_the_number_of_viewers_is_limited_and_a_viewer_that_leaves_makes_room(self, fleet: Fleet) -> None:
        streams = [Stream(fleet) for _ in range(MOST_VIEWERS)]
        try:
            assert all("server" in stream.news() for stream in streams)
            refused, _ = ask(fleet, "/api/stream")
            assert (refused.status, refused.headers["retry-after"]) == (503, "5")
            streams.pop().close()
            streams.append(open_stream(fleet))
        finally:
            for stream in streams:
                stream.close()

    def test_a_stop_does_not_wait_for_viewers(self, tmp_path: Path) -> None:
        with Fleet(tmp_path, {"web_port": 0, "drain_seconds": 200}) as fleet:
            stream = Stream(fleet)
            assert "server" in stream.news()
            fleet.server.send(signal.SIGTERM)
            assert fleet.server.wait(SECONDS) == 0
            assert "Traceback" not in fleet.server.log.read_text()
            stream.close()


def open_stream(fleet: Fleet) -> Stream:
    """Open a stream as soon as there is room for it."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        stream = Stream(fleet)
        if stream.response.status == 200:
            return stream
        stream.close()
    pytest.fail("there is no room for one more stream")


def test_the_progress_of_a_job_can_be_read_live_and_afterwards(tmp_path: Path) -> None:
    name = '<img src="x" onerror="alert(1)">'
    with Fleet(tmp_path, {"web_port": 0}, [{}] * CLIENTS) as fleet, Control(fleet.control) as control:
        stream = Stream(fleet)
        seen = stream.news()
        events = control.events()
        job_id = control.start_job({"name": name, "rounds": ROUNDS, "min_clients": CLIENTS, "epochs": 2}).job_id
        assert [event.kind for event in control.follow_job(job_id, events)][-1] == "job_ended"
        while [job["state"] for job in seen["jobs"]] != ["completed"] or seen["events"][-1]["kind"] != "job_ended":
            seen |= stream.news()
        stream.close()
        assert seen["round"]["phase"] == "published"
        assert seen["waits_for"] is None
        assert {client["client_id"]: client["state"] for client in seen["clients"]} == {
            f"client-{i}": "watching" for i in range(CLIENTS)
        }
        names = [client["client_id"] for client in read(fleet, "/api/clients?skip=1")["clients"]]
        assert names == [f"client-{i}" for i in range(1, CLIENTS)]
        one = read(fleet, "/api/clients?search=CLIENT-1")
        assert ([client["updates"] for client in one["clients"]], one["total"]) == ([ROUNDS], 1)
        assert seen["server"]["known"] == CLIENTS
        answer = read(fleet, f"/api/rounds?job={job_id}")
        assert answer["job"].pop("changed") == ["name", "rounds", "epochs"]
        assert answer["job"].pop("settings")["epochs"] == 2
        assert (
            answer["job"] | {"name": name, "mode": "federated", "encoding": "uniform"}
            == answer["job"]
            == seen["jobs"][0]
        )
        expected = sorted(control.rounds(job_id=job_id), key=lambda round_: round_.round)
        for row, round_ in zip(answer["rounds"], expected, strict=True):
            assert row["accuracy"] == round_.eval_correct / round_.eval_total > 0.5
            assert row["loss"] == pytest.approx(round_.eval_loss_sum / round_.eval_total)
            assert row["upload_by_encoding"] == {"uniform": round_.upload_bytes}
            assert row["download_bytes"] == round_.download_bytes
        assert read(fleet, f"/api/rounds?job={job_id}&after={expected[0].round}")["rounds"] == answer["rounds"][1:]
        parts = read(fleet, f"/api/rounds?job={job_id}&clients=1")["rounds"]
        for row, round_ in zip(parts, expected, strict=True):
            sent = {client.client_id: client.upload_bytes for client in round_.clients}
            assert {client["client_id"]: client["upload_bytes"] for client in row["clients"]} == sent
        models = {model.version: model.accuracy for model in control.models() if model.HasField("accuracy")}
        assert {row["version"]: row["accuracy"] for row in seen["models"] if row["accuracy"]} == models
        kinds = [event["kind"] for event in read(fleet, "/api/events")["events"] if event["job_id"] == job_id]
        assert (kinds[0], kinds[-1]) == ("job_started", "job_ended")
        last = seen["events"][-1]["id"]
        assert read(fleet, f"/api/events?after={last}") == {"events": []}
        fleet.server.send(signal.SIGTERM)  # so that it stores its last events, too
        assert fleet.server.wait(SECONDS) == 0
        fleet.start_server()
        after = read(fleet, "/api/state")
        assert after["round"] == seen["round"]
        assert [event["kind"] for event in after["events"] if event["kind"] == "job_ended"] == ["job_ended"]


class TestConfiguration:
    def test_a_port_in_use_is_named_in_the_error(self, fleet: Fleet, tmp_path: Path) -> None:
        port = urlsplit(fleet.web).port
        code, error = start(tmp_path, f"web_port={port}")
        assert (code, error) == (
            78,
            f"fl-server: web_port: cannot listen on 127.0.0.1:{port}: Address already in use\n",
        )

    def test_the_page_is_open_to_other_hosts_only_with_web_insecure(self, tmp_path: Path) -> None:
        code, error = start(tmp_path, "web_port=0", "web_host=0.0.0.0")
        assert code == 78
        assert "set web_insecure = true" in error
        assert start(tmp_path, "web_port=0", "web_host=0.0.0.0", "web_insecure=true") == (0, "")
        assert start(tmp_path, "web_host=0.0.0.0") == (0, "")  # without web_port there is no page

    def test_a_page_for_other_hosts_answers_only_to_the_names_that_are_listed(self, tmp_path: Path) -> None:
        keys = {"web_port": 0, "web_host": "0.0.0.0", "web_insecure": True, "web_allowed_hosts": ["Fl.example.org"]}
        with Fleet(tmp_path, keys) as fleet:
            for host, status in (
                ("fl.example.org:80", 200),
                ("FL.EXAMPLE.ORG", 200),
                ("127.0.0.1", 200),
                ("evil", 421),
            ):
                assert ask(fleet, "/", Host=host)[0].status == status

    def test_an_allowed_host_must_be_a_name(self, tmp_path: Path) -> None:
        for value in ("*", "https://fl.example.org", "fl.example.org:80", ""):
            code, error = start(tmp_path, f'web_allowed_hosts=["{value}"]')
            assert code == 78
            assert "web_allowed_hosts.0" in error
            assert f"{value!r} is not the name of a host, such as fl.example.org" in error

    def test_an_unknown_web_host_is_refused(self, tmp_path: Path) -> None:
        code, error = start(tmp_path, "web_port=0", "web_host=127.0.0.1.", "insecure=true")
        assert (code, error.partition(" on ")[0]) == (78, "fl-server: web_port: cannot listen")


def start(state: Path, *overrides: str) -> tuple[int, str]:
    """Run fl-server --check-config; return the exit code and stderr."""
    fixed = ["listen=127.0.0.1:0", "control_listen=127.0.0.1:0", "log_level=error", f"state_dir={state}"]
    done = forks.run("fedring.server.main", "--check-config", *fixed, *overrides, timeout=2 * SECONDS)
    return done.returncode, done.stderr
