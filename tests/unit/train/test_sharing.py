"""Which tensors of a model travel: the globs of a job, frozen tensors, and what the server makes and keeps of them."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import nn

from fedring.codec import Vectors
from fedring.daemon.config import ConfigError
from fedring.offers import offers
from fedring.server.aggregation.modelfile import ModelReader
from fedring.server.config import ServerConfig
from fedring.server.model.initial import find_file, load_initial
from fedring.server.model.models import Models
from fedring.server.operator.job_checks import JobChecks
from fedring.server.state.blobs import FileBlobs
from fedring.server.state.facts import Facts
from fedring.server.state.rows import ModelRow
from fedring.server.state.sql.store import Store
from fedring.train.errors import SeamError
from fedring.train.jobs.job import Job
from fedring.train.models import digits_mlp
from fedring.train.tensors.files import load_model, save_model
from fedring.train.tensors.sharing import Sharing
from fedring.train.tensors.state import check_sharing, frozen_digest, read_vectors, schema_of, split, write_vectors

Make = Callable[..., tuple[Models, ModelRow, Job]]


class Branched(nn.Module):
    """A body with a normalisation, and a head."""

    def __init__(self, *, frozen: bool = False) -> None:
        super().__init__()
        self.body = nn.Linear(4, 3)
        self.bn = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 2)
        self.body.requires_grad_(not frozen)


def names(model: nn.Module, **keys: Any) -> tuple[list[str], list[str], list[str]]:
    """Return the names of the shared, the private and the frozen tensors."""
    parts = split(model, Sharing(**keys))
    return tuple([e.name for e in part.entries] for part in (parts.shared, parts.private, parts.frozen))  # type: ignore[return-value]  # three parts


def test_everything_is_shared_unless_a_job_says_otherwise() -> None:
    model = Branched(frozen=True)
    assert Job.model_validate({}).sharing == Sharing(frozen_stay=True)
    assert split(model, Sharing()).shared == schema_of(model)
    assert names(model)[1:] == ([], [])


def test_what_is_not_shared_is_private_in_the_order_of_the_model() -> None:
    batch_norm = [f"bn.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")]
    body, head = ["body.weight", "body.bias"], ["head.weight", "head.bias"]
    assert names(Branched(), private=("bn.*",)) == (body + head, batch_norm, [])
    assert names(Branched(), shared=("body.*", "*.weight"), private=("head*",))[0] == [*body, "bn.weight"]


def test_frozen_parameters_stay_whatever_the_globs_say() -> None:
    model = Branched(frozen=True)
    shared, private, frozen = names(model, shared=("head.*", "body.*"), private=("body.bias",), frozen_stay=True)
    assert (shared, frozen) == (["head.weight", "head.bias"], ["body.weight", "body.bias"])
    assert len(private) == 5


def test_the_vectors_of_a_part_are_those_of_its_tensors_and_write_nothing_else() -> None:
    model, other = Branched(), Branched()
    parts = split(model, Sharing(private=("bn.*", "body.bias")))
    vectors = read_vectors(model, parts.shared.names)
    expected = [model.body.weight, model.head.weight, model.head.bias]
    np.testing.assert_array_equal(vectors.parameters, torch.cat([t.detach().flatten() for t in expected]).numpy())
    assert vectors.buffers.size == 0
    before = other.body.bias.detach().clone()
    with pytest.raises(SeamError, match="does not fit the schema"):
        write_vectors(other, parts.shared, vectors)
    write_vectors(other, parts.shared, vectors, partial=True)
    assert torch.equal(other.head.weight, model.head.weight)
    assert torch.equal(other.body.bias, before)
    with pytest.raises(SeamError, match="does not fit the schema"):
        write_vectors(nn.Linear(4, 3), parts.shared, vectors, partial=True)


def test_the_digest_of_frozen_tensors_covers_names_dtypes_and_values() -> None:
    model = Branched(frozen=True)
    frozen = split(model, Sharing(frozen_stay=True)).frozen

    def digest() -> str:
        return frozen_digest(model, split(model, Sharing(frozen_stay=True)).frozen)

    first = digest()
    with torch.no_grad():
        model.head.weight.add_(1)
        assert digest() == first
        model.body.weight[0, 0].add_(1)
        assert digest() != first
        model.body.weight[0, 0].sub_(1)
    renamed = nn.ModuleDict({"other": model.body})
    assert frozen_digest(renamed, split(renamed, Sharing(frozen_stay=True)).frozen) != first
    assert frozen_digest(Branched(), split(Branched(), Sharing(frozen_stay=True)).frozen) == ""
    assert frozen.num_parameters == 15


def test_frozen_tensors_may_be_of_a_dtype_that_cannot_travel() -> None:
    model = Branched()
    model.register_parameter("packed", nn.Parameter(torch.arange(6, dtype=torch.uint8), requires_grad=False))
    model.register_parameter("scale", nn.Parameter(torch.tensor(2.0, dtype=torch.bfloat16), requires_grad=False))
    frozen = split(model, Sharing(frozen_stay=True)).frozen
    assert [(e.name, e.dtype) for e in frozen.entries] == [("packed", "uint8"), ("scale", "bfloat16")]
    assert frozen_digest(model, frozen)
    with pytest.raises(SeamError, match="use a real floating-point type"):
        split(model, Sharing())


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"private": ("*.norm*",)}, r"private: '\*\.norm\*' matches no tensor of the model: it has body.weight, "),
        (
            {"shared": ("head.weigth",)},
            "shared: 'head.weigth' matches no tensor of the model: did you mean head.weight",
        ),
        ({"private": ("*",)}, "shared: shared and private leave no parameter of the model to share"),
        ({"shared": ("bn.running*",)}, "shared: shared and private leave no parameter"),
        ({"shared": ("body.*",), "frozen_stay": True}, "shared: shared, private and frozen parameters leave no"),
    ],
)
def test_globs_that_cannot_be_meant_are_refused(keys: dict[str, Any], text: str) -> None:
    with pytest.raises(SeamError, match=text) as caught:
        check_sharing(Branched(frozen=True), Sharing(**keys))
    assert caught.value.reason == "bad_sharing"


@pytest.mark.parametrize("mode", ["data_parallel", "pipeline"])
@pytest.mark.parametrize("keys", [{"private": ["*.bn*"]}, {"shared": ["a"]}, {"send_frozen": True}])
def test_workers_of_a_group_share_the_whole_model(mode: str, keys: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=f"leave them out of a {mode} job"):
        Job.model_validate({"mode": mode, **keys})
    assert Job.model_validate({"mode": "data_parallel"}).sharing == Sharing()


def test_a_job_that_shares_nothing_is_refused() -> None:
    with pytest.raises(ValidationError, match="shared"):
        Job.model_validate({"shared": []})


def test_a_part_of_a_model_is_loaded_into_the_whole_one(tmp_path: Path) -> None:
    body = nn.Linear(4, 3)
    save_model(nn.ModuleDict({"body": body}), tmp_path / "part.safetensors")
    model = Branched()
    with pytest.raises(SeamError, match=r"it has no tensor bn\.weight"):
        load_model(tmp_path / "part.safetensors", model)
    head = model.head.weight.detach().clone()
    load_model(tmp_path / "part.safetensors", model, partial=True)
    assert torch.equal(model.body.weight, body.weight)
    assert torch.equal(model.head.weight, head)
    for wrong in (nn.Linear(4, 3), nn.ModuleDict({"body": nn.Linear(5, 3)})):
        save_model(wrong, tmp_path / "wrong.safetensors")
        with pytest.raises(SeamError, match="does not fit the model"):
            load_model(tmp_path / "wrong.safetensors", model, partial=True)


def test_a_folder_of_first_weights_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(SeamError, match=r"init_path = .*gone/init\.pt cannot be read: No such file or directory"):
        find_file(tmp_path / "gone" / "init.pt", "init.pt")


def test_first_weights_may_be_those_that_are_shared_and_no_other_values_of_the_rest(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model, other = Branched(frozen=True), Branched(frozen=True)
    parts = split(model, Sharing(private=("bn.*",), frozen_stay=True))
    save_model(nn.ModuleDict({"head": other.head}), tmp_path / "head.safetensors")
    load_initial(tmp_path / "head.safetensors", model, parts)
    assert torch.equal(model.head.weight, other.head.weight)
    save_model(nn.ModuleDict({"bn": other.bn}), tmp_path / "bn.safetensors")
    with pytest.raises(SeamError, match=r"it has no tensor head\.weight"):
        load_initial(tmp_path / "bn.safetensors", model, parts)
    save_model(other, tmp_path / "whole.safetensors")
    with pytest.raises(SeamError, match=r"body\.weight .* this tensor is frozen: .*, or set send_frozen = true"):
        load_initial(tmp_path / "whole.safetensors", model, parts)
    same = Branched(frozen=True)
    same.load_state_dict(other.state_dict())
    same.bn.weight.data.add_(1)
    save_model(same, tmp_path / "normed.safetensors")
    with pytest.raises(SeamError, match=r"bn\.weight .* is private: let the model's callable load them\.$"):
        load_initial(tmp_path / "normed.safetensors", other, parts)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Yield a function that makes the first model of a job."""
    blobs = FileBlobs(tmp_path)
    facts = Facts(Store("sqlite://"), blobs, threads=1)
    config = ServerConfig.model_validate({"state_dir": tmp_path, "trusted": ["fedring", __name__]})
    models = Models(blobs, facts.pool, config, "run-1")

    def make(**keys: Any) -> tuple[Models, ModelRow, Job]:
        job = Job.model_validate(keys)
        return models, models.maker.first(job, 1), job

    yield make
    facts.close()


