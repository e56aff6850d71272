"""Private and frozen tensors of a client: kept with the update that counts, never sent, and checked."""

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fedring.client import UpdateRefused, WrongModel, connect
from fedring.codec import decode
from fedring.train.plan import Plan
from fedring.train.tensors.arrays import as_module
from fedring.train.tensors.sharing import Sharing
from fedring.train.tensors.state import frozen_digest, read_tensors, read_vectors, split
from fedring.train.user_trainer import run_trainer
from fedring.v1 import federation_pb2 as pb

if TYPE_CHECKING:
    from tests.scripted_server import ScriptedServer

SECONDS = 60.0
PRIVATE = ("bn.*", "head.*")


class Personal(nn.Module):
    """A shared body, and a normalisation and a head that each client has of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 5)
        self.bn = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 2)


@pytest.fixture
def model() -> Personal:
    torch.manual_seed(0)
    return Personal()


def job(**fields: Any) -> pb.JobSpec:
    """Return a job whose head and normalisation are private."""
    given: dict[str, Any] = {"mode": "federated", "rounds": 9, "shared": ["*"], "private": PRIVATE}
    return pb.JobSpec(**given | fields)


def command(server: "ScriptedServer", model: nn.Module, round_: int, **fields: Any) -> pb.TrainCmd:
    """Return a command of such a job."""
    names = split(model, Sharing(private=PRIVATE)).shared.names
    return server.command(model, round_=round_, names=names, **{"job": job(), **fields})


def add(model: nn.Module, value: float) -> None:
    """Train all tensors of a model in a way that a test can check."""
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(value if tensor.is_floating_point() else 1)


def private(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the private tensors of a model."""
    return read_tensors(model, split(model, Sharing(private=PRIVATE)).private.names)


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    """Return whether two sets of tensors have the same names and the same bits."""
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_only_shared_tensors_are_sent_and_private_ones_come_back_in_another_process(
    server: "ScriptedServer", settings: dict[str, Any], model: Personal
) -> None:
    mine, start = Personal(), read_vectors(model)
    first = private(mine)
    with connect(**settings) as federation:
        server.joins.get(timeout=SECONDS)
        server.train(command(server, model, 1))
        task = next(federation)
        task.load_into(mine)
        assert equal(private(mine), first)
        assert torch.equal(mine.body.weight, model.body.weight)
        add(mine, 0.5)
        task.submit(mine, samples=1)
    trained = private(mine)
    header, payload = server.accepted.get_nowait()
    assert [packet.vector for packet in header.packets] == [pb.VECTOR_PARAMETERS]
    sent = decode(payload, name="fp32", length=35)
    np.testing.assert_allclose(sent, np.full(35, 0.5, np.float32), rtol=1e-6)
    assert start.buffers.size == 11  # of which none was sent
    other = Personal()
    with connect(**settings) as federation:
        server.joins.get(timeout=SECONDS)
        server.train(command(server, model, 2))
        next(federation).load_into(other)
    assert equal(private(other), trained)


def test_private_tensors_of_an_update_that_does_not_count_are_forgotten(
    server: "ScriptedServer", settings: dict[str, Any], model: Personal
) -> None:
    mine = Personal()
    first = private(mine)
    with connect(**settings) as federation:
        server.joins.get(timeout=SECONDS)
        for round_, value in ((1, float("nan")), (2, 1.0)):
            server.train(command(server, model, round_))
            task = next(federation)
            task.load_into(mine)
            assert equal(private(mine), first)
            with torch.no_grad():
                mine.head.bias.fill_(value)
            if round_ == 1:
                with pytest.raises(UpdateRefused):
                    task.submit(mine, samples=1)
            else:
                task.submit(mine, samples=1)
        assert server.failures.get(timeout=SECONDS).reason == "non_finite"
        server.train(command(server, model, 3))
        next(federation).load_into(mine)
        assert mine.head.bias.tolist() == [1.0, 1.0]


