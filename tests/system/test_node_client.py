"""The client of docs/examples/node, written from the specification alone, beside others: every bit is as it says."""

import json
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pytest
from numpy.typing import NDArray

from fedring.codec import NAMES, Vectors
from fedring.v1 import federation_pb2 as pb
from tests.conftest import ROOT
from tests.fleets import Control, Fleet, until_watching
from tests.system.node import NodeClient, Said, environment, installed
from tests.system.wire import SECONDS, WireClient, model_of, payload_of, run
from tests.waiting import until

ROUNDS = 4  # of each encoding
WIDTH = 220  # of a model whose update is a small one in all encodings but fp32
LARGE = 250_000  # values, of 1 MB, which the client sends in chunks of 256 KiB
HERE = {"PYTHONPATH": str(Path(__file__).parent)}
TRUSTED = {"trusted": ["fedring", "user_models"]}
LOSSY = {"keep_ratio": 0.05, "chunk": 300}  # for those formats that use them


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the example is, with all that it needs."""
    return installed(tmp_path_factory.mktemp("node"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One fl-server for most tests of this file."""
    with Fleet(tmp_path_factory.mktemp("fleet"), TRUSTED, env=HERE) as fleet:
        yield fleet


class Gate:
    """A line to a server that stands still when it is told to, until it is opened."""

    def __init__(self, server: str) -> None:
        host, _, port = server.rpartition(":")
        self._server = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._ends: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._lock = threading.Condition()
        self._holds: dict[str, bool] = {}  # whether what goes "up" or "down" waits
        self._armed: tuple[str, int] | None = None
        self.holds = threading.Event()

    @property
    def address(self) -> str:
        """Where clients find the server."""
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def hold(self, direction: str, *, after: int) -> None:
        """Let nothing pass in this direction once so many more bytes have gone up; `holds` tells when."""
        with self._lock:
            self._armed = direction, after
            self.holds.clear()

    def open(self) -> None:
        """End all connections, and let later ones pass."""
        with self._lock:
            self._holds.clear()
            self._armed = None
            for end in self._ends:
                _end(end)
            self._lock.notify_all()

    def __enter__(self) -> Self:
        self._start(self._accept)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        _end(self._listener)
        self.open()
        for thread in self._threads:
            thread.join()
        for end in (self._listener, *self._ends):
            end.close()

    def _start(self, target: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):  # until the listener closes
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(self._server)
                except OSError:  # the server is away
                    near.close()
                    continue
                with self._lock:
                    self._ends += (near, far)
                self._start(self._carry, "up", near, far)
                self._start(self._carry, "down", far, near)

    def _carry(self, direction: str, start: socket.socket, end: socket.socket) -> None:
        with suppress(OSError):
            while data := start.recv(1 << 14):
                with self._lock:
                    if self._armed and direction == "up":
                        held, left = self._armed
                        self._armed = held, left - len(data)
                        if left <= len(data):
                            self._armed, self._holds[held] = None, True
                            self.holds.set()
                    self._lock.wait_for(lambda: not self._holds.get(direction))
                end.sendall(data)
        _end(start)
        _end(end)


def _end(connection: socket.socket) -> None:
    with suppress(OSError):  # it has ended by itself
        connection.shutdown(socket.SHUT_RDWR)


def model(wire: WireClient, version: int) -> tuple[Vectors, NDArray[np.bool_]]:
    """A model as it is sent to who holds none; and of each buffer value whether it is a whole number."""
    header, payload = wire.fetch(version)
    parts: dict[int, bytes] = {}
    for packet in header.packets:
        parts[packet.vector], payload = payload[16 : packet.bytes], payload[packet.bytes :]
    vectors = Vectors(
        np.frombuffer(parts[pb.VECTOR_PARAMETERS], "<f4"), np.frombuffer(parts.get(pb.VECTOR_BUFFERS, b""), "<f8")
    )
    assert vectors.digest() == header.model_digest
    buffers = [row for row in json.loads(header.schema) if row[3] == "buffer"]
    whole = [np.full(int(np.prod(shape)), dtype.startswith("int")) for _, shape, dtype, _ in buffers]
    return vectors, np.concatenate([np.zeros(0, bool), *whole])


def mean(base: NDArray[Any], updates: Sequence[tuple[int, NDArray[Any]]]) -> NDArray[np.float64]:
    """FORMATS.md, "Aggregation": in float64, in the order of the clients' names, which is that of the list."""
    total = np.zeros(len(base))
    for samples, values in updates:
        total = total + values.astype(np.float64) * samples
    return base + total / sum(samples for samples, _ in updates)


