"""Data-parallel epochs over gloo, each member in its own process: members stay equal, and new ones become equal."""

import json
from functools import partial
from typing import Any

import pytest
import torch
from tests import forks
from tests.unit import group_member
from tests.unit.group_member import SIZE, net, samples

from fedring.train.jobs.data_parallel_table import HOOKS
from fedring.workers.shards import GroupRank, count_steps, epoch_order, shares

pytestmark = pytest.mark.programs

STEPS = 2 * count_steps(SIZE, 2, 8)


Results = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Return the results of two members for each scenario, by rank; one pair of processes runs all scenarios."""
    folder = tmp_path_factory.mktemp("group")
    assert forks.call_all([partial(group_member.main, rank, 2, folder) for rank in range(2)], seconds=240) == [0, 0]
    by_rank = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    return {scenario: [of_rank[scenario] for of_rank in by_rank] for scenario in by_rank[0]}


def alone(epochs: int = 2) -> torch.nn.Module:
    """Train in one process with the batches of both members; BatchNorm still sees one member's batch at a time."""
    model, data = net(), samples()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(epochs):
        order = epoch_order(SIZE, seed=5, epoch=epoch)
        for step in zip(*(shares(order, 0, GroupRank(rank, 2), 8) for rank in range(2)), strict=True):
            optimizer.zero_grad()
            for share in step:
                inputs, labels = data.batch(share.indices)
                (torch.nn.functional.cross_entropy(model(inputs), labels) / 2).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return model


@pytest.mark.parametrize("scenario", [*HOOKS, "accumulated", "wrapped", "own", "own with state", "late buffers"])
def test_members_end_equal(scenario: str, results: Results) -> None:
    first, second = results[scenario]
    assert first["equal"]
    assert first["digest"] == second["digest"]
    assert first["weights"] != [float(p.detach().double().sum()) for p in net().parameters()]
    expected = 2 * count_steps(SIZE, 2, 16) if scenario == "accumulated" else STEPS
    assert first["steps"] == expected
    assert first["usage"]["steps"] == expected
    assert first["usage"]["wait_seconds"] > 0
    assert first["usage"]["compute_seconds"] > 0


def test_a_hook_that_needs_a_state_and_has_none_is_named(results: Results) -> None:
    for result in results["failing"]:
        assert result["reason"] == "bad_job"
        assert result["error"].startswith(
            "the hook tests.unit.group_member:needs_a_state was called with the state None and failed with "
            "AttributeError: "
        )
        assert "name a function that takes the named parameters and returns the state and the hook" in result["error"]


def test_a_group_without_samples_says_so(results: Results) -> None:
    assert [result["reason"] for result in results["without samples"]] == ["no_data"] * 2


def test_a_group_computes_what_one_process_would(results: Results) -> None:
    first, _ = results["none"]
    expected = [float(p.detach().double().sum()) for p in alone().parameters()]
    assert first["weights"] == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_buffers_are_rank_0s_when_they_are_shared_with_each_step(results: Results) -> None:
    first, second = results["some buffers"]
    assert first["buffers"] == second["buffers"]


@pytest.mark.parametrize("hook", ["int8", "topk", "powersgd", "batched_powersgd", "int8 ef21", "topk ef21"])
def test_a_newcomer_to_a_hook_shares_what_all_workers_share(hook: str, results: Results) -> None:
    first, second = results[f"newcomer to {hook}"]
    assert first["source"] == second["source"] == 0
    assert first["equal"]
    assert first["digest"] == second["digest"]
    assert first["shared"] == second["shared"]
    assert bool(first["shared"]) == ("powersgd" in hook or "ef21" in hook)
    assert first["momentum"] == second["momentum"] != []


@pytest.mark.parametrize("end", ["completed elsewhere", "repeated", "missed"])
@pytest.mark.parametrize("hook", ["topk", "powersgd", "int8"])
def test_a_step_that_broke_off_counts_as_often_as_the_others_took_it(hook: str, end: str, results: Results) -> None:
    for result in results[f"{hook} {end}"]:
        assert result["off"] < 1e-5 < result["size"]


@pytest.mark.parametrize(
    "scenario",
    [
        "newcomer",
        "newcomer to an optimizer with values in groups",
        "newcomer to an optimizer with tensors in groups",
    ],
)
def test_a_newcomer_takes_over_model_momentum_and_place(scenario: str, results: Results) -> None:
    first, second = results[scenario]
    assert first["source"] == second["source"] == 0
    assert first["equal"]
    assert first["momentum"] == second["momentum"] != []
    assert first["steps"] == second["steps"] == 3 + count_steps(SIZE - 24, 2, 8)


def test_a_newcomer_whose_group_fails_before_it_has_all_keeps_what_it_had(results: Results) -> None:
    first, second = results["broken newcomer"]
    assert first["kept"]
    assert first["source"] == second["source"] == 1
    assert first["digest"] == second["digest"] == second["before"]
    assert first["taken"] == second["taken"] == 24


def test_a_group_goes_on_within_a_round_with_named_inputs(results: Results) -> None:
    first, second = results["named inputs"]
    assert first["equal"]
    assert first["steps"] == second["steps"] == 1 + count_steps(SIZE - 16, 2, 8)


def test_a_subset_larger_than_the_samples_is_all_of_them_to_the_learning_rate_too(results: Results) -> None:
    assert results["cosine"][0]["digest"] == results["cosine of a large subset"][0]["digest"]


def test_checkpoints_of_one_group_belong_together_although_buffers_differ(results: Results) -> None:
    assert [result["on_all"] for result in results["one history"]] == [True, True]


@pytest.mark.parametrize("scenario", ["two histories", "two histories in another round"])
def test_checkpoints_of_two_groups_do_not_belong_together(scenario: str, results: Results) -> None:
    first, second = results[scenario]
    assert first["on_all"] is second["on_all"] is False  # so both exchange what the hook shares
    assert first["equal"]
    assert first["momentum"] == second["momentum"] != []
