"""Virtual time: what clients take, what the server's machine makes of it, and what is refused."""

import json
import random
from collections.abc import Callable, Mapping
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from fedring.control.failure import Failure
from fedring.daemon.config import ConfigError
from fedring.server.round.events import RoundRules
from fedring.simulation import simulate
from fedring.simulation.clock import TimedAnswer, VirtualRounds
from fedring.simulation.timing import Availability, Pace, Spread, Timing, pace_of, timing_of

Call = Callable[..., tuple[int, str, str]]
JOB = {"rounds": 2, "model_args": {"hidden": 8}, "batch_size": 16}
TIMES = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 40.0}


def rounds_of(comes: Mapping[str, float] | None = None) -> VirtualRounds:
    """Return the rounds of clients that are always there, or that come at these times, for 50 of each 100 s."""
    paces = {name: Pace(1.0, inf, at) for name, at in (comes or dict.fromkeys(TIMES, 0.0)).items()}
    return VirtualRounds(paces, Availability(share=0.5 if comes else 1.0, period_seconds=100.0))


def answers(**times: float) -> dict[str, TimedAnswer]:
    return {client: TimedAnswer(seconds, delivers=True) for client, seconds in times.items()}


def test_a_round_takes_its_download_its_steps_and_its_upload() -> None:
    timing = Timing.model_validate(
        {"seconds_per_step": 0.5, "speed": {"clients": {"a": 0.1}}, "bandwidth": {"clients": {"a": 8}}}
    )
    assert pace_of(timing, "a", 0).seconds(down=2_000_000, steps=4, up=500_000) == pytest.approx(2 + 20 + 0.5)
    assert pace_of(Timing.model_validate({}), "a", 0).seconds(down=1 << 40, steps=3, up=1 << 40) == pytest.approx(0.03)


def test_speeds_are_spread_as_they_say_and_depend_on_the_seed_and_the_client_alone() -> None:
    spread = [Spread.model_validate({"median": 2, "spread": 10}).of("a", random.Random(n)) for n in range(2000)]
    assert 2 / 10**0.5 <= min(spread) < 0.7 < 6 < max(spread) <= 2 * 10**0.5
    normal = sorted(Spread.model_validate({"median": 2, "sigma": 1}).of("a", random.Random(n)) for n in range(2000))
    assert normal[1000] == pytest.approx(2.0, rel=0.1)
    assert normal[1682] / normal[1000] == pytest.approx(2.718, rel=0.2)
    timing = Timing.model_validate({"speed": {"spread": 10}, "bandwidth": {"sigma": 1.0}})
    assert pace_of(timing, "client-1", 5) == pace_of(timing, "client-1", 5)
    assert len({pace_of(timing, f"client-{n}", seed) for n in range(5) for seed in (5, 6)}) == 10


@pytest.mark.parametrize(
    ("rules", "seconds", "left_out"),
    [
        (RoundRules(), 40.0, {}),
        (RoundRules(deadline=20.0), 20.0, {"d": "deadline"}),
        (RoundRules(deadline=3.0), 3.0, {"d": "deadline"}),  # who answers at the deadline is in
        (RoundRules(straggler_factor=1.0), 2.0, {"c": "straggler", "d": "straggler"}),
        (RoundRules(straggler_factor=2.0, min_to_aggregate=3), 4.0, {"d": "straggler"}),
        (RoundRules(close_at_minimum=True, min_to_aggregate=2), 2.0, {"c": "closed early", "d": "closed early"}),
    ],
)
def test_the_rules_of_the_server_say_when_a_round_ends(
    rules: RoundRules, seconds: float, left_out: dict[str, str]
) -> None:
    rounds = rounds_of()
    for number in (1, 2):  # nothing of a round reaches the next one
        assert rounds.begin(number, rules) == [*TIMES]
        times = rounds.finish(answers(**TIMES))
        assert (times.began, times.ended) == ((number - 1) * seconds, number * seconds)
        assert times.left_out == left_out
        assert list(times.delivered.items()) == [each for each in TIMES.items() if each[0] not in left_out]


