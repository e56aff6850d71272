"""Clients that are trained together: as near to the exact engine as rounding allows, and refusals."""

import logging
import pathlib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from fedring.control.failure import Failure
from fedring.daemon.exits import Exit
from fedring.data import ClientPart, Samples, Split
from fedring.data.samples import SamplesView
from fedring.simulation import simulate
from fedring.simulation.cohort import Cohort, CohortMember, _Feeds
from fedring.train.batches import cut, draw
from fedring.train.plan import Plan

CLIENTS = 12
JOB: dict[str, Any] = {
    "rounds": 1, "batch_size": 16, "partition": "dirichlet", "alpha": 0.3, "encoding": "fp32", "min_clients": 1,
    "model_args": {"hidden": 16},
}  # fmt: skip
HERE = "user_simulation"


@pytest.fixture(autouse=True)
def _users_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(pathlib.Path(__file__).parents[2] / "fixtures_user_code"))


@pytest.fixture(autouse=True)
def _all_are_trained_together(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail where clients that can be trained together were trained one by one after all, which ends the same."""
    yield
    wasted = [each for each in caplog.get_records("call") if each.name == "fedring.simulation.batching"]
    assert not [each.getMessage() for each in wasted if "trained one by one" in each.getMessage()]


def both(folder: pathlib.Path, keys: Mapping[str, Any], **options: Any) -> tuple[list[np.ndarray[Any, Any]], list[Any]]:
    """Simulate with the exact engine and with the batched one: the models' values, and the reports."""
    models, reports = [], []
    for engine in ("local", "batched"):
        out = folder / engine
        options = {"clients": CLIENTS, "workers": 1, "threads": 1, **options}
        reports.append(simulate({**JOB, **keys}, engine=engine, out=out, **options))
        tensors = load_file(out / "model.safetensors")
        models.append(np.concatenate([tensors[name].ravel() for name in sorted(tensors)]))
    assert [report["batched"] for report in reports] == [False, True]
    return models, reports


def centred() -> nn.Module:
    """Return a model that looks at all samples of a batch at once."""

    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 10)

        def forward(self, inputs: Tensor) -> Tensor:
            outputs: Tensor = self.layer(inputs.flatten(1))
            return outputs - outputs.mean(0)

    return Centred()


def half_frozen() -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10))
    next(model.parameters()).requires_grad_(False)
    model.register_buffer("scale", torch.ones(3))
    return model


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 10))


class Tempered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.temperature = nn.Linear(64, 10), nn.Parameter(torch.ones(()))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs.flatten(1)) * self.temperature
        return outputs


class Halving(nn.Module):
    """Changes its inputs in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = inputs.flatten(1)
        outputs: Tensor = self.layer(inputs.mul_(0.5))
        return outputs


def weighted(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return a mean that depends on the classes of all samples."""
    return nn.functional.cross_entropy(outputs, labels, weight=torch.tensor([10.0] + [0.2] * 9))


def root(outputs: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, labels).sqrt()


