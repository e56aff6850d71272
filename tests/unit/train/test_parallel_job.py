"""The table [data_parallel] of a job: what it may hold, and what the server and the clients make of it."""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError
from tests.unit import group_member
from torch import nn
from torch._C._distributed_c10d import HashStore

from fedring.client.group.hooks import JobHook, make_hook
from fedring.compress.correction import ErrorFeedback
from fedring.ctl.local.presets import Dataset, Mode, preset_job
from fedring.ctl.operate.job_control import job_of
from fedring.ddp import DGCSGD, DGCState
from fedring.ddp.hooks import TopKState, by_name, topk_hook
from fedring.ddp.hooks.by_name import ReadyHook, hook_by_name
from fedring.ddp.hooks.own import BadHook, OwnState, own_hook
from fedring.ddp.hooks.plain import PlainState
from fedring.ddp.hooks.summing import Bucket
from fedring.offers import named
from fedring.server.round.plan import group_rules, rules_of
from fedring.train.dgc_optimizer import make_optimizer
from fedring.train.errors import SeamError
from fedring.train.jobs.data_parallel_table import HOOKS, DataParallel
from fedring.train.jobs.job import Job
from fedring.train.names.offered import Offered, collect
from fedring.train.names.seam import optimizer_factory
from fedring.train.orders.commands import job_spec, train_cmd
from fedring.train.plan import Plan

ROOT = Path(__file__).parents[3]