def test_a_client_that_fails_is_not_waited_for() -> None:
    rounds = rounds_of()
    rounds.begin(1, RoundRules())
    times = rounds.finish({**answers(**TIMES), "d": TimedAnswer(5.0, delivers=False)})
    assert (times.ended, times.failed) == (5.0, frozenset({"d"}))
    assert not times.left_out


def test_too_few_updates_at_the_deadline_abandon_the_round_and_the_next_one_begins_then() -> None:
    rounds = rounds_of()
    rounds.begin(1, RoundRules(deadline=1.5, min_to_aggregate=2))
    assert rounds.finish(answers(**TIMES)).ended == 1.5
    rounds.begin(2, RoundRules())
    assert rounds.finish(answers(**TIMES)).began == 1.5


def test_the_barrier_waits_until_clients_come_or_the_round_is_abandoned() -> None:
    away = {"a": 10.0, "b": 20.0, "c": 30.0, "d": 40.0}
    rounds = rounds_of(away)
    assert rounds.begin(1, RoundRules(min_clients=3)) == ["a", "b", "c"]
    assert rounds.now == 30.0
    rounds = rounds_of(away)
    assert rounds.begin(1, RoundRules(min_clients=3, barrier_timeout=25.0)) == []
    assert (rounds.abandoned().started, rounds.abandoned().ended) == (None, 25.0)
    assert rounds.begin(2, RoundRules(min_clients=3, barrier_timeout=25.0)) == ["a", "b", "c"]
    assert rounds_of(away).begin(1, RoundRules(min_clients=3, barrier="none")) == ["a"]


def test_a_client_that_goes_while_it_trains_is_waited_for_as_long_as_the_grace() -> None:
    away = {"a": 10.0, "b": 50.0}  # a goes at 60 s and is back at 110 s; b goes at 100 s
    for grace, ended, left_out in ((60.0, 110.0, {}), (5.0, 65.0, {"a": "away"})):
        rounds = rounds_of(away)
        assert rounds.begin(1, RoundRules(min_clients=2, grace=grace)) == ["a", "b"]
        assert rounds.now == 50.0
        times = rounds.finish(answers(a=30.0, b=1.0))
        assert (times.ended, times.left_out) == (ended, left_out)


def alone(**keys: Any) -> dict[str, Any]:
    """Simulate six clients with one worker in this process."""
    return simulate(JOB, clients=6, workers=1, threads=1, **keys)


def test_with_a_timing_and_nobody_left_out_the_model_is_the_same() -> None:
    plain, timed = alone(sample_clients=4), alone(sample_clients=4, timing={"speed": {"spread": 10}})
    assert plain["model_sha256"] == timed["model_sha256"]
    assert "virtual_seconds" not in plain
    assert "virtual" not in plain["rounds"][0]
    first, second = (row["virtual"] for row in timed["rounds"])
    assert first["began"] == 0 < first["ended"] == second["began"] < second["ended"] == timed["virtual_seconds"]
    assert [len(each["delivered"]) for each in (first, second)] == [4, 4]


def test_clients_that_are_trained_together_take_the_same_virtual_time() -> None:
    keys = {
        "timing": {"speed": {"spread": 10}, "bandwidth": {"median": 5}},
        "straggler_factor": 1.5,
        "encoding": "fp32",
    }
    exact, batched = alone(**keys), alone(**keys, engine="batched")
    assert batched["batched"]
    assert [row["virtual"] for row in batched["rounds"]] == [row["virtual"] for row in exact["rounds"]]
    assert any(row["virtual"]["left_out"] for row in exact["rounds"])
    assert batched["loss"] == pytest.approx(exact["loss"], rel=1e-4)