@offers("model")
def frozen_body() -> nn.Module:
    """Build a perceptron for the digits whose first layer is frozen."""
    model = digits_mlp(hidden=8)
    model[1].requires_grad_(False)  # type: ignore[index]  # a Sequential
    return model


FROZEN = {"model": f"{__name__}:frozen_body"}


def test_the_server_s_model_is_what_is_shared(make: Make, tmp_path: Path) -> None:
    models, row, job = make(private=["3.*"], seed=4)
    with FileBlobs(tmp_path).reader(row.blob) as blob:
        reader = ModelReader(blob)
        assert [entry.name for entry in reader.schema.entries] == ["1.weight", "1.bias"]
        values: Vectors = reader.vectors()
    assert row.parameters == values.parameters.size == 64 * 64 + 64
    assert models.maker.job_models.frozen_digest(job, row) == ""
    whole = digits_mlp()
    load_model(tmp_path / "blobs" / row.blob, whole, partial=True)
    np.testing.assert_array_equal(read_vectors(whole, {"1.weight", "1.bias"}).parameters, values.parameters)
    assert list(load_file(tmp_path / "blobs" / row.blob)) == ["1.weight", "1.bias"]
    with pytest.raises(SeamError, match="is not a model of the job's kind"):
        models.maker.job_models.check_fits(row, Job.model_validate({"seed": 4}))