def job(**keys: Any) -> Job:
    return Job.model_validate({"mode": "data_parallel", **keys})


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"mu": 0.1}, "trainer and mu belong"),
        ({"trainer": "mine:train"}, "trainer and mu belong"),
        ({"data_parallel": {"hook": "zip"}}, "cannot name the hook 'zip': choose from none, fp16, bf16, int8, topk"),
        (
            {"data_parallel": {"hook": "powersgd", "feedback": "ef21"}},
            "powersgd takes the feedback ef or none",
        ),
        ({"data_parallel": {"hook": "powersgd", "start_iteration": 1}}, "start_iteration"),
        ({"data_parallel": {"hook": "noop"}}, "a job cannot name the hook 'noop'"),
        (
            {"data_parallel": {"hook": "topk(rati=0.1)"}},
            "topk has no parameter 'rati': it takes ratio, precision, ",
        ),
        ({"data_parallel": {"hook": "int8(chunk=6)"}}, "cannot work with chunk='6': Input should be a multiple of 4"),
        ({"data_parallel": {"hook": "fp16(noop)"}}, "a job cannot name the hook 'noop'"),
        ({"data_parallel": {"hook": "bf16(topk(rati=1))"}}, "topk has no parameter 'rati'"),
        ({"data_parallel": {"hook": "bf16(powersgd)", "feedback": "ef21"}}, "powersgd takes the feedback ef or none"),
        ({"momentum": 0, "data_parallel": {"hook": "dgc(nesterov=true)"}}, "nesterov needs a momentum above 0"),
        ({"data_parallel": {"rati": 0.1}}, "Extra inputs"),
        ({"data_parallel": {"ratio": 0}}, "greater than 0"),
        ({"data_parallel": {"buffers": "never"}}, "buffers"),
    ],
)
def test_keys_and_values_without_meaning_are_refused(keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        job(**keys)


def test_one_worker_delivers_for_the_group() -> None:
    spec = job(min_clients=4, min_clients_to_aggregate=2, data_parallel={"replacement_seconds": 3})
    rules = rules_of(spec, grace=5)
    assert (rules.min_to_aggregate, rules.close_at_minimum) == (1, True)
    group = group_rules(spec, target=4)
    assert (group.target, group.minimum, group.patience) == (4, 2, 3)
    assert group_rules(spec, target=1).minimum == 1


def test_the_table_travels_with_the_command_and_updates_are_not_compressed() -> None:
    spec = job(encoding="packed", data_parallel={"hook": "dgc", "buffers": 10})
    command = train_cmd(spec, job_spec(spec, 1), number=1, job_round=1)
    assert DataParallel.model_validate_json(command.job.data_parallel) == spec.data_parallel
    assert command.encoding.name == "fp32"
    federated = Job.model_validate({"encoding": "packed"})
    command = train_cmd(federated, job_spec(federated, 1), number=1, job_round=1)
    assert (command.job.data_parallel, command.encoding.name) == ("", "packed")


def test_the_example_is_a_valid_job() -> None:
    path = ROOT / "deploy" / "config" / "data-parallel.toml"
    table = job_of(path, ["data_parallel.hook=fp16"])
    assert Job.model_validate(table).data_parallel.hook == "fp16"
    assert tomllib.loads(path.read_text())["data_parallel"]["hook"] == "dgc"


@pytest.mark.parametrize("dataset", list(Dataset))
def test_flctl_try_has_a_data_parallel_job_for_each_data_set(dataset: Dataset) -> None:
    keys = preset_job(dataset, Mode.DATA_PARALLEL)
    spec = Job.model_validate(keys)
    assert (spec.mode, spec.subset_size, spec.name) == ("data_parallel", 0, f"{dataset} demo")


@pytest.mark.parametrize("name", HOOKS)
def test_each_hook_can_be_made(name: str) -> None:
    hook = make_hook(DataParallel.model_validate({"hook": name}), Plan(), nn.Linear(2, 2).named_parameters(), Offered())
    assert isinstance(hook.state, PlainState) == (name in ("none", "fp16", "bf16"))


def test_a_job_can_name_every_hook_that_leaves_replicas_equal() -> None:
    assert set(HOOKS) == set(by_name.HOOKS) - {"noop"}


def test_the_keys_of_a_hook_reach_its_state() -> None:
    keys = {"ratio": 0.2, "rank": 3, "start_iteration": 5, "feedback": "none", "clip": 2.0, "clip_norm": "global"}
    states = {name: state_of(name, **keys) for name in ("int8", "topk", "powersgd", "batched_powersgd", "dgc")}
    int8, topk, power, batched, dgc = states.values()
    assert int8.feedback == "none"
    assert (topk.feedback, topk.ratio) == ("none", 0.2)
    for state in (power, batched):
        assert not state.use_error_feedback
        assert (state.matrix_approximation_rank, state.start_powerSGD_iter) == (3, 5)
    assert (dgc.config.ratio, dgc.config.clip, dgc.config.clip_norm, dgc.config.momentum) == (0.2, 2.0, "global", 0.7)
    assert (state_of("topk").ratio, state_of("dgc").config.ratio) == (0.01, 0.001)


def test_parameters_that_the_table_has_no_key_for_follow_the_hook_s_name() -> None:
    state = state_of("powersgd(warm_start=false, random_seed=7)", rank=3)
    assert (state.warm_start, state.random_seed, state.matrix_approximation_rank) == (False, 7, 3)
    assert state_of("topk(ratio=0.5)", ratio=0.2).ratio == 0.5
    assert state_of("dgc(momentum=0.5, clip=none)", clip=2.0).config.clip is None


def test_a_wrapped_hook_gets_the_keys_of_its_table() -> None:
    table = DataParallel.model_validate({"hook": "fp16(dgc(nesterov=yes))", "clip": 2.0})
    assert table.hook_name == "dgc"
    assert state_of("fp16(powersgd(random_seed=7))", rank=3).matrix_approximation_rank == 3
    config = state_of(table.hook, clip=2.0).config
    assert (config.clip, config.nesterov) == (2.0, True)


def test_parameters_that_do_not_fit_the_job_are_refused_by_the_client() -> None:
    table = DataParallel.model_validate({"hook": "dgc(nesterov=true)"})
    with pytest.raises(SeamError, match="nesterov needs a momentum"):
        make_hook(table, Plan(momentum=0.0), [], Offered())


def state_of(name: str, **keys: Any) -> Any:
    table = DataParallel.model_validate({"hook": name, **keys})
    hook = make_hook(table, Plan(momentum=0.7), nn.Linear(2, 2).named_parameters(), Offered())
    return hook.state


def test_a_users_own_hook_must_be_offered() -> None:
    name = "tests.unit.group_member:own_hook"
    table = DataParallel.model_validate({"hook": name})
    assert isinstance(make_hook(table, Plan(), [], collect([group_member.__name__])).state, PlainState)
    with pytest.raises(SeamError, match=f"{name} is not offered here as hook"):
        make_hook(table, Plan(), [], collect(["fedring"]))


def own_state_of(function: Any) -> Any:
    return own_hook("mine:make", function, [("weight", nn.Parameter(torch.zeros(3)))]).state


@pytest.mark.usefixtures("_group")
def test_the_state_of_a_users_own_hook_is_kept() -> None:
    state, again = (own_state_of(group_member.own_with_state) for _ in range(2))
    assert (type(state), type(again)) == (OwnState, OwnState)
    state.own.sums["weight"].fill_(2)
    state.own.buckets = 3
    again.load_state_dict(state.state_dict())
    assert (again.own.buckets, again.own.sums["weight"].tolist()) == (3, [2.0, 2.0, 2.0])


def test_the_state_of_a_users_own_hook_may_be_a_hook_state_or_none() -> None:
    assert own_state_of(lambda parameters: (TopKState(None), topk_hook)).parameters.keys() == {"weight"}
    assert isinstance(own_state_of(lambda parameters: (None, group_member.own_hook)), PlainState)
    assert isinstance(own_state_of(group_member.own_hook), PlainState)


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (lambda parameters: 1 / 0, "the hook mine:make cannot be made: ZeroDivisionError: division by zero"),
        (lambda parameters: TopKState(None), "let it return a state and a hook"),
        (lambda parameters: ({}, topk_hook), "is a dict, which cannot be kept in checkpoints: let it be a fedring.ddp"),
    ],
)
def test_a_users_own_hook_that_cannot_be_made_is_refused(function: Any, sentence: str) -> None:
    with pytest.raises(BadHook, match=sentence):
        own_state_of(function)