def test_a_client_that_is_left_out_reaches_neither_the_model_nor_the_updates() -> None:
    slow = {"speed": {"clients": {"client-2": 1e-6}}}
    report = alone(timing=slow, straggler_factor=3)
    assert [row["virtual"]["left_out"] for row in report["rounds"]] == [{"client-2": "straggler"}] * 2
    assert [row["clients"] for row in report["rounds"]] == [5, 5]
    assert report["updates"] == 10
    assert report["model_sha256"] != alone()["model_sha256"]


def test_a_job_for_which_too_few_clients_come_fails_with_one_sentence() -> None:
    rare = {"availability": {"share": 0.001, "period_seconds": 1e6}}
    with pytest.raises(Failure, match=r"round 1 is abandoned, because fewer than 2 clients came within 1 s"):
        alone(timing=rare, min_clients=2, barrier_timeout_seconds=1, max_abandoned=1)


@pytest.mark.parametrize(
    ("timing", "sentence"),
    [
        ({"sped": {}}, "sped"),
        ({7: 1}, "unknown key '7'"),
        ({"speed": {"medan": 1}}, "unknown key 'speed.medan'"),
        ({"speed": {"clients": {7: 1.0}}}, "must be text"),
        ({"speed": {"clients": {"client-6": 1.0}}}, "speed.clients names client-6, but the simulated clients are"),
        ({"bandwidth": {"clients": {"ann": 1.0}}}, "bandwidth.clients names ann"),
        ({"seconds_per_step": nan}, "seconds_per_step"),
        ({"seconds_per_step": -1}, "seconds_per_step"),
        ({"speed": {"median": 0}}, "speed.median"),
        ({"speed": {"median": inf}}, "speed.median"),
        ({"speed": {"clients": {"client-1": 0}}}, "speed.clients.client-1"),
        ({"speed": {"clients": {"client-1": -1}}}, "speed.clients.client-1"),
        ({"seconds_per_step": 10**400}, "seconds_per_step"),
        ({"bandwidth": {"sigma": -1}}, "bandwidth.sigma"),
        ({"speed": {"clients": {"client-1": nan}}}, "speed.clients"),
        ({"speed": {"spread": 3, "sigma": 1}}, "spread and sigma cannot be given together"),
        ({"availability": {"share": 0}}, "availability.share"),
        ({"availability": {"period_seconds": 0}}, "availability.period_seconds"),
    ],
)
def test_a_wrong_timing_is_one_sentence(timing: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        alone(timing=timing)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_a_timing_may_be_a_file_and_a_missing_one_is_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "timing.toml"
    file.write_text("[speed.clients]\nclient-1 = 0.5\n")
    assert timing_of(file, 2).speed.clients == {"client-1": 0.5}
    with pytest.raises(ConfigError, match=r"missing\.toml"):
        timing_of(tmp_path / "missing.toml", 2)


def test_flctl_draws_several_simulations_over_virtual_time(flctl: Call, tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(json.dumps(JOB))
    (tmp_path / "timing.json").write_text('{"speed": {"spread": 10}}')
    words = ["simulate", str(tmp_path / "job.json"), "--clients", "4", "--workers", "1", "--threads", "1"]
    timed = [*words, "--timing", str(tmp_path / "timing.json")]
    code, out, err = flctl(*timed, "--out", str(tmp_path / "all"))
    assert code == 0, err
    assert "virtual time" in out
    code, _, err = flctl(*timed, "--out", str(tmp_path / "two"), "--beside", str(tmp_path / "all"))
    assert code == 0, err
    one, two = ((tmp_path / out / "virtual.png").read_bytes() for out in ("all", "two"))
    assert one != two
    code, _, err = flctl(*timed, "--out", str(tmp_path / "three"), "--beside", str(tmp_path))
    assert code == 2
    assert "holds no report.json of a simulation with --timing" in err
    assert flctl(*words, "--out", str(tmp_path / "four"), "--beside", str(tmp_path / "all"))[0] == 2
