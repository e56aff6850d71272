"""Jobs whose model is only partly shared, with real daemons: what goes over the wire, and what each client keeps."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fedring.control.failure import Failure
from fedring.train.names.offered import collect
from fedring.train.names.seam import build_model
from fedring.train.tensors.files import load_model
from fedring.v1 import control_pb2
from tests.damage import ask, write
from tests.fleets import Control, Fleet, run_job, until_watching
from tests.kept import kept_of
from tests.proxy import Proxy
from tests.system import user_models

HERE = {"PYTHONPATH": str(Path(__file__).parent)}
TRUSTED = {"trusted": ["fedring", "user_models"]}
CLIENTS = 2
WIDTH = 16
JOB: dict[str, Any] = {
    "model": "user_models:normed",
    "model_args": {"width": WIDTH},
    "encoding": "fp32",
    "rounds": 2,
    "min_clients": CLIENTS,
    "partition": "dirichlet",
    "deadline_seconds": 240,
}
PERSONAL: dict[str, Any] = JOB | {"private": ["norm.*", "second.*"], "start": "fresh"}
SHARED = 64 * WIDTH + WIDTH
_HEADER = 16  # bytes before the values of an fp32 packet


def built(name: str = "normed", **args: Any) -> nn.Module:
    """Build a model of user_models as the daemons do."""
    return build_model(f"{user_models.__name__}:{name}", args, 0, collect([user_models.__name__]))


class Tap:
    """Keeps a copy of everything that clients send."""

    def __init__(self) -> None:
        self.sent = bytearray()

    def upward(self, number: int) -> Callable[[bytes], bytes]:
        """Return what a proxy calls with the bytes of a connection."""

        def keep(data: bytes) -> bytes:
            self.sent += data
            return data

        return keep


class TappedFleet(Fleet):
    """A fleet whose clients reach the server through a proxy."""

    def start(self) -> None:
        """Start the server, the proxy and the clients."""
        self.tap = Tap()
        (self.directory / "logs").mkdir(parents=True)
        (self.directory / "state").mkdir()
        self.start_server()
        self._proxy = Proxy(self.listen, self.tap.upward)
        for client in self.clients:
            client.settings["server"] = self._proxy.address
            client.start()

    def stop(self) -> None:
        """Stop the daemons, and then the proxy."""
        super().stop()
        self._proxy.__exit__(None, None, None)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TappedFleet]:
    """Start one server and two clients for all tests of this file."""
    folder = tmp_path_factory.mktemp("sharing")
    with TappedFleet(folder, TRUSTED | {"keep_update_rounds": 50}, [TRUSTED] * CLIENTS, env=HERE) as fleet:
        with Control(fleet.control) as control:
            until_watching(control, CLIENTS)
        yield fleet


@pytest.fixture
def control(fleet: TappedFleet) -> Iterator[Control]:
    """Connect to the control service."""
    with Control(fleet.control) as control:
        yield control


def completed(control: Control, spec: dict[str, Any]) -> control_pb2.Job:
    """Run a job to its end."""
    job = run_job(control, spec)
    assert (job.state, job.reason) == ("completed", "")
    return job


def updates(fleet: Fleet, job: control_pb2.Job) -> list[bytes]:
    """Return the payloads of all updates of a job, which are small enough to be in their rows."""
    query = "SELECT payload FROM updates JOIN rounds USING (round) WHERE job_id = ? ORDER BY round, client_id"
    payloads = [row[0] for row in ask(Path(fleet.server.settings["state_dir"]), query, job.job_id)]
    assert all(isinstance(payload, bytes) for payload in payloads)
    return payloads  # type: ignore[return-value]  # checked above


def private(fleet: Fleet, index: int) -> dict[str, Tensor]:
    """Return the private tensors that a client keeps."""
    section = kept_of(Path(fleet.clients[index].settings["state_dir"]), "private")
    assert section is not None
    return dict(section.tensors)


def pieces(tensor: Tensor) -> list[bytes]:
    """Return the bytes of the first, middle and last eight values of a tensor, in the forms in which vectors travel."""
    flat = tensor.detach().flatten()
    starts = (0, flat.numel() // 2, max(0, flat.numel() - 8))
    return [flat[at : at + 8].numpy().astype(kind).tobytes() for at in starts for kind in ("<f4", "<f8", "<f2")]


def test_private_tensors_are_in_no_upload_and_differ_among_clients(fleet: TappedFleet, control: Control) -> None:
    begun = built(**PERSONAL["model_args"]).state_dict()
    job = completed(control, PERSONAL)
    payloads = updates(fleet, job)
    assert [len(payload) for payload in payloads] == [_HEADER + 4 * SHARED] * (PERSONAL["rounds"] * CLIENTS)
    assert all(payload[_HEADER : _HEADER + 32] in fleet.tap.sent for payload in payloads)
    ours = [private(fleet, index) for index in range(CLIENTS)]
    assert set(ours[0]) == {name for name in begun if not name.startswith("first.")}
    for name, first in begun.items():
        if name == "norm.num_batches_tracked":
            assert [int(kept[name]) for kept in ours] != [0, 0]
        elif name in ours[0]:
            assert not torch.equal(ours[0][name], ours[1][name])
            for kept in ours:
                for piece in (*pieces(kept[name]), *pieces(kept[name] - first)):
                    assert len(piece) < 16 or piece not in fleet.tap.sent


def test_a_job_that_starts_fresh_begins_with_the_first_private_tensors(fleet: TappedFleet, control: Control) -> None:
    ends = []
    for _ in range(2):  # in the same processes, which keep the model loaded
        completed(control, PERSONAL)
        ends.append((control.models(limit=1)[0].digest, private(fleet, 0)["second.bias"].tolist()))
    assert ends[0] == ends[1]


def test_clients_evaluate_with_their_own_tensors_and_the_server_with_the_first_ones(control: Control) -> None:
    job = completed(control, PERSONAL | {"rounds": 4, "evaluate_on_server": True, "partition": "iid"})
    last = control.rounds(job_id=job.job_id)[0]
    figures = {name: last.metrics[name] for name in ("eval/accuracy", "server/accuracy")}
    assert figures["eval/accuracy"] > 0.7
    assert 0 < figures["server/accuracy"] < figures["eval/accuracy"] - 0.1  # with a head that nobody has trained


def test_an_exported_model_holds_what_is_shared_and_fills_the_whole_model(
    control: Control, tmp_path: Path, fleet: TappedFleet
) -> None:
    job = completed(control, PERSONAL)
    control.export_model(0, tmp_path / "shared.safetensors")
    stored = load_file(tmp_path / "shared.safetensors")
    assert set(stored) == {"first.weight", "first.bias"}
    model = built(**PERSONAL["model_args"])
    load_model(tmp_path / "shared.safetensors", model, partial=True)
    assert torch.equal(model.state_dict()["first.weight"], stored["first.weight"])
    again = completed(control, PERSONAL | {"start": "newest"})
    assert control.rounds(job_id=again.job_id)[-1].base_version == control.rounds(job_id=job.job_id)[0].model_version


@pytest.mark.parametrize(("encoding", "most"), [("fp32", _HEADER + 4 * 650), ("uniform", 700)])
def test_a_frozen_base_is_never_sent(fleet: TappedFleet, control: Control, encoding: str, most: int) -> None:
    job = completed(control, {**JOB, "model": "user_models:frozen_body", "model_args": {}, "encoding": encoding})
    sizes = {len(payload) for payload in updates(fleet, job)}
    assert max(sizes) <= most
    assert control.models(limit=1)[0].parameters == 650  # the layer that is trained: 64 x 10 + 10
    base = built("frozen_body").state_dict()["1.weight"]
    assert not any(piece in fleet.tap.sent for piece in pieces(base))
    downloads = [client.download_bytes for client in control.rounds(job_id=job.job_id)[0].clients]
    assert max(downloads) < 4 * base.numel()


def test_frozen_tensors_travel_if_the_job_says_so(fleet: TappedFleet, control: Control) -> None:
    job = completed(
        control, {**JOB, "model": "user_models:frozen_body", "model_args": {}, "send_frozen": True, "rounds": 1}
    )
    assert {len(payload) for payload in updates(fleet, job)} == {_HEADER + 4 * (650 + 64 * 64 + 64)}


def test_clients_with_another_base_are_told_so_and_the_model_stays(control: Control) -> None:
    spec = {**JOB, "model": "user_models:own_base", "model_args": {}, "max_abandoned": 1}
    events = control.events()
    job_id = control.start_job(spec).job_id
    told = [event.text for event in control.follow_job(job_id, events) if event.kind == "client_failed"]
    assert control.job(job_id).state == "failed"
    assert len(told) == CLIENTS
    assert "wrong_base: the 1 frozen tensors of this model have other values than on the server" in told[0]
    completed(control, PERSONAL | {"rounds": 1})


def test_a_job_does_not_go_on_from_a_model_that_was_trained_on_another_base(
    fleet: TappedFleet, control: Control
) -> None:
    """A model of a server before this check says nothing of its base, and a job goes on from it."""
    spec = {**JOB, "model": "user_models:based", "rounds": 1, "start": "newest"}
    here, there = ({**spec, "model_args": {"value": value}} for value in (1.0, 2.0))
    first = completed(control, {**here, "start": "fresh"})
    again = completed(control, here)
    version = again.start_version + 1
    assert again.start_version == first.start_version + 1
    for start in ("newest", version):
        with pytest.raises(Failure, match=rf"start: version {version} was trained with other values of the 1 frozen"):
            control.start_job({**there, "start": start})
    blocking = control.start_job({**here, "min_clients": 99}).job_id
    waiting = control.start_job(there).job_id
    control.stop_job(blocking)
    list(control.follow_job(waiting))
    job = control.job(waiting)
    assert (job.state, job.rounds_done) == ("failed", 0)
    assert f"version {version} was trained with other values" in job.reason
    assert completed(control, {**there, "start": "fresh"}).start_version == version + 1
    write(Path(fleet.server.settings["state_dir"]), "UPDATE models SET frozen_digest = ''")
    for _ in range(2):
        assert completed(control, here).start_version > version + 1
    with pytest.raises(Failure, match="was trained with other values"):  # the last one says what it was trained on
        control.start_job(there)


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"private": ["*.bn*"]}, r"private: '\*\.bn\*' matches no tensor of the model: it has first\.weight"),
        ({"shared": ["norm.running_*"]}, "shared: shared and private leave no parameter of the model to share"),
        ({"shared": []}, "shared"),
        ({"private": ["norm.*"], "mode": "data_parallel", "encoding": "uniform"}, "leave them out of a data_parallel"),
    ],
)
def test_a_job_that_cannot_share_is_refused_when_it_is_queued(
    control: Control, keys: dict[str, Any], text: str
) -> None:
    with pytest.raises(Failure, match=text):
        control.start_job(JOB | keys)