def deliver(wire: WireClient, command: pb.TrainCmd, size: int) -> tuple[int, NDArray[np.float32]]:
    """Push an update of the round's own; return its samples and its values."""
    values = np.random.default_rng(command.round).standard_normal(size).astype(np.float32)
    payload = payload_of(values)
    packet = pb.Packet(
        vector=pb.VECTOR_PARAMETERS, kind=pb.KIND_DELTA, encoding="fp32", bytes=len(payload), num_samples=7
    )
    wire.push(wire.header(command, payload, packets=[packet]), payload)
    return 7, values


def begun_uploads(server: Fleet) -> list[Path]:
    """What the server keeps of uploads that have not ended."""
    return [file for file in (server.directory / "state" / "server" / "partial").iterdir() if file.stat().st_size]


def assert_mean(before: Vectors, after: Vectors, said: Sequence[Said], other: tuple[int, NDArray[np.float32]]) -> None:
    """The parameters of a model are those of the one before, plus the mean of what its clients have said."""
    wanted = mean(before.parameters, [*((each.samples, each.parameters) for each in said), other])
    assert wanted.astype(np.float32).tobytes() == after.parameters.tobytes()


def test_every_example_of_the_wire_formats_is_read_and_written_as_it_stands(place: Path) -> None:
    command = ["node", "--test", "--test-reporter=tap", "vectors.test.js"]
    done = subprocess.run(command, cwd=place, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    passed = re.search(r"^# pass (\d+)$", done.stdout, re.MULTILINE)
    examples = json.loads((ROOT / "protos" / "vectors.json").read_text())
    of_clients = sum(len(each) for kind, each in examples.items() if kind not in ("about", "protocol", "gradients"))
    assert passed is not None
    assert int(passed[1]) >= of_clients


@pytest.mark.slow
def test_the_model_of_each_round_is_the_mean_of_what_its_clients_say(
    place: Path, server: Fleet, tmp_path: Path
) -> None:
    keys = {"model": "user_models:normed", "model_args": {"width": WIDTH}, "min_clients": 3, "evaluate": True}
    with (
        Control(server.control) as control,
        NodeClient(place, server.listen, "node-1", tmp_path) as first,
        NodeClient(place, server.listen, "node-2", tmp_path) as second,
        WireClient(server.listen, "wire") as wire,
    ):
        until_watching(control, 3)
        left: dict[str, NDArray[np.float32]] = {}
        for encoding in NAMES:
            run(control, **keys, encoding=encoding, rounds=ROUNDS, **LOSSY)
            for _ in range(ROUNDS):
                command = wire.expect("train")
                before, whole = model(wire, command.model_version)
                other = deliver(wire, command, len(before.parameters))
                evaluate = wire.expect("evaluate")
                report = pb.EvaluationReport(round=command.round, model_digest=evaluate.model_digest)
                after, _ = model(wire, evaluate.model_version)
                wire.commands.ReportEvaluation(report, metadata=wire.metadata, timeout=SECONDS)
                said = [client.said(command.round) for client in (first, second)]
                assert_mean(before, after, said, other)
                buffers = mean(before.buffers, [(each.samples, each.buffers) for each in said])
                assert np.where(whole, np.rint(buffers), buffers).tobytes() == after.buffers.tobytes()
                for client, each in zip((first, second), said, strict=True):
                    assert each.encoding == encoding
                    assert each.carried.tobytes() == left.get(client.name, np.zeros(0, "<f4")).tobytes()
                    left[client.name] = each.left
                    if encoding not in ("fp32", "uniform"):  # those two owe nothing
                        target = each.learned + each.carried if len(each.carried) else each.learned
                        assert (target - each.parameters).tobytes() == each.left.tobytes()
                (state,) = control.rounds(number=command.round)
                assert state.delivered == 3


def test_models_come_as_deltas_in_every_encoding(place: Path, server: Fleet, tmp_path: Path) -> None:
    keys = {"model_args": {"size": 20_000}, "rounds": 2, "min_clients": 1, "evaluate": True}
    with Control(server.control) as control, NodeClient(place, server.listen, "node-1", tmp_path) as node:
        until_watching(control, 1)
        for encoding in NAMES:
            job_id, events = run(control, **keys, download_encoding=encoding)
            ended = list(events)
            assert sum(event.kind == "round_evaluated" for event in ended) == 2
            assert control.job(job_id).rounds_done == 2
        assert len(re.findall("bytes to add to the model held", node.log)) == 2 * len(NAMES)


def test_a_client_killed_in_mid_upload_goes_on_where_it_was(place: Path, server: Fleet, tmp_path: Path) -> None:
    with (
        Control(server.control) as control,
        Gate(server.listen) as gate,
        NodeClient(place, gate.address, "node-1", tmp_path) as node,
        WireClient(server.listen, "wire") as wire,
    ):
        until_watching(control, 2)
        gate.hold("up", after=700_000)
        run(control, model_args={"size": LARGE}, min_clients=2)
        command = wire.expect("train")
        before, _ = model(wire, command.model_version)
        assert gate.holds.wait(SECONDS)
        until(lambda: begun_uploads(server))
        node.kill()
        said = node.forget_said(command.round)
        gate.open()
        node.start()
        other = deliver(wire, command, LARGE)
        after, _ = model(wire, model_of(control, command.round))
        assert_mean(before, after, [said], other)
        assert not node.has_said(command.round)
        assert "continuing there" in node.log


def test_a_client_killed_before_it_is_told_of_its_acceptance_loses_nothing(
    place: Path, server: Fleet, tmp_path: Path
) -> None:
    size = 10_000
    with (
        Control(server.control) as control,
        Gate(server.listen) as gate,
        NodeClient(place, gate.address, "node-1", tmp_path) as node,
        WireClient(server.listen, "wire") as wire,
    ):
        until_watching(control, 2)
        gate.hold("down", after=5_000)
        events = control.events()
        run(control, model_args={"size": size}, encoding="int8", rounds=2, min_clients=2)
        command = wire.expect("train")
        before, _ = model(wire, command.model_version)
        next(event for event in events if event.kind == "update_accepted" and event.client_id == node.name)
        assert gate.holds.is_set()
        assert "accepted" not in node.log
        node.kill()
        first = node.forget_said(command.round)
        gate.open()
        node.start()
        other = deliver(wire, command, size)
        command = wire.expect("train")
        after, _ = model(wire, command.model_version)
        assert_mean(before, after, [first], other)
        other = deliver(wire, command, size)
        last, _ = model(wire, model_of(control, command.round))
        second = node.said(command.round)
        assert_mean(after, last, [second], other)
        assert second.carried.tobytes() == first.left.tobytes()
        assert np.count_nonzero(first.left) > 0
        assert not node.has_said(command.round - 1)
        events.cancel()


@pytest.mark.parametrize("told", [True, False], ids=["told of its acceptance", "not told"])
def test_a_client_whose_folder_was_put_back_sends_nothing_twice(
    place: Path, server: Fleet, tmp_path: Path, told: bool
) -> None:
    with (
        Control(server.control) as control,
        Gate(server.listen) as gate,
        NodeClient(place, gate.address, "node-1", tmp_path) as node,
    ):

        def round_() -> int:
            until_watching(control, 1)
            _, events = run(control, model_args={"size": 10_000}, encoding="int8")
            return next(event.round for event in events if event.kind == "update_accepted")

        def killed() -> None:
            events = control.events()
            node.kill()
            gate.open()
            next(event for event in events if event.kind == "client_lost")
            events.cancel()

        def until_noted(round_: int) -> Said:
            until(lambda: node.said(round_).name in node.log)
            return node.said(round_)

        if not told:
            until_watching(control, 1)
            gate.hold("down", after=5_000)
        first = round_()
        if told:
            until_noted(first)
        killed()
        shutil.copytree(node.state, tmp_path / "copy")
        node.start()
        assert until_noted(round_()).carried.tobytes() == node.said(first).left.tobytes()
        killed()
        shutil.rmtree(node.state)
        (tmp_path / "copy").rename(node.state)
        node.start()
        assert len(until_noted(round_()).carried) == 0


def test_a_round_survives_its_server_and_needs_no_training_twice(place: Path, tmp_path: Path) -> None:
    with (
        Fleet(tmp_path / "fleet") as fleet,
        Gate(fleet.listen) as gate,
        NodeClient(place, fleet.listen, "node-1", tmp_path) as first,
        NodeClient(place, gate.address, "node-2", tmp_path) as second,
    ):
        with Control(fleet.control) as control, WireClient(fleet.listen, "wire") as wire:
            until_watching(control, 3)
            gate.hold("up", after=700_000)
            events = control.events()
            run(control, model_args={"size": LARGE}, min_clients=3)
            command = wire.expect("train")
            before, _ = model(wire, command.model_version)
            next(event for event in events if event.kind == "update_accepted" and event.client_id == first.name)
            assert gate.holds.wait(SECONDS)
            until(lambda: begun_uploads(fleet))
            said = [client.forget_said(command.round) for client in (first, second)]
            fleet.server.kill()
        gate.open()
        fleet.start_server()
        with Control(fleet.control) as control, WireClient(fleet.listen, "wire") as wire:
            other = deliver(wire, wire.expect("train"), LARGE)
            after, _ = model(wire, model_of(control, command.round))
            assert_mean(before, after, said, other)
            assert [client.has_said(command.round) for client in (first, second)] == [False, False]
            assert "continuing there" in second.log


def test_a_newer_process_on_the_same_folder_takes_the_session_over(place: Path, server: Fleet, tmp_path: Path) -> None:
    older = NodeClient(place, server.listen, "node-1", tmp_path)
    older.start()
    until(lambda: "in session" in older.log)
    assert (older.state / "resume_secret").stat().st_mode & 0o777 == 0o600
    with NodeClient(place, server.listen, "node-1", tmp_path):
        assert older.wait() == 78
