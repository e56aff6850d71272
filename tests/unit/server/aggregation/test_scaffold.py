"""SCAFFOLD: what control variates are, how the server keeps them equal to the clients', and what is refused."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from tests.closed_rounds import closed_round
from torch import nn
from torch.utils.data import TensorDataset

from fedring.client import UpdateRefused, connect
from fedring.client.transfer.kept import Section
from fedring.client.transfer.update import TrainingReport, Update, make_update
from fedring.client.transforms.interface import RoundStart, Sent
from fedring.client.transforms.scaffold import Scaffold
from fedring.codec import Entry, Schema, Vectors
from fedring.codec.digest import name_of
from fedring.daemon.config import explain
from fedring.rpc.errors import BadUpdate
from fedring.server.aggregation.aggregate import AggregationPlan, NewModel, aggregate, store_model
from fedring.server.aggregation.contributions import Contribution
from fedring.server.aggregation.modelfile import ModelReader
from fedring.server.aggregation.steps import BaseFiles
from fedring.server.aggregation.terms import Terms
from fedring.server.aggregation.versions import ModelVersions
from fedring.server.model.control import ControlPlan, counted_in, plan_control
from fedring.server.model.transforms.scaffold import NextControl
from fedring.server.state.blobs import FileBlobs
from fedring.server.state.rows import UpdateRow
from fedring.server.update.admission import open_offer
from fedring.simulation.worker import admit
from fedring.train.jobs.job import Job
from fedring.train.loop import train
from fedring.train.optimizers import sgd
from fedring.train.plan import Plan
from fedring.train.scaffold import local_steps, next_own
from fedring.train.tensors.download import HeldModel
from fedring.v1 import federation_pb2 as pb

if TYPE_CHECKING:
    from tests.scripted_server import ScriptedServer

SIZE = 6
SCHEMA = Schema((Entry("w", (SIZE,), "float32", "parameter"), Entry("b", (2,), "float32", "buffer")))
NEEDED: dict[str, Any] = {"scaffold": True, "momentum": 0.0, "weights": "uniform"}
LINE = "0.1"


def job(**keys: Any) -> Job:
    return Job.model_validate(NEEDED | keys)


def own_of(value: float, **words: str) -> Section:
    """Return a client's control variate."""
    known = {"run": "run", "line": LINE, "left_by": "blake3-a"}
    return Section({"values": torch.full((SIZE,), value)}, known | words)


def scaffold(own: Section | None, control: NDArray[np.float32]) -> Scaffold:
    """Return the client half of SCAFFOLD in a round."""
    command = pb.TrainCmd(run_id="run", control=pb.Control(line=LINE, digest="c"))
    base = HeldModel("", SCHEMA, Vectors(np.zeros(SIZE, np.float32), np.zeros(2)))
    return Scaffold(RoundStart(command, base, lambda digest: control), own, {})


def update_of(
    client: str,
    delta: NDArray[np.float32],
    *,
    own: Section | None = None,
    control: NDArray[np.float32] | None = None,
    samples: int = 10,
    **fields: Any,
) -> tuple[UpdateRow, Section]:
    """Return a client's update as the server accepts it, and the control variate that it leaves."""
    command = pb.TrainCmd(
        round=1, epochs=2, batch_size=4, lr=0.5, encoding=pb.Encoding(name="int8"), schema_hash=SCHEMA.hash, **fields
    )
    base = HeldModel("", SCHEMA, Vectors(np.zeros(SIZE, np.float32), np.zeros(2)))
    values = np.zeros(SIZE, np.float32) if control is None else control
    command.control.CopyFrom(pb.Control(line=LINE, digest="c"))
    half = Scaffold(RoundStart(command, base, lambda digest: values), own, {})
    trained, report = Vectors(delta.copy(), np.ones(2)), TrainingReport(samples)
    update: Update = make_update(command, client, base, trained, report, None, describe=half.describe)
    row = admit(
        client, open_offer(update.offer), b"".join(update.parts), Terms("", 10_000, SCHEMA, control_line=LINE), epoch=0
    )
    return row, half.after(Sent(update, samples, SCHEMA))