def centering(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return a mean of losses of single samples, whose gradient is none of theirs."""
    mean = outputs.detach().mean(0)
    return nn.functional.cross_entropy(outputs, labels) + ((outputs - mean) * mean).sum(1).mean()


class HalfUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(64, 10), nn.Linear(64, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.used(inputs.flatten(1))
        return outputs


def a_data_set(root: pathlib.Path | None, download: bool, part: ClientPart) -> Split:
    """Return samples that are no `Samples`, another number for each client."""
    generator = torch.Generator().manual_seed(part.index)
    size = 5 + 7 * part.index
    inputs, labels = torch.randn(size, 1, 8, 8, generator=generator), torch.randint(10, (size,), generator=generator)
    return Split(TensorDataset(inputs, labels), TensorDataset(inputs, labels), classes=10)


def unequal_parts(root: pathlib.Path | None, download: bool) -> Split:
    """Return samples of which three clients get 14, 14 and 13: four batches of 4, or three."""
    samples = Samples(torch.randn(41, 1, 8, 8, generator=torch.Generator().manual_seed(1)), torch.arange(41) % 10)
    return Split(samples, samples, classes=10)


_reads = Counter[int]()


def gone_for_one(root: pathlib.Path | None, download: bool, part: ClientPart) -> Split:
    """Return a client's samples; those of client 2 can be read once."""
    _reads[part.index] += 1
    if part.index == 2 and _reads[2] > 1:
        raise OSError("it is gone")
    samples = Samples(torch.full((20, 1, 8, 8), 0.5), torch.arange(20) % 10)
    return Split(samples, samples, classes=10)


def bad_for_one(root: pathlib.Path | None, download: bool, part: ClientPart) -> Split:
    inputs = torch.full((20, 1, 8, 8), torch.nan if part.index == 3 else 0.5)
    labels = torch.arange(20) % 10
    return Split(Samples(inputs, labels), Samples(inputs, labels), classes=10)


@pytest.mark.parametrize(
    "keys",
    [
        {"epochs": 3, "mu": 0.1, "clip_norm": 0.5, "evaluate": False},
        {"epochs": 2, "subset_size": 20, "momentum": 0.0, "scaffold": True, "weights": "uniform"},
        {
            "optimizer": "fedring.train.optimizers:adam", "lr": 0.01, "optimizer_args": {"weight_decay": 0.01},
            "epochs": 2,
        },
        {"transforms": [{"name": "feddyn", "args": {"alpha": 0.05, "clients": CLIENTS}}], "weights": "uniform"},
        {"model": centred, "model_args": {}, "epochs": 2},
        {"model": half_frozen, "model_args": {}},
        {"model": convolutional, "model_args": {}, "epochs": 2},
        {"model": HalfUsed, "model_args": {}, "optimizer_args": {"weight_decay": 0.5}},
        {"model": Halving, "model_args": {}, "epochs": 2},
        {"loss": weighted, "epochs": 2},
        {"loss": root, "epochs": 2, "partition": "iid"},
        {"loss": centering, "epochs": 2},
        {"data": a_data_set, "batch_size": 8, "epochs": 2},
        {
            "min_clients": 6, "min_clients_to_aggregate": 5, "weights": "uniform", "secure_aggregation": {},
            "evaluate": False,
        },
    ],
    ids=[
        "terms of the loop", "scaffold", "adam", "feddyn", "no padding", "frozen", "convolution", "unused", "in place",
        "weighted", "root", "centering", "any data set", "secure",
    ],
)  # fmt: skip
def test_a_round_of_clients_trained_together_equals_that_of_the_exact_engine(
    keys: dict[str, Any], tmp_path: pathlib.Path
) -> None:
    models, reports = both(tmp_path, keys)
    # Updates of secure aggregation are rounded to few levels, and one value of many may fall on the other side.
    scale = np.abs(models[0]).max()
    near = np.abs(models[0] - models[1]) <= 1e-5 * scale
    assert near.all() if "secure_aggregation" not in keys else near.mean() > 0.99
    rows = [report["rounds"][0] for report in reports]
    assert rows[0]["clients"] == rows[1]["clients"] == rows[0]["selected"]
    assert rows[0]["metrics"] == pytest.approx(rows[1]["metrics"], rel=1e-4)
    assert rows[0]["upload_bytes"] == rows[1]["upload_bytes"]


@pytest.mark.parametrize("keys", [{}, {"momentum": 0.9}, {"optimizer": "fedring.train.optimizers:adam", "lr": 0.01}])
def test_clients_with_more_steps_go_on_without_the_others(keys: dict[str, Any], tmp_path: pathlib.Path) -> None:
    unequal = {"partition": "iid", "data": unequal_parts, "batch_size": 4, "epochs": 2, **keys}
    models, reports = both(tmp_path, unequal, clients=3)
    np.testing.assert_allclose(models[0], models[1], atol=1e-5 * float(np.abs(models[0]).max()))
    assert reports[1]["rounds"][0]["clients"] == 3


@pytest.mark.parametrize("engine", ["local", "batched"])
def test_a_client_whose_samples_cannot_be_read_again_fails_alone(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedring.simulation.samples._KEPT", 1)
    _reads.clear()
    report = simulate({**JOB, "data": gone_for_one, "partition": "iid"}, clients=4, workers=1, engine=engine)
    assert [row["clients"] for row in report["rounds"]] == [3]


def test_clients_with_settings_of_their_own_are_trained_together_with_their_like(tmp_path: pathlib.Path) -> None:
    override = [{"where": {"gpu": "yes"}, "epochs": 3, "batch_size": 8}]
    models, _ = both(tmp_path, {"override": override}, labels=[{"gpu": "yes"}, {}])
    np.testing.assert_allclose(models[0], models[1], atol=1e-5 * float(np.abs(models[0]).max()))
    others, _ = both(tmp_path, {})
    assert not np.array_equal(models[0], others[0])


def test_newcomers_are_trained_together_with_clients_that_have_control_variates(tmp_path: pathlib.Path) -> None:
    keys = {"rounds": 3, "epochs": 3, "partition": "iid", "momentum": 0.0, "scaffold": True, "weights": "uniform"}
    models, _ = both(tmp_path, keys, per_round=6)
    np.testing.assert_allclose(models[0], models[1], atol=1e-5 * float(np.abs(models[0]).max()))


@pytest.mark.parametrize("keys", [{}, {"clip_norm": 0.05}, {"optimizer": "fedring.train.optimizers:adam", "lr": 0.01}])
def test_a_parameter_without_dimensions_is_trained(keys: dict[str, Any], tmp_path: pathlib.Path) -> None:
    models, _ = both(tmp_path, {"model": Tempered, "model_args": {}, **keys})
    np.testing.assert_allclose(models[0], models[1], atol=1e-5 * float(np.abs(models[0]).max()))


@pytest.mark.parametrize(("job", "own", "fast"), [("fp32", "bf16", False), ("bf16", "fp32", True)])
def test_the_backward_pass_of_linear_layers_goes_by_the_precision_of_the_client(
    job: str, own: str, fast: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = list[bool]()
    train = Cohort.train

    def watched(self: Cohort, *args: Any) -> Any:
        used.clear()  # of what the job was checked with
        return train(self, *args)

    def noted(*args: Any, **keys: Any) -> Any:
        used.append(True)
        return torch.func.grad_and_value(*args, **keys)

    monkeypatch.setattr(Cohort, "train", watched)
    monkeypatch.setattr("fedring.simulation.cohort.grad_and_value", noted)
    keys = {"precision": job, "override": [{"where": {"gpu": "yes"}, "precision": own}]}
    simulate({**JOB, **keys}, clients=4, workers=1, threads=1, engine="batched", labels=[{"gpu": "yes"}])
    assert bool(used) == fast


def test_after_twenty_rounds_the_accuracy_is_the_same() -> None:
    keys = {**JOB, "rounds": 20, "model_args": {"hidden": 64}, "alpha": 0.5}
    one, two = (simulate(keys, clients=30, per_round=10, workers=1, threads=1, engine=e) for e in ("local", "batched"))
    assert one["accuracy"] > 0.6
    assert abs(one["accuracy"] - two["accuracy"]) <= 0.005


@pytest.mark.programs
def test_workers_that_train_clients_together_share_them_evenly() -> None:
    one, two = (simulate(JOB, clients=CLIENTS, workers=n, threads=1, engine="batched") for n in (1, 2))
    assert one["updates"] == two["updates"] == CLIENTS
    assert one["loss"] == pytest.approx(two["loss"], rel=1e-5)


def test_after_twenty_rounds_the_accuracy_is_the_exact_ones(tmp_path: pathlib.Path) -> None:
    keys = {"rounds": 20, "partition": "dirichlet", "alpha": 0.5, "momentum": 0.9, "evaluate": True}
    _, (exact, batched) = both(tmp_path, keys)
    assert batched["accuracy"] == pytest.approx(exact["accuracy"], abs=0.005)


def test_a_cohort_is_cut_into_chunks_that_fit_into_the_memory(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = list[int]()
    train = Cohort.train

    def counted(self: Cohort, plan: Any, members: Any, *rest: Any) -> Any:
        sizes.append(len(members))
        return train(self, plan, members, *rest)

    monkeypatch.setattr(Cohort, "train", counted)
    keys = {"model_args": {"hidden": 1000}}
    models, _ = both(tmp_path, keys, batch_mb=8)
    assert max(sizes) < CLIENTS == sum(sizes)
    np.testing.assert_allclose(models[0], models[1], atol=1e-5 * float(np.abs(models[0]).max()))
    with pytest.raises(Failure, match=r"One client takes about \d+ MB to train, more than batch_mb = 1: allow more"):
        simulate({**JOB, **keys}, clients=CLIENTS, workers=1, engine="batched", batch_mb=1)


def test_no_memory_is_wanted_for_samples_that_no_client_has() -> None:
    keys = {"batch_size": 100_000, "model_args": {"hidden": 1000}, "evaluate": False}
    assert simulate({**JOB, **keys}, clients=CLIENTS, workers=1, threads=1, engine="batched", batch_mb=100)["batched"]


@pytest.mark.parametrize("batch_size", [1, 2, 3, 8])
def test_the_batches_of_a_cohort_are_those_of_the_loop(batch_size: int) -> None:
    plan = Plan(epochs=2, batch_size=batch_size, subset_size=11)
    samples = Samples(torch.arange(300.0).reshape(100, 3), torch.arange(100))
    parts = [np.arange(100 - size, 100) for size in (1, 2, 5, 9, 10, 17, 3)]
    members = [CohortMember(SamplesView(samples, part), seed, {}) for seed, part in enumerate(parts)]
    feeds = _Feeds(members, plan, torch.device("cpu"))
    given = [list[list[int]]() for _ in members]
    for step in range(len(feeds.sizes)):
        for rows, batch in feeds.batches(step, padded=True):
            assert isinstance(rows, slice)
            for row in range(rows.stop):
                size = int(feeds.sizes[step, row])
                labels, weights = batch.labels[row], batch.weights
                given[feeds.order[row]].append(labels[:size].tolist())
                assert torch.equal(batch.inputs[row][:size, 0], 3.0 * labels[:size])  # type: ignore[index]
                if weights is not None:
                    assert weights[row].tolist() == pytest.approx([1 / size] * size + [0.0] * (len(labels) - size))
    for place, part in enumerate(parts):
        generator = torch.Generator().manual_seed(place)
        drawn = torch.from_numpy(part)[draw(len(part), plan.subset_size, generator)]
        orders = [drawn[torch.randperm(len(drawn), generator=generator)] for _ in range(plan.epochs)]
        assert given[place] == [batch.tolist() for order in orders for batch in cut(order, batch_size)]


def test_a_client_whose_training_fails_is_missing_alone() -> None:
    keys = {**JOB, "data": bad_for_one, "min_clients_to_aggregate": 1}
    report = simulate(keys, clients=6, workers=1, threads=1, engine="batched")
    (row,) = report["rounds"]
    assert (row["clients"], row["selected"]) == (5, 6)
    assert len(row["failures"]) == 1
    assert row["failures"][0].startswith("client-3: NaN or infinity in sample")


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs.flatten(1))
        return outputs if outputs.sum() > 0 else 2 * outputs


class Counting(nn.Module):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen += len(inputs)
        outputs: Tensor = self.layer(inputs.flatten(1))
        return outputs


def random_layers() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.Dropout(0.1))


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.BatchNorm1d(10))


def rprop(parameters: Any, lr: float, momentum: float) -> torch.optim.Optimizer:
    return torch.optim.Rprop(parameters, lr=lr)


def two_groups(parameters: Any, lr: float, momentum: float) -> torch.optim.Optimizer:
    first, *others = parameters
    return torch.optim.SGD([{"params": [first]}, {"params": others, "lr": lr / 2}], lr=lr)


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"model": Branching}, "its forward pass depends on values, which differ from client to client"),
        ({"model": Counting}, "its forward pass changes the buffer seen"),
        ({"model": random_layers}, "its forward pass draws random numbers, such as dropout's"),
        ({"model": batch_norm}, "2 is a BatchNorm1d, whose statistics change in training"),
        ({"trainer": f"{HERE}:add_number"}, "its trainer is a loop of its own"),
        ({"personal": {"mu": 0.5}}, r"its clients train models of their own, as \[personal\] says"),
        ({"optimizer": rprop}, "its optimizer is a Rprop, which need not treat each value alone"),
        ({"optimizer": two_groups}, "its optimizer treats parameters in several ways"),
    ],
    ids=["branch", "buffer", "dropout", "batch norm", "trainer", "personal", "optimizer", "groups"],
)
def test_a_job_that_cannot_be_batched_is_refused_or_trained_exactly(
    keys: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    job = {**JOB, "model_args": {}, **keys, "evaluate": False}
    with pytest.raises(Failure, match=f"^The job cannot be batched, because {why}") as refused:
        simulate(job, clients=4, workers=1, threads=1, engine="batched")
    assert refused.value.exit_code == Exit.CONFIG
    with caplog.at_level(logging.WARNING, "fedring.simulation"):
        auto = simulate(job, clients=4, workers=1, threads=1, engine="auto")
    (line,) = [record.getMessage() for record in caplog.records if record.name == "fedring.simulation.run"]
    assert line.startswith("clients are trained one by one: The job cannot be batched, because")
    exact = simulate(job, clients=4, workers=1, threads=1)
    assert auto["model_sha256"] == exact["model_sha256"]
    assert not auto["batched"]


class Repeated(nn.Module):
    """Has a layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(64, 64), nn.Linear(64, 10)
        self.again = self.layer

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.again(self.layer(inputs.flatten(1)).relu()).relu())
        return outputs


class Drifting(nn.Module):
    """Keeps a mean of its features, which is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.mean = nn.Linear(64, 10), torch.zeros(10)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs.flatten(1))
        self.mean = 0.9 * self.mean + 0.1 * outputs.detach().mean(0)
        return outputs


