"""The client of docs/examples/node, written from the specification alone, together with other clients."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fedring.codec import NAMES, Vectors
from fedring.v1 import federation_pb2 as pb
from tests.conftest import ROOT
from tests.fleets import Control, Fleet, until_watching
from tests.proxy import StallingProxy
from tests.system.node import NodeClient, UpdateDump, environment, install_example
from tests.system.wire import SECONDS, WireClient, payload_of, published_version, run
from tests.waiting import until

ROUNDS = 2  # for each encoding: the second one carries what the first one has left
WIDTH = 220  # of a model whose update fits into one message in all encodings but fp32
LARGE = 250_000  # values; 1 MB, which the client sends in chunks of 256 KiB
HERE = {"PYTHONPATH": str(Path(__file__).parent)}
TRUSTED = {"trusted": ["fedring", "user_models"]}
LOSSY = {"keep_ratio": 0.05, "chunk": 300}  # for the encodings that use them


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the example; return its folder."""
    return install_example(tmp_path_factory.mktemp("node"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Start one fl-server for most tests of this file."""
    with Fleet(tmp_path_factory.mktemp("fleet"), TRUSTED, env=HERE) as fleet:
        yield fleet


def model(wire: WireClient, version: int) -> tuple[Vectors, NDArray[np.bool_]]:
    """Fetch a whole model; return it, and for each buffer value whether it belongs to an integer tensor."""
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
    """Aggregate as FORMATS.md says: in float64, in the order of the clients' names, which the list must have."""
    total = np.zeros(len(base))
    for samples, values in updates:
        total = total + values.astype(np.float64) * samples
    return base + total / sum(samples for samples, _ in updates)


def deliver(wire: WireClient, command: pb.TrainCmd, size: int) -> tuple[int, NDArray[np.float32]]:
    """Push an update that depends on the round; return its samples and its values."""
    values = np.random.default_rng(command.round).standard_normal(size).astype(np.float32)
    payload = payload_of(values)
    packet = pb.Packet(
        vector=pb.VECTOR_PARAMETERS, kind=pb.KIND_DELTA, encoding="fp32", bytes=len(payload), num_samples=7
    )
    wire.push(wire.header(command, payload, packets=[packet]), payload)
    return 7, values


def begun_uploads(server: Fleet) -> list[Path]:
    """Return the server's files of unfinished uploads."""
    return [file for file in (server.directory / "state" / "server" / "partial").iterdir() if file.stat().st_size]


def assert_mean(
    before: Vectors, after: Vectors, dumps: Sequence[UpdateDump], other: tuple[int, NDArray[np.float32]]
) -> None:
    """Assert that the new parameters are the old ones plus the mean of the clients' updates."""
    wanted = mean(before.parameters, [*((each.samples, each.parameters) for each in dumps), other])
    assert wanted.astype(np.float32).tobytes() == after.parameters.tobytes()


def test_the_client_reads_and_writes_all_examples_of_the_wire_formats(place: Path) -> None:
    command = ["node", "--test", "--test-reporter=tap", "vectors.test.js"]
    done = subprocess.run(command, cwd=place, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    passed = re.search(r"^# pass (\d+)$", done.stdout, re.MULTILINE)
    examples = json.loads((ROOT / "protos" / "vectors.json").read_text())
    others = ("about", "protocol", "gradients", "secure")  # this client does not know secure aggregation
    of_clients = sum(len(each) for kind, each in examples.items() if kind not in others)
    assert passed is not None
    assert int(passed[1]) >= of_clients


@pytest.mark.slow
def test_each_model_is_the_previous_one_plus_the_mean_of_its_updates(
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
                dumps = [client.dumped(command.round) for client in (first, second)]
                assert_mean(before, after, dumps, other)
                buffers = mean(before.buffers, [(each.samples, each.buffers) for each in dumps])
                assert np.where(whole, np.rint(buffers), buffers).tobytes() == after.buffers.tobytes()
                for client, each in zip((first, second), dumps, strict=True):
                    assert each.encoding == encoding
                    assert each.carried.tobytes() == left.get(client.name, np.zeros(0, "<f4")).tobytes()
                    left[client.name] = each.left
                    if encoding not in ("fp32", "uniform"):  # those two leave no residual
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


def test_a_client_killed_during_an_upload_resumes_it(place: Path, server: Fleet, tmp_path: Path) -> None:
    with (
        Control(server.control) as control,
        StallingProxy(server.listen) as proxy,
        NodeClient(place, proxy.address, "node-1", tmp_path) as node,
        WireClient(server.listen, "wire") as wire,
    ):
        until_watching(control, 2)
        proxy.stall("up", after=700_000)
        run(control, model_args={"size": LARGE}, min_clients=2)
        command = wire.expect("train")
        before, _ = model(wire, command.model_version)
        assert proxy.stalled.wait(SECONDS)
        until(lambda: begun_uploads(server))
        node.kill()
        dumps = node.take_dump(command.round)
        proxy.resume()
        node.start()
        other = deliver(wire, command, LARGE)
        after, _ = model(wire, published_version(control, command.round))
        assert_mean(before, after, [dumps], other)
        assert not node.has_dumped(command.round)
        assert "continuing there" in node.log


def test_a_client_killed_before_it_hears_of_its_acceptance_loses_nothing(
    place: Path, server: Fleet, tmp_path: Path
) -> None:
    size = 10_000
    with (
        Control(server.control) as control,
        StallingProxy(server.listen) as proxy,
        NodeClient(place, proxy.address, "node-1", tmp_path) as node,
        WireClient(server.listen, "wire") as wire,
    ):
        until_watching(control, 2)
        proxy.stall("down", after=5_000)
        events = control.events()
        run(control, model_args={"size": size}, encoding="int8", rounds=2, min_clients=2)
        command = wire.expect("train")
        before, _ = model(wire, command.model_version)
        next(event for event in events if event.kind == "update_accepted" and event.client_id == node.name)
        assert proxy.stalled.is_set()
        assert "accepted" not in node.log
        node.kill()
        first = node.take_dump(command.round)
        proxy.resume()
        node.start()
        other = deliver(wire, command, size)
        command = wire.expect("train")
        after, _ = model(wire, command.model_version)
        assert_mean(before, after, [first], other)
        other = deliver(wire, command, size)
        last, _ = model(wire, published_version(control, command.round))
        second = node.dumped(command.round)
        assert_mean(after, last, [second], other)
        assert second.carried.tobytes() == first.left.tobytes()
        assert np.count_nonzero(first.left) > 0
        assert not node.has_dumped(command.round - 1)
        events.cancel()


@pytest.mark.parametrize("informed", [True, False], ids=["told of its acceptance", "not told"])
def test_a_client_whose_folder_was_reverted_sends_nothing_twice(
    place: Path, server: Fleet, tmp_path: Path, informed: bool
) -> None:
    with (
        Control(server.control) as control,
        StallingProxy(server.listen) as proxy,
        NodeClient(place, proxy.address, "node-1", tmp_path) as node,
    ):

        def round_() -> int:
            until_watching(control, 1)
            _, events = run(control, model_args={"size": 10_000}, encoding="int8")
            return next(event.round for event in events if event.kind == "update_accepted")

        def kill_client() -> None:
            events = control.events()
            node.kill()
            proxy.resume()
            next(event for event in events if event.kind == "client_lost")
            events.cancel()

        def until_recorded(round_: int) -> UpdateDump:
            until(lambda: node.dumped(round_).name in node.log)
            return node.dumped(round_)

        if not informed:
            until_watching(control, 1)
            proxy.stall("down", after=5_000)
        first = round_()
        if informed:
            until_recorded(first)
        kill_client()
        shutil.copytree(node.state, tmp_path / "copy")
        node.start()
        assert until_recorded(round_()).carried.tobytes() == node.dumped(first).left.tobytes()
        kill_client()
        shutil.rmtree(node.state)
        (tmp_path / "copy").rename(node.state)
        node.start()
        assert len(until_recorded(round_()).carried) == 0


def test_a_round_survives_its_server_and_no_client_trains_twice(place: Path, tmp_path: Path) -> None:
    with (
        Fleet(tmp_path / "fleet") as fleet,
        StallingProxy(fleet.listen) as proxy,
        NodeClient(place, fleet.listen, "node-1", tmp_path) as first,
        NodeClient(place, proxy.address, "node-2", tmp_path) as second,
    ):
        with Control(fleet.control) as control, WireClient(fleet.listen, "wire") as wire:
            until_watching(control, 3)
            proxy.stall("up", after=700_000)
            events = control.events()
            run(control, model_args={"size": LARGE}, min_clients=3)
            command = wire.expect("train")
            before, _ = model(wire, command.model_version)
            next(event for event in events if event.kind == "update_accepted" and event.client_id == first.name)
            assert proxy.stalled.wait(SECONDS)
            until(lambda: begun_uploads(fleet))
            dumps = [client.take_dump(command.round) for client in (first, second)]
            fleet.server.kill()
        proxy.resume()
        fleet.start_server()
        with Control(fleet.control) as control, WireClient(fleet.listen, "wire") as wire:
            other = deliver(wire, wire.expect("train"), LARGE)
            after, _ = model(wire, published_version(control, command.round))
            assert_mean(before, after, dumps, other)
            assert [client.has_dumped(command.round) for client in (first, second)] == [False, False]
            assert "continuing there" in second.log


def test_a_new_process_on_the_same_folder_takes_the_session_over(place: Path, server: Fleet, tmp_path: Path) -> None:
    older = NodeClient(place, server.listen, "node-1", tmp_path)
    older.start()
    until(lambda: "in session" in older.log)
    assert (older.state / "resume_secret").stat().st_mode & 0o777 == 0o600
    with NodeClient(place, server.listen, "node-1", tmp_path):
        assert older.wait() == 78
