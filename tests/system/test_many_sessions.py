"""Many sessions, on fewer of them: the load generator's figures, places in a line, and clients that come and go."""

import argparse
import os
import threading
from pathlib import Path

import pytest

from fedring.ctl.local.runner import run_job
from tests.bench import fleet as bench
from tests.bench.lab.trainers import vector_job
from tests.fleets import Control, Fleet

PARAMETERS = 100


@pytest.mark.parametrize("tls", [False, True])
def test_the_load_generator_measures_all_that_it_prints(
    tls: bool, forked_daemons: None, capsys: pytest.CaptureFixture[str]
) -> None:
    args = argparse.Namespace(
        sessions=12, processes=2, tls=tls, sample=5, parameters=PARAMETERS, rounds=2, beats=0.5, ramp=0.1, server=[]
    )
    results = bench.measure(args)
    assert results["round"]["sampled"] == 5
    assert 0 < results["killed"]["start_seconds"] < results["killed"]["seconds"]
    assert results["killed"]["peak_bytes"] > 10_000_000
    bench.print_table(results)
    assert f"12 sessions, {'mutual TLS' if tls else 'plaintext'}" in capsys.readouterr().out


def test_clients_that_no_round_needs_come_and_go_and_rounds_are_trained_by_those_that_are_here(tmp_path: Path) -> None:
    most, clients = 4, 16
    keys = {"max_connected": most, "idle_heartbeat_seconds": 0.3, "heartbeat_seconds": 0.2}
    with Fleet(tmp_path, keys) as fleet, Control(fleet.control) as control:
        hosts = bench.Hosts([{"server": fleet.listen, "first": 0, "count": clients, "parameters": PARAMETERS}])
        try:
            seen: set[str] = set()
            while len(seen) < clients:  # each has its turn
                here = [client.client_id for client in control.clients() if client.state == "watching"]
                assert len(here) <= most
                seen |= set(here)
                threading.Event().wait(0.02)  # the server has other work than to be asked
            job = vector_job(PARAMETERS, clients=2, sample_clients=2)
            rounds = run_job(fleet, control, {**job, "min_clients": 2, "rounds": 3})
            assert [round_.delivered for round_ in rounds] == [2, 2, 2]
        finally:
            hosts.stop()


def test_a_client_that_a_round_waits_for_is_let_in_however_many_are_here(tmp_path: Path) -> None:
    keys = {"max_connected": 1, "idle_heartbeat_seconds": 0.3, "heartbeat_seconds": 0.2}
    with Fleet(tmp_path, keys) as fleet, Control(fleet.control) as control:
        hosts = bench.Hosts([{"server": fleet.listen, "first": 0, "count": 3, "parameters": PARAMETERS}])
        try:
            rounds = run_job(fleet, control, {**vector_job(PARAMETERS, clients=3), "rounds": 2})
            assert [round_.delivered for round_ in rounds] == [3, 3]
        finally:
            hosts.stop()


def test_threads_of_grpc_wait_for_their_turn_and_the_event_loop_does_not(tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet, Control(fleet.control) as control:
        control.clients()
        threads = list(Path(f"/proc/{fleet.server.pid}/task").iterdir())
        named = {int(each.name): (each / "comm").read_text().strip() for each in threads}
        of_grpc = [thread for thread, name in named.items() if name == "event_engine"]
        assert {os.sched_getscheduler(thread) for thread in of_grpc} == {os.SCHED_BATCH}
        assert os.sched_getscheduler(fleet.server.pid) == os.SCHED_OTHER
