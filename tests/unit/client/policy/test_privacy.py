"""Differential privacy of whole clients: the noise, what it costs, the clip, the job's keys, and a site's demands."""

import json
import re
import subprocess
import sys
import time
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from scipy.stats import kstest
from tests.ledgers import account_in

from fedring.client.policy.ledger import TELL_SECONDS, Ledger
from fedring.client.policy.privacy import SitePolicy, refusal
from fedring.control.failure import Failure
from fedring.daemon.config import ConfigError
from fedring.privacy.account import epsilon
from fedring.privacy.charges import SkellamCharge
from fedring.privacy.noise import Noise
from fedring.server.model.private_mean import private_round
from fedring.server.state.noise_secret import erase_noise_secret, erase_noise_secrets, noise_secret
from fedring.server.state.rows import UpdateRow
from fedring.simulation import simulate
from fedring.train.jobs.job import Job
from fedring.train.jobs.privacy_table import ClientPrivacy
from fedring.v1 import federation_pb2 as pb

SECRET = bytes(range(32))
PRIVATE: dict[str, Any] = {"weights": "uniform", "evaluate": False}
FIXED = ClientPrivacy.model_validate({"noise_multiplier": 1.0, "clip": 0.5, "adaptive": False})
ADAPTIVE = ClientPrivacy.model_validate({"noise_multiplier": 1.0})


def update(client: str, norm: float, name: str = "") -> UpdateRow:
    return UpdateRow(1, client, "", name or f"update of {client}", (), 1, 0, 0.0, norm, 0.0)


# The noise


def test_noise_is_normal_and_the_same_in_pieces() -> None:
    noise = Noise(SECRET, ["round 1"])
    whole = noise.normal(0, 200_000)
    assert kstest(whole, "norm").pvalue > 1e-6
    assert kstest(whole[::2] * whole[1::2], (-whole[::2]) * whole[1::2]).pvalue > 1e-6  # pairs are independent
    for start, stop in ((0, 0), (0, 1), (1, 2), (3, 8), (99_999, 100_002)):
        assert np.array_equal(noise.normal(start, stop), whole[start:stop])


def test_noise_depends_on_every_part_of_its_context_and_on_the_secret() -> None:
    contexts = (["a", "b"], ["ab"], ["a", "b", ""], ["b", "a"], ["a", "c"])
    drawn = {Noise(secret, context).normal(0, 4).tobytes() for secret in (SECRET, SECRET[::-1]) for context in contexts}
    assert len(drawn) == 10
    with pytest.raises(ValueError, match="shorter than 32"):
        Noise(b"short", [])


def test_the_secret_of_a_round_stays_until_it_is_erased(tmp_path: Path) -> None:
    first = noise_secret(tmp_path, "0-7")
    assert len(first) == 32
    assert noise_secret(tmp_path, "0-7") == first
    assert noise_secret(tmp_path, "0-8") != first
    assert [oct(path.stat().st_mode & 0o777) for path in tmp_path.iterdir()] == ["0o600"] * 2
    erase_noise_secrets(tmp_path, keep=["0-7"])
    assert noise_secret(tmp_path, "0-7") == first
    erase_noise_secrets(tmp_path)
    assert not list(tmp_path.iterdir())
    for torn in (first[:5], bytes(32)):  # what a power loss may leave
        (tmp_path / "noise-0-9").write_bytes(torn)
        assert any(noise_secret(tmp_path, "0-9"))
        assert len(noise_secret(tmp_path, "0-9")) == 32


def test_a_round_that_ends_leaves_the_secrets_that_other_rounds_have_or_are_writing(tmp_path: Path) -> None:
    noise_secret(tmp_path, "0-7")
    other = noise_secret(tmp_path, "0-8")
    begun = tmp_path / "noise-0-9.new"
    begun.write_bytes(other)
    erase_noise_secret(tmp_path, "0-7")
    erase_noise_secret(tmp_path, "0-7")  # it is repeated after a failure of the disk
    assert {path.name for path in tmp_path.iterdir()} == {"noise-0-8", begun.name}
    assert noise_secret(tmp_path, "0-8") == begun.read_bytes() == other


# What it costs