def optimizer_of(hook: str, momentum: float = 0.9, name: str = "fedring.train.optimizers:sgd", **args: Any) -> Any:
    parameters, plan = [nn.Parameter(torch.zeros(3))], Plan(lr=0.1, momentum=momentum)
    factory = optimizer_factory(name, args, collect(named(optimizer=name)))
    state = make_hook(DataParallel.model_validate({"hook": hook}), plan, [("weight", parameters[0])], Offered()).state
    applied = state.config.momentum if isinstance(state, DGCState) else 0.0
    return make_optimizer(factory, parameters, plan.lr, plan.momentum, dgc_momentum=applied)


def test_momentum_acts_in_dgc_or_in_the_optimizer_and_the_log_says_where(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert optimizer_of("topk").param_groups[0]["momentum"] == 0.9
    assert optimizer_of("dgc(momentum=0)").param_groups[0]["momentum"] == 0.9
    assert not caplog.text
    group = optimizer_of("fp16(dgc)", weight_decay=0.25).param_groups[0]
    assert (group["momentum"], group["weight_decay"]) == (0.0, 0.25)
    assert "dgc applies the momentum 0.9 before it sends: the optimizer is made with momentum 0" in caplog.text
    assert optimizer_of("dgc", name="fedring.train.optimizers:adam").param_groups[0]["betas"] == (0.0, 0.999)


def test_the_momentum_of_weight_decay_stays_with_the_optimizer_of_dgc() -> None:
    optimizer = optimizer_of("dgc", name="fedring.ddp:DGCSGD", weight_decay=0.5, nesterov=True)
    assert isinstance(optimizer, DGCSGD)
    assert (optimizer.defaults["momentum"], optimizer.defaults["weight_decay"]) == (0.9, 0.5)


def test_an_optimizer_with_momentum_of_its_own_is_refused_with_dgc() -> None:
    with pytest.raises(SeamError, match=r"does not fit the hook: NAdam has betas=.* momentum would act twice") as wrong:
        optimizer_of("dgc", name="tests.unit.group_member:nadam")
    assert wrong.value.reason == "bad_job"
    with pytest.raises(SeamError, match=r"made with momentum 0; for Nesterov's momentum, use dgc\(nesterov=true\)"):
        optimizer_of("dgc", nesterov=True)


@pytest.fixture
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize(
    ("all_left", "steps", "owed"),
    [(True, 11, 2.0), (True, 12, 0.0), (False, 12, 2.0), (True, 13, 2.0)],
    ids=["by nobody", "by another worker", "without what this one had to send", "long ago, if at all"],
)
def test_what_was_sent_in_a_broken_step_is_owed_again_unless_it_was_completed(
    all_left: bool, steps: int, owed: float
) -> None:
    weight = nn.Parameter(torch.zeros(4))
    state = TopKState(None, ratio=0.25, named_parameters=[("weight", weight)])
    hook = JobHook(ReadyHook(state, topk_hook))
    hook.enter(0, 10)
    state.kept["weight"] = ErrorFeedback(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.empty(0))
    hook.end_step()
    bucket: Any = Bucket([weight], [torch.zeros(4)], 0, last=all_left)
    hook.function(state, bucket)
    state.pending.clear()
    state.kept["weight"] = ErrorFeedback(torch.tensor([1.0, 2.0, 3.0, 0.0]), torch.empty(0))  # 4 is on its way
    hook.leave()
    hook.enter(2, steps)
    assert state.kept["weight"].own.tolist() == [0.5, 1.0, 1.5, owed]


@pytest.mark.usefixtures("_group")
def test_a_newcomer_begins_with_what_all_workers_share() -> None:
    ours, theirs = (hook_by_name("dgc", [("bias", nn.Parameter(torch.zeros(3)))]) for _ in range(2))
    old, new = JobHook(ours), JobHook(theirs)
    for hook in (old, new):
        hook.enter(0, 0)
    momentum = old.state.state_dict()["momentum"]["bias"]
    momentum.fill_(1)
    old.end_step()
    for hook in (old, new):
        hook.leave()
    assert old.shared["bias"].tolist() == [1, 1, 1]
    new.shared["bias"].copy_(old.shared["bias"])  # as a broadcast does
    new.enter(0, 1)
    assert new.state.shared()["bias"].tolist() == [1, 1, 1]
