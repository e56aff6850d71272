"""The client halves of algorithms that jobs name: which there are, what they ask for, and their formulas."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from fedring.client import connect
from fedring.client.client_round import ClientRound
from fedring.client.transfer.kept import Section, Sections
from fedring.client.transfer.update import TrainingReport
from fedring.client.transforms.chosen import begin_transforms, known, unknown_in
from fedring.client.transforms.interface import RoundStart, Transform, by_parameter
from fedring.codec import CodecError, decode
from fedring.codec.schema import Entry, Schema, Vectors
from fedring.train.plan import Plan
from fedring.train.tensors.download import HeldModel
from fedring.v1 import federation_pb2 as pb

if TYPE_CHECKING:
    from tests.scripted_server import ScriptedServer

SIZE = 6
SCHEMA = Schema((Entry("w", (2, 3), "float32", "parameter"), Entry("n", (2,), "float32", "buffer")))
ALPHA = 0.25
Float32 = NDArray[np.float32]


def command(*named: dict[str, Any], job_id: int = 1, encoding: str = "fp32") -> pb.TrainCmd:
    """Return the command of a round whose job names these transforms."""
    job = pb.JobSpec(job_id=job_id, transforms=json.dumps(named) if named else "")
    encoded = pb.Encoding(name=encoding)
    return pb.TrainCmd(run_id="run", round=1, job=job, schema_hash=SCHEMA.hash, encoding=encoded)


def begun(asked: pb.TrainCmd, kept: Sections, base: Float32 | None = None) -> ClientRound:
    """Return a round that has begun."""
    held = HeldModel("", SCHEMA, Vectors(np.zeros(SIZE, np.float32) if base is None else base, np.zeros(2)))
    transforms = begin_transforms(RoundStart(asked, held, lambda digest: np.zeros(SIZE, np.float32)), kept)
    return ClientRound(asked, "alice", held, kept, None, tuple(transforms))


def feddyn(**keys: Any) -> dict[str, Any]:
    return {"name": "feddyn", "args": {"alpha": ALPHA, "clients": 10} | keys}


def test_feddyn_follows_its_formulas_over_rounds() -> None:
    rng = np.random.default_rng(3)
    linear, kept = np.zeros(SIZE, np.float32), dict[str, Section]()
    for _ in range(4):
        base, delta = rng.standard_normal((2, SIZE)).astype(np.float32)
        round_ = begun(command(feddyn()), kept, base)
        assert round_.plan(Plan(mu=0.0)).mu == ALPHA  # the term (alpha / 2) |theta - theta_0|^2
        corrections = round_.corrections()
        assert corrections is not None
        np.testing.assert_array_equal(corrections["w"].numpy(), -linear.reshape(2, 3))
        answer = round_.trained(Vectors(base + delta, np.zeros(2)), TrainingReport(5))
        payload = b"".join(answer.update.parts)
        size = pb.UpdateHeader.FromString(answer.update.offer.header).packets[0].bytes
        linear = (linear - ALPHA * decode(payload[:size], name="fp32", length=SIZE)).astype(np.float32)
        np.testing.assert_allclose(answer.kept["feddyn"].tensors["values"].numpy(), linear)
        kept = dict(answer.kept)


def test_feddyn_counts_what_the_server_decodes() -> None:
    values = np.linspace(-1, 1, SIZE, dtype=np.float32)
    answer = begun(command(feddyn(), encoding="int8"), {}).trained(
        Vectors(values.copy(), np.zeros(2)), TrainingReport(5)
    )
    size = pb.UpdateHeader.FromString(answer.update.offer.header).packets[0].bytes
    decoded = decode(b"".join(answer.update.parts)[:size], name="int8", length=SIZE)
    assert not np.array_equal(decoded, values)
    np.testing.assert_allclose(answer.kept["feddyn"].tensors["values"].numpy(), -ALPHA * decoded, rtol=1e-6)
    assert "residual" in answer.kept  # what the encoding has left out is no part of it


def test_feddyn_begins_anew_with_another_job() -> None:
    first = begun(command(feddyn()), {}).trained(Vectors(np.ones(SIZE, np.float32), np.zeros(2)), TrainingReport(5))
    for job_id, value in ((1, ALPHA), (2, 0.0)):
        corrections = begun(command(feddyn(), job_id=job_id), first.kept).corrections()
        assert corrections is not None
        assert torch.equal(corrections["w"], torch.full((2, 3), value))


def test_a_linear_term_that_is_too_large_fails_the_round() -> None:
    large = Section({"values": torch.full((SIZE,), -3e38)}, {"run": "run", "job": "1"})
    round_ = begun(command(feddyn(alpha=1e9)), {"feddyn": large})
    with pytest.raises(CodecError, match="FedDyn") as error:
        round_.trained(Vectors(np.full(SIZE, 1e30, np.float32), np.zeros(2)), TrainingReport(5))
    assert error.value.reason == "non_finite"


class Twice(Transform):
    """Adds 2 to each gradient, and keeps nothing."""

    name = "twice"

    def __init__(self, start: RoundStart, kept: Section | None, args: object) -> None:
        self._schema = start.schema

    def corrections(self) -> dict[str, torch.Tensor]:
        return by_parameter(np.full(SIZE, 2, np.float32), self._schema)


def test_corrections_of_several_transforms_are_added_up() -> None:
    first = begun(command(feddyn()), {}).trained(Vectors(np.ones(SIZE, np.float32), np.zeros(2)), TrainingReport(5))
    round_ = begun(command(feddyn()), first.kept)
    start = RoundStart(round_.command, round_.start, lambda digest: np.zeros(SIZE, np.float32))
    both = ClientRound(round_.command, "alice", round_.start, transforms=(*round_.transforms, Twice(start, None, {})))
    corrections = both.corrections()
    assert corrections is not None
    assert torch.equal(corrections["w"], torch.full((2, 3), 2 + ALPHA))
    assert begun(command(), {}).corrections() is None


def test_what_other_parts_keep_stays() -> None:
    other = Section({"weight": torch.ones(2)}, {"line": "1"})
    kept = {"private": other, "feddyn": Section({"values": torch.ones(SIZE)}, {"run": "run", "job": "1"})}
    for asked in (command(), command(feddyn())):
        values = Vectors(np.ones(SIZE, np.float32), np.zeros(2))
        assert begun(asked, kept).trained(values, TrainingReport(5)).kept["private"] is other
        assert begun(asked, kept).nothing(None, 5).kept["feddyn"] is kept["feddyn"]


def test_each_transform_has_the_name_of_its_module() -> None:
    assert set(known()) >= {"feddyn"}
    assert all(kind.__module__ == f"fedring.client.transforms.named.{name}" for name, kind in known().items())


@pytest.mark.parametrize(
    ("transforms", "sentence"),
    [
        ("", ""),
        ('[{"name": "feddyn", "args": {}}]', ""),
        ('[{"name": "feddyn", "args": {}}, {"name": "feddyn", "args": {}}]', "names the transform feddyn twice"),
        ('[{"name": "fednext", "args": {}}]', "no transform 'fednext', but feddyn"),
        ('[{"name": "os.system", "args": {}}]', "no transform 'os.system'"),
        ('[{"name": "scaffold", "args": {}}]', "no transform 'scaffold'"),
        ("[{}]", "does not understand"),
        ('[{"name": "", "args": {}}]', "does not understand"),
        ("{", "does not understand"),
        ("[1]", "does not understand"),
        ("7", "does not understand"),
    ],
)
def test_a_client_says_which_transforms_it_does_not_know(transforms: str, sentence: str) -> None:
    found = unknown_in(pb.JobSpec(transforms=transforms))
    assert (sentence in found) if sentence else not found


def test_a_job_with_an_unknown_transform_is_refused_and_the_next_one_trained(
    server: "ScriptedServer", settings: dict[str, Any]
) -> None:
    model = nn.Linear(2, 1)
    with connect(**settings) as federation, ThreadPoolExecutor(1) as executor:
        server.joins.get(timeout=60)
        task = executor.submit(next, federation)
        job = pb.JobSpec(mode="federated", transforms='[{"name": "fednext", "args": {}}]')
        server.train(server.command(model, job=job))
        failure = server.failures.get(timeout=60)
        server.train(server.command(model, round_=2))
        assert task.result(60).round == 2
    assert (failure.round, failure.reason) == (1, "unknown_transform")