class DriftingAlone(Drifting):
    """Cannot be copied."""

    def __deepcopy__(self, memo: Any) -> nn.Module:
        raise TypeError


class Averaging:
    """A loss that keeps its mean."""

    def __init__(self) -> None:
        self.mean = torch.zeros(())

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(outputs, labels)
        self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        return loss


@pytest.mark.parametrize(
    "keys",
    [
        {"model": Repeated},
        {"model": Drifting},
        {"model": DriftingAlone},
        {"loss": Averaging(), "model_args": {"hidden": 16}},
    ],
    ids=["layer", "model", "no copy", "loss"],
)
def test_a_vain_attempt_to_train_together_leaves_the_job_as_it_was(keys: dict[str, Any]) -> None:
    job = {**JOB, "model_args": {}, **keys}
    with pytest.raises(
        Failure, match="a call leaves something in the model or the loss, with which the next one fails"
    ):
        simulate(job, clients=4, workers=1, threads=1, engine="batched")
    auto, exact = (simulate(job, clients=4, workers=1, threads=1, engine=engine) for engine in ("auto", "local"))
    assert auto["rounds"][0]["clients"] == 4
    assert auto["model_sha256"] == exact["model_sha256"]
    assert not auto["batched"]


def test_a_job_that_can_be_batched_is_batched_by_auto() -> None:
    assert simulate(JOB, clients=4, workers=1, threads=1, engine="auto")["batched"]


def test_an_engine_or_a_memory_that_there_is_not_is_refused() -> None:
    with pytest.raises(Failure, match="engine='fast' is none of local, batched, auto, ray"):
        simulate(JOB, clients=4, engine="fast")
    with pytest.raises(Failure, match="batch_mb=0 is not within 1 and"):
        simulate(JOB, clients=4, engine="batched", batch_mb=0)