@pytest.mark.parametrize(("multiplier", "rounds", "expected"), [(5.0, 50, 7.08), (1.0, 50, 57.3)])
def test_epsilon_is_that_of_renyi_privacy(multiplier: float, rounds: int, expected: float) -> None:
    assert epsilon([multiplier] * rounds, 1e-5) == pytest.approx(expected, rel=0.01)


def test_epsilon_adds_up_over_jobs_and_is_zero_without_any() -> None:
    assert epsilon([], 1e-5) == 0.0
    both = epsilon([5.0] * 50 + [1.0] * 10, 1e-5)
    assert max(epsilon([5.0] * 50, 1e-5), epsilon([1.0] * 10, 1e-5)) < both
    assert both == epsilon([1.0] * 10 + [5.0] * 50, 1e-5)


def test_a_missing_accountant_is_one_sentence() -> None:
    code = (
        "import sys; sys.modules['dp_accounting'] = None\n"
        "from fedring.privacy.account import check_accountant, NoAccountant\n"
        "try: check_accountant()\n"
        "except NoAccountant as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "install fedring[privacy], whose dp-accounting computes epsilon\n"


# The mean


@settings(max_examples=60, deadline=None)
@given(norms=st.lists(st.floats(0, 1e30), min_size=1, max_size=8), clip=st.floats(1e-6, 1e6))
def test_no_update_is_longer_than_the_clip(norms: list[float], clip: float) -> None:
    rows = [update(f"client-{index}", norm) for index, norm in enumerate(norms)]
    done = private_round(FIXED, rows, len(rows), clip, SECRET, "run")
    for row in rows:
        assert row.norm * done.guarded.factors.get(row.client_id, 1.0) <= clip
    assert set(done.guarded.weights.values()) == {1.0}
    assert done.mean.divisor == len(rows)


def test_the_noise_is_that_of_the_accepted_updates() -> None:
    rows = [update("a", 1.0), update("b", 1.0)]

    def noise(updates: list[UpdateRow], secret: bytes = SECRET) -> bytes:
        drawn = private_round(FIXED, updates, 2, 0.5, secret, "run").mean.noise
        assert drawn is not None
        return drawn.normal(0, 8).tobytes()

    assert noise(rows) == noise(rows[::-1])
    others = [noise(rows[:1]), noise([rows[0], update("b", 1.0, "another")]), noise(rows, bytes(32))]
    assert len({noise(rows), *others}) == 4


def test_the_noise_has_its_deviation() -> None:
    done = private_round(FIXED, [update("a", 1.0)], 4, 0.5, SECRET, "run")
    noisy = done.mean.added(np.zeros(100_000), 0)
    assert noisy.std() == pytest.approx(1.0 * 0.5 / 4, rel=0.02)


def test_an_adaptive_clip_costs_what_the_multiplier_says() -> None:
    privacy = ADAPTIVE
    clients = 100
    on_sum, on_count = privacy.sum_multiplier(clients), 2 * clients / 20
    assert on_sum**-2 + on_count**-2 == pytest.approx(privacy.noise_multiplier**-2)
    assert on_sum > privacy.noise_multiplier
    assert FIXED.sum_multiplier(clients) == FIXED.noise_multiplier


def test_an_adaptive_clip_finds_the_median_norm() -> None:
    privacy, clip = ADAPTIVE, 0.1
    generator = np.random.default_rng(0)
    clips = []
    for number in range(60):
        norms = 0.5 * np.exp(0.3 * generator.standard_normal(100))  # with the median 0.5
        rows = [update(f"client-{index}", float(norm), f"{number}") for index, norm in enumerate(norms)]
        clip = private_round(privacy, rows, 100, clip, SECRET, "run").next_clip
        clips.append(clip)
    assert clips[29] == pytest.approx(0.5, rel=0.1)
    assert np.mean(clips[30:]) == pytest.approx(0.5, rel=0.1)


def test_an_adaptive_clip_goes_on_in_small_steps_with_far_more_updates_than_expected() -> None:
    rows = [update(f"client-{index}", 0.5) for index in range(2000)]
    done = private_round(ADAPTIVE, rows, 20, 0.1, SECRET, "run")
    assert 0.1 < done.next_clip <= 0.1 * np.exp(0.1) * (1 + 1e-9)


# The job


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({}, 'dp: weights is "samples", and must be "uniform"'),
        ({"weights": "uniform"}, "dp: evaluate is true, and must be false"),
        (PRIVATE | {"mode": "data_parallel"}, 'dp: mode is "data_parallel", and must be "federated"'),
        (PRIVATE | {"normalize_steps": True}, "dp: normalize_steps is true, and must be false"),
        (PRIVATE | {"scaffold": True, "momentum": 0.0}, "dp: scaffold is true, and must be false"),
        (PRIVATE | {"update_clip": 1.0}, "dp: update_clip is 1, and must be 0, because dp.clip takes its place"),
        (PRIVATE | {"update_clip_factor": 2.0}, "dp: update_clip_factor is 2, and must be 0"),
        (PRIVATE | {"close_at_minimum": True}, "dp: close_at_minimum is true"),
        (PRIVATE | {"straggler_factor": 2.0}, "dp: straggler_factor is 2"),
        (PRIVATE | {"aggregation": {"rule": "median"}}, 'dp: aggregation.rule is "median", and must be "mean"'),
        (PRIVATE | {"best_by": "max train/f1"}, 'dp: best_by = "max train/f1" is never known'),
    ],
)
def test_a_job_that_would_leak_is_refused(keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(sentence)):
        Job.model_validate({"dp": {"noise_multiplier": 1.0, "adaptive": False}, **keys})


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({}, "Field required"),
        ({"noise_multiplier": 0}, "greater than or equal to 0.000000001"),
        ({"noise_multiplier": inf, "adaptive": False}, "less than or equal to 1000000"),
        ({"noise_multiplier": 1, "adaptive": False, "clip": 1e-30}, "greater than or equal to 0.000000000001"),
        ({"noise_multiplier": 1, "adaptive": False, "delta": 0.5}, "dp.delta = 0.5 must be below 1 / 2 clients"),
        ({"noise_multiplier": 1, "adaptive": False, "delta": 1}, "less than 1"),
        ({"noise_multiplier": 1, "noise": 2}, "not permitted"),
        ({"noise_multiplier": 1}, "noise_multiplier = 1 with adaptive needs rounds of more than 10 clients"),
    ],
)
def test_bad_settings_are_refused(table: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(sentence)):
        Job.model_validate({"dp": table, **PRIVATE})


