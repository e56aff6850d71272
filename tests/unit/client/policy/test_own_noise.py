"""Noise that the clients of secure aggregation add: jobs, plans, what a round costs, sums, and what a site demands."""

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from dp_accounting.rdp import rdp_privacy_accountant
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from pydantic import ValidationError
from tests.ledgers import account_in
from tests.masked_groups import Bytes, sent
from tests.secure_sums import Client, Group, command_of, names_of, survivors_of

from fedring.client.policy.ledger import Ledger
from fedring.client.policy.privacy import SitePolicy, own_noise_refusal, refusal
from fedring.client.secure.protection import private_integers
from fedring.codec import CodecError
from fedring.control.failure import Failure
from fedring.privacy.account import epsilon
from fedring.secure import SecureError
from fedring.secure.limits import fewest_survivors, honest_survivors, threshold
from fedring.secure.masks import mask, masked_packet, wrap
from fedring.server.model.masked_sum import GroupMasks, PrivateIntegers, open_groups
from fedring.server.model.transforms.listing import transforms_of
from fedring.server.secure import events as ev
from fedring.server.secure.machine import apply, form_groups
from fedring.simulation import simulate
from fedring.train.jobs.job import Job
from fedring.train.jobs.privacy_table import ClientPrivacy
from fedring.train.jobs.secure_table import SecureAggregation
from fedring.v1 import federation_pb2 as pb
from fedring.v1 import secure_pb2 as wire

SEED = bytes(range(32))
NEEDED = 4
TABLE: dict[str, Any] = {"noise_multiplier": 1.0, "clip": 0.5, "adaptive": False, "noise_by": "clients"}
FITS: dict[str, Any] = {
    "weights": "uniform",
    "evaluate": False,
    "min_clients": 5,
    "min_clients_to_aggregate": 4,
    "dp": TABLE,
    "secure_aggregation": {},
}


def table(**keys: Any) -> ClientPrivacy:
    return ClientPrivacy.model_validate(TABLE | keys)


# Jobs