def test_frozen_tensors_are_left_out_and_named_by_their_digest(
    make: Make,
) -> None:
    models, row, job = make(**FROZEN)
    assert row.parameters == 8 * 10 + 10
    digest = models.maker.job_models.frozen_digest(job, row)
    assert digest
    other = Job.model_validate(FROZEN | {"seed": 1})
    with pytest.raises(SeamError, match="version 1 was trained with other values of the 2 frozen tensors"):
        models.maker.job_models.frozen_digest(other, row)
    older = replace(row, frozen_digest="")  # of an earlier release
    assert models.maker.job_models.frozen_digest(other, older) != digest
    sent = Job.model_validate(FROZEN | {"send_frozen": True})
    whole = models.maker.first(sent, 2)
    assert whole.parameters == 8 * 10 + 10 + 64 * 8 + 8
    # A version that an older server has made holds all tensors: the job goes on with all of them.
    assert models.maker.job_models.frozen_digest(sent, whole) == models.maker.job_models.frozen_digest(job, whole) == ""


def test_a_job_whose_globs_do_not_fit_is_refused_when_it_is_queued(make: Make, tmp_path: Path) -> None:
    models, _, job = make()
    config = ServerConfig.model_validate({"state_dir": tmp_path})
    JobChecks(config, models.maker).check(job, [], runs_next=True)
    with pytest.raises(ConfigError, match=r"^private: '\*\.bn\*' matches no tensor of the model: it has 1\.weight, "):
        JobChecks(config, models.maker).check(Job.model_validate({"private": ["*.bn*"]}), [], runs_next=True)