# What a site demands


def command(number: int = 1, *, mode: str = "federated", results: int = 5, dp: str | None = None) -> pb.TrainCmd:
    text = FIXED.model_dump_json() if dp is None else dp
    return pb.TrainCmd(run_id="run", round=number, job=pb.JobSpec(mode=mode, min_results=results, dp=text))


@pytest.mark.parametrize(
    ("policy", "job", "sentence"),
    [
        ({"min_clients": 6}, command(), "privacy.min_clients = 6 is above the job's min_clients_to_aggregate = 5"),
        ({"min_clients": 1}, command(results=0), "privacy.min_clients = 1 is above"),
        ({"min_clients": 1}, command(mode="pipeline"), "privacy.min_clients = 1 refuses the mode pipeline"),
        ({}, command(dp='{"noise": 1}'), """this client does not understand the job's dp = {"noise": 1}"""),
        ({"min_noise_multiplier": 1.0}, command(dp=""), "privacy.min_noise_multiplier = 1 demands a job with [dp]"),
        ({"max_clip": 1.0}, command(dp=""), "privacy.max_clip = 1 demands a job with [dp]"),
        ({"min_noise_multiplier": 1.1}, command(), "is above the job's dp.noise_multiplier = 1"),
        ({"max_clip": 0.4}, command(), "privacy.max_clip = 0.4 is below the job's dp.clip = 0.5"),
        (
            {"max_clip": 1.0},
            command(dp=ADAPTIVE.model_dump_json()),
            "demands dp.adaptive = false",
        ),
        ({"max_epsilon": 3.0}, command(), "would take this client's epsilon to"),
    ],
)
def test_a_job_that_is_weaker_than_the_policy_is_refused(
    policy: dict[str, Any], job: pb.TrainCmd, sentence: str, tmp_path: Path
) -> None:
    assert sentence in refusal(SitePolicy.model_validate(policy), Ledger(tmp_path), job)