def make(
    blobs: FileBlobs, base: NewModel, rows: list[UpdateRow], before: NewModel | None
) -> tuple[NewModel, ControlPlan]:
    """Make the model that a round publishes, with its control variate."""
    row = base.row(SCHEMA, version=1, number=0)
    if before:
        row = replace(row, control_blob=before.columns["control_blob"], control_line=before.columns["control_line"])
    closed = closed_round(job(epochs=2, batch_size=4, lr=0.5), rows)
    closed.command.control.line = LINE
    step = NextControl(closed)
    sent = [Contribution(row.client_id, 1.0, row.packets, _reader(row.payload)) for row in rows]
    with ThreadPoolExecutor(2) as executor, ExitStack() as stack:
        step.read(row, BaseFiles(blobs, ModelVersions(blobs), row, stack))
        assert step.plan is not None
        model = ModelReader(blobs.reader(base.blob))
        return aggregate(model, sent, blobs, executor, AggregationPlan(steps=[step])), step.plan


def _reader(payload: bytes) -> Any:
    return lambda offset, size: payload[offset : offset + size]


def test_a_clients_control_variate_is_the_mean_gradient_of_its_steps() -> None:
    """Along the way that the built-in loop takes with the correction c - c_i."""
    torch.manual_seed(0)
    model, inputs = nn.Linear(SIZE, 1, bias=False), torch.randn(12, SIZE)
    samples = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    control, own = (torch.randn(1, SIZE) for _ in range(2))
    gradients: list[torch.Tensor] = []
    hook: Any = model.weight.register_hook  # torch leaves it untyped
    hook(lambda gradient: gradients.append(gradient.clone()))
    before = model.weight.detach().clone()
    plan = Plan(epochs=3, batch_size=5, lr=0.1, momentum=0.0)
    train(
        model, samples, plan, loss=nn.functional.mse_loss, optimizer_factory=sgd, device=torch.device("cpu"),
        corrections={"weight": control - own},
    )  # fmt: skip
    delta = (model.weight.detach() - before).numpy().reshape(-1)
    assert local_steps(12, epochs=3, batch_size=5) == len(gradients) == 9
    after = next_own(own.numpy()[0], control.numpy()[0], delta, steps=9, lr=0.1)
    np.testing.assert_allclose(after, torch.stack(gradients).mean(0).numpy()[0], atol=1e-5)


def test_the_servers_control_variate_is_the_mean_of_the_clients_whenever_they_join_and_take_part(
    tmp_path: Path,
) -> None:
    rng = np.random.default_rng(0)
    blobs = FileBlobs(tmp_path)
    base = store_model(SCHEMA, Vectors(np.zeros(SIZE, np.float32), np.zeros(2)), blobs, {})
    owns: dict[str, Section] = {}
    newest: NewModel | None = None
    control = np.zeros(SIZE, np.float32)
    for clients in ("ab", "ac", "bcd", "d", "abcde"):
        made = {
            client: update_of(
                client, rng.standard_normal(SIZE, np.float32), own=owns.get(client), control=control,
                samples=int(rng.integers(1, 30)),
            )
            for client in clients
        }  # fmt: skip
        newest, plan = make(blobs, base, [row for row, _ in made.values()], newest)
        owns |= {client: own for client, (_, own) in made.items()}
        file = ModelReader(blobs.reader(newest.columns["control_blob"]))
        control = file.vectors().parameters
        mean = np.mean([own.tensors["values"].numpy() for own in owns.values()], axis=0)
        np.testing.assert_allclose(control, mean, atol=1e-5)
        assert newest.columns["control_digest"] == Vectors(control, np.empty(0)).digest()
        assert counted_in(file) == plan.counted == {client: own.words["left_by"] for client, own in owns.items()}
    blobs.close()


def test_a_client_without_a_control_variate_is_not_corrected_at_first() -> None:
    control = np.ones(SIZE, np.float32)
    assert scaffold(None, control).corrections() == {}
    assert torch.equal(scaffold(own_of(3.0), control).corrections()["w"], torch.full((SIZE,), -2.0))


def test_an_update_that_relies_on_another_control_variate_than_the_counted_one_is_noticed(tmp_path: Path) -> None:
    blobs, ones = FileBlobs(tmp_path), np.ones(SIZE, np.float32)
    base = store_model(SCHEMA, Vectors(np.zeros(SIZE, np.float32), np.zeros(2)), blobs, {})
    (first, own), (other, _) = update_of("a", ones), update_of("b", ones)
    newest, _ = make(blobs, base, [first, other], None)
    before = ModelReader(blobs.reader(newest.columns["control_blob"]))
    stale = Section(own.tensors, {**own.words, "left_by": name_of(b"an update that did not count")})
    rows = [
        update_of("a", ones, own=stale)[0],  # put back, or of an abandoned round
        update_of("b", ones)[0],  # lost
        update_of("c", ones)[0],  # new
    ]
    assert plan_control(job(), 1, rows, before) == ["a", "b"]
    assert plan_control(job(), 1, [update_of("c", ones, own=stale)[0]], None) == ["c"]
    assert isinstance(plan_control(job(), 1, [update_of("a", ones, own=own)[0]], before), ControlPlan)
    blobs.close()