def test_a_job_that_continues_no_earlier_model_begins_with_the_model_s_own_values(
    server: "ScriptedServer", settings: dict[str, Any], model: Personal
) -> None:
    mine, fresh = Personal(), Personal()
    begun = private(fresh)
    with connect(**settings) as federation:
        server.joins.get(timeout=SECONDS)
        server.train(command(server, model, 1))
        task = next(federation)
        task.load_into(mine)
        add(mine, 1.0)
        task.submit(mine, samples=1)
        server.train(command(server, model, 2, residual_after=1))
        next(federation).load_into(fresh)
    assert equal(private(fresh), begun)


def test_a_model_that_is_used_for_several_jobs_begins_each_with_its_own_first_values(
    server: "ScriptedServer", settings: dict[str, Any], model: Personal
) -> None:
    mine = Personal()
    first = private(mine)
    with connect(**settings) as federation:
        server.joins.get(timeout=SECONDS)
        for round_, after, begun in ((1, 0, True), (2, 0, False), (3, 2, True)):
            server.train(command(server, model, round_, residual_after=after))
            task = next(federation)
            task.load_into(mine)
            assert equal(private(mine), first) is begun
            add(mine, 1.0)
            task.submit(mine, samples=1)


def test_arrays_that_are_private_begin_each_job_with_their_first_values(
    server: "ScriptedServer", settings: dict[str, Any]
) -> None:
    arrays = {"coef": np.zeros((2, 3)), "own": np.full(2, 7.0)}
    with connect(**settings) as federation:
        server.joins.get(timeout=SECONDS)
        for round_, after in ((1, 0), (2, 1)):
            wanted = job(private=["own"])
            server.train(
                server.command(as_module(arrays), round_=round_, names=["coef"], job=wanted, residual_after=after)
            )
            task = next(federation)
            task.load_into(arrays)
            assert arrays["own"].tolist() == [7.0, 7.0]
            arrays["own"] += 1
            task.submit(arrays, samples=1)


def test_a_published_model_is_evaluated_with_the_client_s_own_tensors(
    server: "ScriptedServer", settings: dict[str, Any], model: Personal
) -> None:
    mine, other, seen = Personal(), Personal(), []

    def evaluate(module: nn.Module) -> tuple[int, int, float]:
        seen.append(private(module))
        return 1, 1, 0.0

    with connect(**settings, model=other, evaluate=evaluate) as federation:
        server.joins.get(timeout=SECONDS)
        server.train(command(server, model, 1))
        task = next(federation)
        task.load_into(mine)
        add(mine, 1.0)
        task.submit(mine, samples=1)
        server.send(pb.ServerEvent(evaluate=server.evaluation(1, job=job(), run_id=server.run_id)))
        server.train(command(server, model, 2))
        next(federation)
    assert len(seen) == 1
    assert equal(seen[0], private(mine))


def test_a_client_that_keeps_more_to_itself_than_the_job_sends_nothing(
    server: "ScriptedServer", settings: dict[str, Any], model: Personal
) -> None:
    with connect(**settings, private=["body.bias"]) as federation:
        server.joins.get(timeout=SECONDS)
        server.train(command(server, model, 1))
        with pytest.raises(WrongModel, match=r"without body\.bias"):
            next(federation).load_into(Personal())
        assert server.failures.get(timeout=SECONDS).reason == "wrong_schema"
        server.train(command(server, model, 2, job=job(mode="data_parallel")))
        server.train(command(server, model, 3))
        assert next(federation).round == 3
    assert server.accepted.empty()


@pytest.mark.parametrize(
    ("glob", "text"),
    [
        ("haed.*", r"private: 'haed\.\*' of this client matches no tensor of the model: it has body\.weight"),
        (
            "twin.*",
            r"private: 'twin\.\*' of this client matches twin\.weight, which is the same tensor as body\.weight",
        ),
    ],
)
def test_a_client_s_own_glob_that_would_keep_nothing_back_is_refused(
    server: "ScriptedServer", settings: dict[str, Any], model: Personal, glob: str, text: str
) -> None:
    for each in (model, mine := Personal()):
        each.twin = nn.Linear(6, 5, bias=False)
        each.twin.weight = each.body.weight
    with connect(**settings, private=[glob]) as federation:
        server.joins.get(timeout=SECONDS)
        server.train(command(server, model, 1))
        with pytest.raises(WrongModel, match=text):
            next(federation).load_into(mine)
        assert server.failures.get(timeout=SECONDS).reason == "private_tensors"
    assert server.accepted.empty()