def test_a_job_that_is_strong_enough_is_taken(tmp_path: Path) -> None:
    policy = SitePolicy.model_validate(
        {"min_clients": 5, "min_noise_multiplier": 1.0, "max_clip": 0.5, "max_epsilon": 50.0}
    )
    assert refusal(policy, Ledger(tmp_path), command()) == ""
    assert refusal(SitePolicy.model_validate({}), Ledger(tmp_path), command(mode="pipeline", dp="")) == ""


def test_the_ledger_charges_each_update_once_and_survives_a_restart(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    for number in (1, 1, 2):
        ledger.charge(command(number), f"update {number}")
    ledger.charge(command(3, dp=""), "update 3")
    assert ledger.epsilon_with(command(2), 1e-5, update="update 2") == epsilon([1.0, 1.0], 1e-5)
    again = Ledger(tmp_path)
    again.charge(command(2), "update 2")  # the one before the restart
    assert again.epsilon_with(command(3), 1e-5) == epsilon([1.0] * 3, 1e-5)
    policy = SitePolicy.model_validate({"max_epsilon": epsilon([1.0] * 3, 1e-5)})
    assert refusal(policy, again, command(3)) == ""
    again.charge(command(3), "update 3")
    assert refusal(policy, again, command(3), update="update 3") == ""  # it is asked for again
    for name in ("", "another update"):  # what is not made yet costs, too
        assert "above its privacy.max_epsilon" in refusal(policy, again, command(3), update=name)
    restored, other = command(3), command(3)
    restored.epoch, other.model_digest = 1, "another model"
    weaker = command(3, dp=FIXED.model_copy(update={"noise_multiplier": 0.1}).model_dump_json())
    for asked in (restored, other, weaker):  # the noise is another one, or what is trained
        assert "above its privacy.max_epsilon" in refusal(policy, again, asked, update="update 3")


def test_the_ledger_counts_integers_with_skellam_noise_too(tmp_path: Path) -> None:
    charge = SkellamCharge(50.0, 100, 2500.0)
    (tmp_path / "privacy.json").write_text(json.dumps({"last": "", "rounds": {str(charge): 2, "1.0": 1}}))
    Ledger(tmp_path).charge(command(7), "update 7")
    rounds = account_in(tmp_path)["rounds"]
    assert rounds == {str(charge): 2, "1.0": 2}
    assert Ledger(tmp_path).epsilon_with(command(8), 1e-5) == epsilon([charge, charge, 1.0, 1.0, 1.0], 1e-5)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        '{"last": "", "rounds": {"1e200": 1}}',
        '{"last": "", "rounds": {"1": 1e400}}',
        '{"last": "", "rounds": {"1": -1}}',
        '{"last": "", "rounds": {"skellam 1 1 0": 1}}',
        '{"last": "", "rounds": 3}',
        '{"last": "", "rounds": {}, "jobs": [{"run": "run", "job": 1}]}',
        '{"rounds": {}, "last": "", "jobs": [{"run":"","job":1,"failed": -1, "samples": 0, "epoch": 0, "round": 1}]}',
    ],
)
def test_a_damaged_ledger_is_not_taken_for_an_empty_one(text: str, tmp_path: Path) -> None:
    (tmp_path / "privacy.json").write_text(text)
    with pytest.raises(ConfigError, match=r"privacy\.json says what privacy this client has spent"):
        Ledger(tmp_path)


def test_the_ledger_is_written_whole(tmp_path: Path) -> None:
    Ledger(tmp_path).charge(command(7), "update 7")
    known = {"last": "run 0 7  1.0 update 7", "rounds": {"1.0": 1}}
    assert account_in(tmp_path) == known
    assert [path.name for path in tmp_path.iterdir()] == ["privacy.json"]


# How many rounds may fail


def in_job(job: int, round_: int, *, epoch: int = 0, covered: bool = True) -> pb.TrainCmd:
    spec = pb.JobSpec(mode="federated", job_id=job, dp=FIXED.model_dump_json() if covered else "")
    return pb.TrainCmd(run_id="run", epoch=epoch, round=round_, job=spec)