@pytest.mark.parametrize(
    ("sent", "wanted", "sentence"),
    [
        (None, LINE, "without the correction of scaffold = true: update this client"),
        (pb.UsedControl(line="0.9"), LINE, "of the line '0.9', and not of '0.1'"),
        (pb.UsedControl(line=LINE), "", "a correction that the job does not ask for"),
        (pb.UsedControl(line=LINE, previous="x" * 5000), LINE, "which names no update"),
    ],
)
def test_an_update_that_was_not_corrected_as_the_round_asks_is_refused(
    sent: pb.UsedControl | None, wanted: str, sentence: str
) -> None:
    base = HeldModel("", SCHEMA, Vectors(np.zeros(SIZE, np.float32), np.zeros(2)))
    command = pb.TrainCmd(round=1, encoding=pb.Encoding(name="fp32"), schema_hash=SCHEMA.hash)
    trained = Vectors(np.ones(SIZE, np.float32), np.zeros(2))

    def describe(header: pb.UpdateHeader) -> None:
        if sent is not None:
            header.control.CopyFrom(sent)

    update = make_update(command, "a", base, trained, TrainingReport(1), None, describe=describe)
    with pytest.raises(BadUpdate, match=sentence) as refused:
        admit(
            "a",
            open_offer(update.offer),
            b"".join(update.parts),
            Terms("", 10_000, SCHEMA, control_line=wanted),
            epoch=0,
        )
    assert refused.value.reason == "wrong_control"
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"momentum": 0.9}, "needs momentum = 0.0, and it is 0.9"),
        ({"optimizer_args": {"nesterov": True}}, "needs optimizer_args.nesterov = false, and it is true"),
        ({"optimizer": "fedring.train.optimizers:adam"}, 'needs optimizer = "fedring.train.optimizers:sgd", and it is'),
        ({"trainer": "code:train"}, 'needs trainer = "", and it is "code:train"'),
        ({"weights": "samples"}, 'needs weights = "uniform", and it is "samples"'),
        ({"mu": 0.1}, "needs mu = 0.0, and it is 0.1"),
        ({"update_clip": 1.0}, "needs update_clip = 0.0, and it is 1.0"),
        ({"update_clip_factor": 2.0}, "needs update_clip_factor = 0.0, and it is 2.0"),
        ({"normalize_steps": True}, "needs normalize_steps = false, and it is true"),
        ({"aggregation": {"rule": "median"}}, 'needs aggregation.rule = "mean", and it is "median"'),
        ({"mode": "data_parallel"}, 'needs mode = "federated", and it is "data_parallel"'),
    ],
)
def test_a_job_that_cannot_be_corrected_is_refused(keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError) as refused:
        job(**keys)
    assert f"scaffold = true {sentence}" in explain(refused.value, {}, Job)


@pytest.mark.parametrize(
    ("words", "used"),
    [({}, True), ({"run": "another"}, False), ({"line": "0.2"}, False)],
    ids=["its own", "another run", "another line"],
)
def test_a_control_variate_belongs_to_a_run_and_a_line(words: dict[str, str], used: bool) -> None:
    half = scaffold(own_of(3.0, **words), np.ones(SIZE, np.float32))
    assert bool(half.corrections()) == used
    header = pb.UpdateHeader()
    half.describe(header)
    assert header.control == pb.UsedControl(line=LINE, previous="blake3-a" if used else "")


def test_a_training_that_ignores_the_corrections_cannot_be_submitted(
    server: "ScriptedServer", settings: dict[str, Any]
) -> None:
    model = nn.Linear(2, 1)
    with connect(**settings) as federation:
        server.joins.get(timeout=60)
        server.train(server.command(model, control=pb.Control(line=LINE)))
        task = next(federation)
        task.load_into(model)
        with pytest.raises(UpdateRefused, match="has not used the task's corrections"):
            task.submit(model, samples=1)
        server.train(server.command(model, round_=2, control=pb.Control(line=LINE)))
        task = next(federation)
        task.load_into(model)
        assert task.corrections == {}
        task.submit(model, samples=1)