def test_a_client_that_knows_nothing_of_private_tensors_refuses_such_a_job(
    server: "ScriptedServer", settings: dict[str, Any], model: Personal
) -> None:
    with connect(**settings) as federation:
        server.joins.get(timeout=SECONDS)
        server.train(command(server, model, 1, job=pb.JobSpec(mode="federated", rounds=9)))  # it reads no more of it
        with pytest.raises(WrongModel, match=r"with bn\.weight"):
            next(federation).load_into(Personal())


@pytest.mark.parametrize("same", [True, False])
def test_frozen_tensors_are_compared_with_the_server_s(
    server: "ScriptedServer", settings: dict[str, Any], model: Personal, same: bool
) -> None:
    model.body.requires_grad_(False)
    mine = Personal()
    mine.body.requires_grad_(False)
    if same:
        mine.body.load_state_dict(model.body.state_dict())
    parts = split(model, Sharing(frozen_stay=True))
    wanted = job(private=[], frozen_digest=frozen_digest(model, parts.frozen))
    with connect(**settings) as federation:
        server.joins.get(timeout=SECONDS)
        server.train(server.command(model, round_=1, names=parts.shared.names, job=wanted))
        task = next(federation)
        if not same:
            with pytest.raises(WrongModel, match="the 2 frozen tensors of this model have other values than on the"):
                task.load_into(mine)
            assert server.failures.get(timeout=SECONDS).reason == "wrong_base"
            return
        task.load_into(mine)
        mine.requires_grad_(True)  # What counts was decided when the model was loaded.
        task.submit(mine, samples=1)
    header, payload = server.accepted.get_nowait()
    assert header.packets[0].bytes == len(payload) - header.packets[1].bytes
    assert decode(payload[: header.packets[0].bytes], name="fp32", length=22).size == 22  # bn and head, not the body


def test_what_a_trainer_freezes_is_free_again_after_it(model: Personal) -> None:
    model.bn.weight.requires_grad_(False)

    def trainer(module: nn.Module, samples: Any, plan: Any) -> int:
        for parameter in module.parameters():
            parameter.requires_grad_(not parameter.requires_grad)
        return 1

    run_trainer(trainer, model, TensorDataset(torch.zeros(1)), Plan(), device=torch.device("cpu"))
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == ["bn.weight"]


def layouts(tensors: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """Return the same tensors in forms that a script may have them in."""
    flat, at, views = torch.cat([each.reshape(-1) for each in tensors.values()]), 0, {}
    for name, each in tensors.items():
        views[name], at = flat[at : at + each.numel()].view(each.shape), at + each.numel()
    return {
        "as they are": tensors,
        "with another name for one": {**tensors, "again": tensors["body.weight"]},
        "transposed in memory": {name: each.t().contiguous().t() for name, each in tensors.items()},
        "of one memory": views,
    }


@pytest.mark.parametrize("form", ["as they are", "with another name for one", "transposed in memory", "of one memory"])
def test_a_script_s_own_model_comes_back_as_it_was_accepted_whatever_it_trains_later(
    server: "ScriptedServer", settings: dict[str, Any], form: str
) -> None:
    torch.manual_seed(0)
    model, own = nn.Sequential(), nn.Sequential()
    model.add_module("body", nn.Linear(6, 5))
    own.add_module("body", nn.Linear(6, 5))
    given = layouts(dict(own.state_dict()))[form]
    job = pb.JobSpec(mode="federated", rounds=9, shared=["*"], personal="{}")
    with connect(**settings) as federation:
        server.joins.get(timeout=SECONDS)
        server.train(server.command(model, round_=1, job=job))
        task = next(federation)
        task.load_into(model)
        assert task.load_own() is None
        task.submit(model, samples=1, own=given)
        accepted = {name: each.clone() for name, each in own.state_dict().items()}
        for round_ in (2, 3):  # none of which is accepted
            server.train(server.command(model, round_=round_, job=job))
            task = next(federation)
            task.load_into(model)
            found = task.load_own()
            assert found is not None
            assert equal(dict(found), accepted)
            for tensor in (*found.values(), *given.values()):
                tensor.add_(1)
            task.fail("no_luck", "it did not work out")