def test_failures_in_a_row_are_counted_for_each_job_and_outlive_the_process(tmp_path: Path) -> None:
    policy, ledger = SitePolicy.model_validate({"max_failed_rounds": 2}), Ledger(tmp_path)
    assert not policy.demands
    for round_ in (1, 1, 2):  # one round twice
        ledger.note_failed(in_job(1, round_))
    ledger.note_failed(in_job(2, 3))
    again = Ledger(tmp_path)
    told = "this client has failed in 2 rounds of this job in a row: its privacy.max_failed_rounds"
    assert refusal(policy, again, in_job(1, 3)) == told
    assert refusal(policy, again, in_job(1, 2)) == ""  # its zeros may have to be sent again
    assert refusal(policy, again, in_job(1, 2, epoch=1)) == told  # after the server was restored
    for other in (in_job(2, 4), in_job(3, 5), in_job(1, 3, covered=False)):
        assert refusal(policy, again, other) == ""
    assert refusal(SitePolicy.model_validate({"max_failed_rounds": 0}), again, in_job(1, 3)) == ""
    again.note_trained(in_job(1, 3), 0)
    assert refusal(policy, Ledger(tmp_path), in_job(1, 4)) == ""


def test_failures_are_told_of_one_job_a_day(tmp_path: Path) -> None:
    ledger, began = Ledger(tmp_path), 1_800_000_000.0
    assert ledger.may_tell(in_job(1, 3), began)
    ledger.note_told(in_job(1, 3), began)
    ledger.note_trained(in_job(1, 4), 0)
    ledger.note_told(in_job(1, 5), began + 1000)
    again = Ledger(tmp_path)
    assert again.may_tell(in_job(1, 5), began + 1000)
    assert not again.may_tell(in_job(2, 6), began + TELL_SECONDS - 1)
    assert again.may_tell(in_job(2, 6), began + TELL_SECONDS)
    policy = SitePolicy.model_validate({"max_failed_rounds": 1})
    again.note_told(in_job(3, 7), time.time())
    for job in (3, 4):
        again.note_failed(in_job(job, 7 + job))
    assert refusal(policy, again, in_job(3, 20)).startswith("this client has failed in 1 rounds of this job")
    assert refusal(policy, again, in_job(4, 20)) == ""


def test_a_job_whose_failures_were_told_tells_nothing_more(tmp_path: Path) -> None:
    ledger, policy = Ledger(tmp_path), SitePolicy.model_validate({"max_failed_rounds": 2})
    for round_ in (1, 2):
        ledger.note_failed(in_job(1, round_))
    assert refusal(policy, ledger, in_job(1, 2)) == ""  # its zeros may have to be sent again
    ledger.note_told(in_job(1, 3), time.time())
    for round_ in (2, 3):  # the round that failed last could be asked for with any other model
        assert refusal(policy, ledger, in_job(1, round_)).startswith("this client has failed in 2 rounds")
    for job in range(2, 80):  # so many others must not make it forgotten
        ledger.note_failed(in_job(job, job))
    assert refusal(policy, Ledger(tmp_path), in_job(1, 99)).startswith("this client has failed in 2 rounds")
    assert [ledger.note_of(in_job(job, 99)).failed for job in (1, 16, 17, 79)] == [2, 0, 1, 1]


def test_what_an_update_counts_for_is_kept_only_where_updates_are_weighed(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.note_trained(in_job(1, 1), 0)
    assert not (tmp_path / "privacy.json").exists()
    ledger.note_trained(in_job(1, 1), 50)
    ledger.note_failed(in_job(1, 2))
    assert Ledger(tmp_path).note_of(in_job(1, 3)).samples == 50
    for job in range(2, 80):
        ledger.note_failed(in_job(job, job))
    assert [Ledger(tmp_path).note_of(in_job(job, 99)).failed for job in (1, 15, 16, 79)] == [0, 0, 1, 1]


def test_a_simulation_ends_where_the_job_would(tmp_path: Path) -> None:
    table = {"noise_multiplier": 5.0, "adaptive": False, "max_epsilon": 1.3}
    job: dict[str, Any] = {"min_clients": 4, "rounds": 5, "dp": table, **PRIVATE}
    report = simulate(job, clients=4, workers=1, out=tmp_path)
    assert len(report["rounds"]) == 2
    job["dp"]["max_epsilon"] = 0.1
    with pytest.raises(Failure, match=r"dp\.max_epsilon = 0\.1 is less than 0\.795, the epsilon of one round"):
        simulate(job, clients=4, workers=1)