def test_a_job_whose_clients_add_the_noise() -> None:
    job = Job.model_validate(FITS)
    assert job.dp is not None
    assert job.dp.by_clients
    assert not ClientPrivacy.model_validate({"noise_multiplier": 1.0}).by_clients
    Job.model_validate(FITS | {"secure_aggregation": {"group_size": 4}, "min_clients": 9, "dp": TABLE | {"bits": 20}})


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"dp": TABLE | {"noise_by": "server"}}, 'noise_by is "server", and must be "clients" with secure_aggregation'),
        ({"secure_aggregation": None}, "needs the table .secure_aggregation., because the noise of one client alone"),
        ({"dp": TABLE | {"adaptive": True}}, "dp.adaptive is true, and must be false, because nobody knows how many"),
        ({"secure_aggregation": {"keep_ratio": 0.5}}, "secure_aggregation.keep_ratio is 0.5, and must be 1, because"),
        ({"weights": "samples"}, "weights"),
        ({"aggregation": {"rule": "median"}, "secure_aggregation": {"group_size": 5}}, "aggregation.rule"),
        ({"dp": TABLE | {"bits": 33}}, "bits"),
        ({"dp": TABLE | {"noise_by": "nobody"}}, "noise_by"),
    ],
    ids=["by-server", "alone", "adaptive", "blocks", "weighted", "robust", "bits", "nobody"],
)
def test_a_job_that_does_not_go_with_it_is_refused(keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        Job.model_validate(FITS | keys)


def test_a_job_with_too_few_bits_is_refused_when_it_is_queued() -> None:
    keys = {"name": "digits", "dp": TABLE | {"bits": 8}}
    with pytest.raises(Failure, match=r"dp: bits = 8 are too few for \d+ values of"):
        simulate(FITS | keys, clients=5, workers=1, threads=1)


# Plans, and what a round costs


@pytest.mark.parametrize(("clients", "honest"), [(3, 2), (4, 2), (5, 3), (8, 4), (33, 13), (100, 34)])
def test_the_noise_is_enough_without_those_that_are_lost_or_dishonest(clients: int, honest: int) -> None:
    assert honest_survivors(clients, 1, trusted=False) == honest
    dishonest = threshold(clients) - honest
    assert dishonest == 1 or 3 * dishonest < clients <= 3 * (dishonest + 1)
    plan = table(noise_multiplier=2.0).plan(clients, 10_000, 1)
    assert plan.local_variance * honest >= (2.0 * plan.rounded_norm) ** 2 * (1 - 1e-9)
    assert 2.0 <= plan.multiplier < 2.0 * 1.0001
    assert plan.rounded_norm < 1.0101 * plan.clip * plan.scale


def test_more_survivors_and_trusted_clients_need_less_noise_each() -> None:
    assert [fewest_survivors(100, needed) for needed in (1, 67, 95, 100, 101)] == [67, 67, 95, 100, 67]
    assert honest_survivors(100, 95, trusted=False) == 62
    assert honest_survivors(100, 95, trusted=True) == 94
    plans = [
        table(trust_clients=trusted).plan(100, 1000, needed)
        for trusted, needed in ((False, 1), (False, 95), (True, 95))
    ]
    shares = [plan.local_variance / plan.rounded_norm**2 for plan in plans]  # with the multiplier 1
    assert shares == pytest.approx([1 / 34, 1 / 62, 1 / 94])


@settings(max_examples=60, deadline=None)
@given(fewest=st.integers(1, 130), more=st.integers(0, 400), size=st.sampled_from([0, 3, 5, 40, 60, 99, 100]))
def test_all_sizes_of_groups_are_known_before(fewest: int, more: int, size: int) -> None:
    secure = SecureAggregation.model_validate({"group_size": size})
    least = max(3, fewest, threshold(size) if size else 0)
    sizes, bounded = secure.group_sizes(fewest, 0), secure.group_sizes(fewest, least + more)
    drawn = form_groups([f"c{number:04}" for number in range(least + more)], size, Random(1))
    assert {len(group) for group in drawn} <= bounded <= sizes
    assert min(sizes) >= 3
    assert max(sizes) <= 100


def test_a_round_is_charged_at_least_what_each_of_its_groups_costs() -> None:
    for multiplier in (0.3, 1.0, 5.0):
        dp = table(noise_multiplier=multiplier)
        sizes = range(3, 101, 7)
        charge = dp.charge_of(sizes, 25_450, 1)
        plans = [dp.plan(size, 25_450, 1).charge for size in sizes]
        for order in rdp_privacy_accountant.DEFAULT_RDP_ORDERS:
            assert charge.renyi(order) >= max(plan.renyi(order) for plan in plans) * (1 - 1e-12)
        assert epsilon([charge] * 50, 1e-5) < 1.07 * epsilon([multiplier] * 50, 1e-5)
    assert dp.charge_of([7], 25_450, 1) == dp.plan(7, 25_450, 1).charge


def test_no_round_of_a_job_costs_more_than_what_is_asked_for_before() -> None:
    job = Job.model_validate(FITS)
    assert job.dp is not None
    most = epsilon([transforms_of(job).most_charged(job, 1000)], 1e-5)
    assert most >= max(epsilon([job.dp.plan(clients, 1000, 4).charge], 1e-5) for clients in (4, 5, 50, 100))
    sampled = Job.model_validate(FITS | {"sample_clients": 3})  # a round draws the four that it needs all the same
    assert transforms_of(sampled).most_charged(sampled, 1000) == job.dp.plan(4, 1000, 4).charge
    gaussian = Job.model_validate(FITS | {"dp": {"noise_multiplier": 0.1}, "secure_aggregation": None})
    assert transforms_of(gaussian).most_charged(gaussian, 1000) == 0.1


# Sums


def summed(
    deltas: Sequence[NDArray[np.float32]], dp: ClientPrivacy, clients: int, cuts: Sequence[int] = ()
) -> NDArray[np.float64]:
    """Return what a server reads of the sum of a group of which these clients have delivered."""
    length = len(deltas[0])
    plan = dp.plan(clients, length, NEEDED)
    words = [wrap(private_integers(delta, plan, SEED), plan.bits) for delta in deltas]
    own = bytes(32)
    words[0] += mask(own, plan.bits, 0, plan.padded)
    names = tuple(f"c{number:03}" for number in range(len(deltas)))
    payloads = {name: Bytes(b"".join(masked_packet(each, plan.bits))) for name, each in zip(names, words, strict=True)}
    group = GroupMasks(names[0], names, plan.bits, ((own, 1),), PrivateIntegers(plan, SEED))
    (contribution,) = open_groups([group], wire.SecureRound(clip=dp.clip), sent(payloads), length)
    assert contribution.weight == len(deltas)
    assert contribution.values is not None
    total = np.zeros(length)
    for start, stop in zip([0, *cuts], [*cuts, length], strict=True):
        contribution.values.add(start, stop, total[start:stop], 1.0)
    return total


def test_the_sum_is_right_wherever_it_is_cut_and_long_updates_are_shortened() -> None:
    rng, dp = np.random.default_rng(5), table(noise_multiplier=1e-4, bits=24)
    deltas = [rng.normal(0, 0.001, 9_000).astype(np.float32) for _ in range(4)]
    deltas.append(np.full(9_000, 1.0, np.float32))
    expected = np.sum(deltas[:4], axis=0, dtype=np.float64) + 0.5 / np.sqrt(9_000)
    norms = [float(np.linalg.norm(delta)) for delta in deltas]
    assert max(norms[:4]) < dp.clip < norms[4]
    for cuts in ([], [1, 17, 4095, 4096, 8999], [4097, 8192]):
        found = summed(deltas, dp, 5, cuts)
        assert np.linalg.norm(found - expected) < 0.03 * np.linalg.norm(expected), cuts


@pytest.mark.parametrize("lost", [0, 1], ids=["everybody", "one-lost"])
def test_the_sum_has_at_least_the_noise_that_is_claimed_also_without_the_dishonest(lost: int) -> None:
    dp, size, clients = table(noise_multiplier=2.0), 40_000, 5
    noise = summed([np.zeros(size, np.float32)] * (clients - lost), dp, clients)
    claimed = 2.0 * dp.clip
    share = (clients - lost) / honest_survivors(clients, NEEDED, trusted=False)
    assert noise.std() == pytest.approx(claimed * np.sqrt(share), rel=0.03)
    assert abs(noise.mean()) < 6 * noise.std() / np.sqrt(size)
    honest = summed([np.zeros(size, np.float32)] * honest_survivors(clients, NEEDED, trusted=False), dp, clients)
    assert honest.std() > 0.97 * claimed


def test_a_value_that_is_not_finite_is_not_sent() -> None:
    plan = table().plan(5, 10, 4)
    with pytest.raises(CodecError, match="non_finite"):
        private_integers(np.full(10, np.nan, np.float32), plan, SEED)


def test_the_noise_of_a_client_is_never_the_same() -> None:
    plan, delta = table().plan(5, 1000, 4), np.zeros(1000, np.float32)
    assert not np.array_equal(private_integers(delta, plan, SEED), private_integers(delta, plan, SEED))


# What a site demands, and its account


MASKS = b"masks".hex()


def command(number: int = 1, *, secure: bool = True, **keys: Any) -> pb.TrainCmd:
    job = pb.JobSpec(mode="federated", dp=table(**keys).model_dump_json(), min_results=4)
    sent = pb.TrainCmd(run_id="run", round=number, model_digest="model", job=job)
    if secure:
        sent.secure.clip = 0.5
    return sent


def policy(**keys: Any) -> SitePolicy:
    return SitePolicy.model_validate(keys)


def test_a_site_can_demand_that_the_noise_is_its_own(tmp_path: Path) -> None:
    ledger, own = Ledger(tmp_path), policy(noise_by_clients=True)
    assert own.demands
    assert refusal(own, ledger, command()) == ""
    assert "privacy.noise_by_clients = true refuses noise of the server" in refusal(
        own, ledger, command(secure=False, noise_by="server")
    )
    plain = pb.TrainCmd(job=pb.JobSpec(mode="federated", min_results=4))
    assert "privacy.noise_by_clients = true demands a job with [dp]" in refusal(own, ledger, plain)
    assert refusal(policy(), ledger, plain) == ""


@pytest.mark.parametrize(("secure", "noise_by"), [(False, "clients"), (True, "server")])
def test_a_job_whose_updates_would_go_out_without_noise_is_refused(tmp_path: Path, secure: bool, noise_by: str) -> None:
    why = refusal(policy(), Ledger(tmp_path), command(secure=secure, noise_by=noise_by))
    assert why.startswith(f'dp.noise_by = "{noise_by}" of this job does not go with')


def test_the_account_counts_what_the_group_costs_once_a_round(tmp_path: Path) -> None:
    ledger, plan = Ledger(tmp_path), table().plan(5, 1000, 4)
    for number in (1, 1, 2):
        ledger.charge_own(command(number), plan.charge, MASKS)
        ledger.charge(command(number), "update")  # what is sent again was charged before
    assert account_in(tmp_path)["rounds"] == {str(plan.charge): 2}
    again = Ledger(tmp_path)
    assert again.epsilon_with(command(2), 1e-5) == epsilon([plan.charge] * 2, 1e-5)
    assert again.epsilon_with(command(2), 1e-5, plan.charge, update=MASKS) == epsilon([plan.charge] * 2, 1e-5)
    assert again.epsilon_with(command(3), 1e-5, plan.charge, update=MASKS) == epsilon([plan.charge] * 3, 1e-5)


def test_a_round_that_a_server_makes_a_client_begin_anew_is_charged_anew(tmp_path: Path) -> None:
    ledger, plan, others = Ledger(tmp_path), table().plan(5, 1000, 4), b"other masks".hex()
    ledger.charge_own(command(), plan.charge, MASKS)
    limited = policy(max_epsilon=epsilon([plan.charge], 1e-5))
    assert own_noise_refusal(limited, ledger, command(), plan, MASKS) == ""
    assert "above its privacy.max_epsilon" in own_noise_refusal(limited, ledger, command(), plan, others)
    ledger.charge_own(command(), plan.charge, others)
    assert account_in(tmp_path)["rounds"] == {str(plan.charge): 2}


def test_a_site_that_demands_noise_does_not_rely_on_all_clients_unless_it_says_so(tmp_path: Path) -> None:
    ledger, trusting = Ledger(tmp_path), command(trust_clients=True)
    for key, value in (("noise_by_clients", True), ("min_noise_multiplier", 1.0), ("max_clip", 1.0)):
        assert "privacy.trust_clients = false refuses" in refusal(policy(**{key: value}), ledger, trusting)
        assert refusal(policy(**{key: value, "trust_clients": True}), ledger, trusting) == ""
    assert refusal(policy(), ledger, trusting) == ""
    assert not policy(trust_clients=True).demands


def test_a_site_compares_its_limits_with_the_noise_of_its_group(tmp_path: Path) -> None:
    ledger, plan = Ledger(tmp_path), table().plan(5, 1000, 4)
    spent = epsilon([plan.charge], 1e-5)
    assert own_noise_refusal(policy(min_noise_multiplier=1.0, max_epsilon=spent), ledger, command(), plan, MASKS) == ""
    assert "is above the noise of its group: 1" in own_noise_refusal(
        policy(min_noise_multiplier=1.01), ledger, command(), plan, MASKS
    )
    assert "above its privacy.max_epsilon" in own_noise_refusal(
        policy(max_epsilon=0.999 * spent), ledger, command(), plan, MASKS
    )


# Fewer survivors than the noise is made for


@pytest.mark.parametrize(("needed", "refused"), [(4, False), (5, True), (6, False)])
def test_clients_do_not_help_to_see_a_sum_of_fewer_than_the_noise_is_made_for(
    tmp_path: Path, needed: int, refused: bool
) -> None:
    asked = command_of()
    asked.job.dp, asked.job.min_results = table().model_dump_json(), needed
    names = names_of(5)
    group = Group({name: Client(name, tmp_path) for name in names}, asked).exchange()
    for name in names:
        group.party(name).mask(np.zeros(16, np.int64), 20)
        group.party(name).bind("payload")
    party = group.party(names[0])
    if refused:
        with pytest.raises(SecureError, match="4 clients have survived: 5 are needed"):
            party.on_survivors(survivors_of(names[:4]))
    party.on_survivors(survivors_of(names if refused else names[:4]))


@pytest.mark.parametrize(("own_noise", "reason"), [(False, ""), (True, "too_few_to_unmask")])
def test_a_server_asks_no_group_for_a_sum_of_too_few(own_noise: bool, reason: str) -> None:
    names = tuple("abcde")
    rules = ev.SecureRules(30.0, needed=5, own_noise=own_noise)
    state = ev.ProtocolState(rules, frozenset(names), 0.0)
    peers = ev.PeersChosen(0, names)
    for event in (
        ev.Grouped((names,)),
        peers,
        ev.UpdatesClosed(frozenset(names[:4])),
        ev.SurvivorsChosen((names[:4],)),
    ):
        state = apply(state, event, 0.0)
    assert state.groups[0].reason == reason


# Simulations


def test_a_simulation_adds_the_clients_noise_and_ends_before_it_spends_too_much() -> None:
    keys: dict[str, Any] = {"rounds": 3, "lr": 0.1, "evaluate_on_server": True, "min_clients": 6}
    keys["min_clients_to_aggregate"] = 5
    little = {**FITS, **keys, "dp": TABLE | {"noise_multiplier": 0.001, "clip": 2.0}}
    quiet = simulate(little, clients=6, workers=1, threads=1)
    plain = simulate({**FITS, **keys, "dp": None, "secure_aggregation": None}, clients=6, workers=1, threads=1)
    assert quiet["accuracy"] == pytest.approx(plain["accuracy"], abs=0.05)
    assert quiet["rounds"][0]["clients"] == 6
    spent = epsilon([table(noise_multiplier=20.0).plan(6, quiet["parameters"], 5).charge] * 2, 1e-5)
    limited = {**FITS, **keys, "dp": TABLE | {"noise_multiplier": 20.0, "max_epsilon": 1.05 * spent}}
    assert len(simulate(limited, clients=6, workers=1, threads=1)["rounds"]) == 2
