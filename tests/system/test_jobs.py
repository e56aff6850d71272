"""Jobs on a real fl-server: queued, started, stopped, sampled, watched, failed."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from fedring.control.failure import Failure
from fedring.daemon.exits import Exit
from fedring.rpc.errors import reason_of
from fedring.server.state.rows import JobRow, RoundRow
from fedring.server.state.sql.store import Store
from fedring.v1 import control_pb2 as pb
from fedring.v1 import control_pb2_grpc as rpc
from fedring.v1 import federation_pb2 as fed
from tests.fleets import Control, Fleet
from tests.system.wire import SIZE, WireClient, deliver, next_commands, outcome, payload_of, run, vector_job
from tests.waiting import until

ONES = np.ones(SIZE, np.float32)
DEFAULTS = {"model": "fedring.train.models:vector", "model_args": {"size": SIZE}, "encoding": "fp32", "epochs": 3}
DIGITS = {"model": "fedring.train.models:digits_mlp", "model_args": {}}
Clients = Callable[..., list[WireClient]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Start one fl-server for all tests of this file."""
    job = {**DEFAULTS, "min_clients": 1, "evaluate": False, "lr": 0.25}
    limits = {"max_clients": 300, "max_update_bytes": 1_000_000}
    with Fleet(tmp_path_factory.mktemp("jobs"), {"job": job, **limits}) as fleet:
        yield fleet


class TestQueue:
    def test_a_second_job_runs_after_the_first(self, control: Control, clients: Clients) -> None:
        (client,) = clients()
        first, first_events = run(control, rounds=2)
        assert any(event.kind == "job_started" for event in first_events)
        second, events = run(control, name="later")
        assert (control.job(second).state, control.status().jobs_queued) == ("queued", 1)
        commands = [deliver(client) for _ in range(3)]
        assert [command.job.job_id for command in commands] == [first, first, second]
        assert [command.job_round for command in commands] == [1, 2, 1]
        assert outcome(control, second, events).state == "completed"
        assert control.job(first).rounds_done == 2
        assert control.status().jobs_queued == 0

    def test_a_round_uses_the_servers_defaults_and_the_overrides_of_its_command(
        self, control: Control, clients: Clients
    ) -> None:
        (client,) = clients()
        events = control.events()
        job_id = control.start_round({"momentum": 0.5}).job_id
        command = deliver(client)
        assert (command.epochs, command.lr, command.momentum, command.job.rounds) == (3, 0.25, 0.5, 1)
        assert outcome(control, job_id, control.follow_job(job_id, events)).state == "completed"

    def test_a_job_may_override_some_keys_of_a_default_table(self, control: Control, clients: Clients) -> None:
        (client,) = clients()
        _, events = run(control, model_args={"size": 5})
        command = client.expect("train")
        assert json.loads(command.job.model_args) == {"size": 5}
        control.stop_job()
        assert [event.kind for event in events][-1] == "job_ended"

    def test_the_same_idempotency_key_starts_a_job_once(self, control: Control) -> None:
        first = control.start_job(vector_job(), key="once")
        again = control.start_job(vector_job(), key="once")
        assert (first.already, again.already) == (False, True)
        assert again.job_id == first.job_id
        round_ = control.start_round({}, key="twice")
        assert control.start_round({}, key="twice").job_id == round_.job_id

    def test_an_idempotency_key_of_another_job_is_refused(self, server: Fleet, control: Control) -> None:
        first = control.start_job(vector_job(), key="mine").job_id
        with pytest.raises(Failure, match=f"the key 'mine' belongs to job {first}, another one") as refused:
            control.start_job(vector_job(rounds=4), key="mine")
        assert refused.value.exit_code == Exit.USAGE
        with pytest.raises(Failure, match="the key 'mine' belongs to job"):
            control.start_round({"lr": 0.5}, key="mine")
        with grpc.insecure_channel(server.control) as channel:
            request = pb.StartJobRequest(job="{}", idempotency_key="mine")
            with pytest.raises(grpc.RpcError) as refusal:
                rpc.ControlServiceStub(channel).StartJob(request, timeout=20)
        error: Any = refusal.value
        assert (error.code(), reason_of(error)) == (grpc.StatusCode.ALREADY_EXISTS, "other_job")
        assert [job.job_id for job in control.jobs() if job.job_id >= first] == [first]

    def test_an_idempotency_key_is_known_after_a_restart(self, tmp_path: Path) -> None:
        with Fleet(tmp_path, {"job": DEFAULTS}) as fleet, Control(fleet.control) as control:
            optimizer = {"name": "Adam", "args": {"lr": 1}}
            first = control.start_job({"rounds": 3, "server_optimizer": optimizer}, key="kept")
            fleet.restart_server()
            again = control.start_job({"rounds": 3, "server_optimizer": optimizer}, key="kept")
            assert (again.already, again.job_id) == (True, first.job_id)


class TestStop:
    def test_a_stopped_round_is_abandoned_and_the_job_goes_on(self, control: Control, clients: Clients) -> None:
        (client,) = clients()
        job_id, events = run(control, rounds=2)
        command = client.expect("train")
        reply = control.stop_round()
        assert (reply.job_id, reply.round) == (job_id, command.round)
        ended = client.expect("round_ended")
        assert (ended.round, ended.reason) == (command.round, "stopped")
        assert deliver(client).job_round == 2
        job = outcome(control, job_id, events)
        assert (job.state, job.rounds_done) == ("completed", 1)
        second, first = control.rounds(job_id=job_id)
        assert (first.phase, first.reason, list(first.missing)) == ("abandoned", "stopped", ["a"])
        assert (second.phase, second.reason) == ("published", "")

    def test_a_running_job_is_stopped_with_its_round(self, control: Control, clients: Clients) -> None:
        (client,) = clients()
        job_id, events = run(control, rounds=5)
        deliver(client)
        command = client.expect("train")
        reply = control.stop_job()
        assert (reply.job_id, reply.round) == (job_id, command.round)
        assert outcome(control, job_id, events).state == "stopped"
        assert control.job(job_id).rounds_done == 1

    def test_a_queued_job_is_stopped_before_it_runs(self, control: Control, clients: Clients) -> None:
        (client,) = clients()
        first, events = run(control)
        queued = control.start_job(vector_job()).job_id
        assert control.stop_job(queued).round == 0
        assert control.job(queued).state == "stopped"
        deliver(client)
        assert outcome(control, first, events).state == "completed"
        assert control.rounds(job_id=queued) == []

    def test_stopping_a_job_or_round_that_does_not_run_is_refused(self, control: Control) -> None:
        with pytest.raises(Failure, match="no job is running") as nothing:
            control.stop_job()
        with pytest.raises(Failure, match="no round is in progress"):
            control.stop_round()
        with pytest.raises(Failure, match="job 9999 is neither running nor queued") as unknown:
            control.stop_job(9999)
        assert (nothing.value.exit_code, unknown.value.exit_code) == (Exit.FAILED, Exit.USAGE)


class TestBadJobs:
    @pytest.mark.parametrize(
        ("text", "sentence"),
        [
            ('{"epoch": 3}', "unknown key 'epoch' in the job; did you mean 'epochs'?"),
            ('{"server_optimizer": {"nam": "SGD"}}', "did you mean 'server_optimizer.name'?"),
            ('{"lr": -1}', "lr: must be greater than 0"),
            ('{"lr": NaN}', "lr: "),
            ('{"encoding": "zip"}', "encoding: must be 'fp32', "),
            ('{"min_clients_to_aggregate": 3}', "min_clients_to_aggregate must be at most min_clients"),
            ('{"server_optimizer": {"name": "LBFGS"}}', "'LBFGS' does not treat each value by itself"),
            ('{"server_optimizer": {"name": "SGD", "args": {"lr": "x"}}}', "lr = 'x' is not a number"),
            ('{"server_optimizer": {"name": "Adam", "args": {"momentum": 1}}}', "Adam takes no momentum"),
            ('{"seed": 9223372036854775808}', "seed: must be less than or equal to 8796093022207"),
            ('{"min_clients": 100000000000000000000}', "min_clients: must be less than or equal to 4294967295"),
            ('{"min_clients": 1' + "0" * 5000 + "}", "min_clients: must be less than or equal to 4294967295"),
            ('{"min_clients": -1' + "0" * 5000 + "}", "min_clients: must be greater than or equal to 1"),
            ('{"epochs": 1e400}', "epochs: "),
            ('{"name": "a\\u0000b"}', "name: must not hold the character U+0000"),
            ('{"model": "fedring.train.models:vec\\u001b[2Jtor"}', "model: must not hold the character U+001B"),
            ('{"data": "a\\nb"}', "data: must not hold the character U+000A"),
            ('{"loss": "\\ud800"}', "loss: must not hold the character U+D800"),
            ('{"model_args": {"size": 1e400}}', "model_args: size in it must be a finite number"),
            ('{"model_args": {"size": NaN}}', "model_args: size in it must be a finite number"),
            ('{"model_args": {"size": 9223372036854775808}}', "model_args: size in it must be a number from"),
            ('{"model_args": {"\\ud800": 1}}', "model_args: a key in it must not hold the character U+D800"),
            (
                '{"model_args": {"a": ' + "[" * 100 + "]" * 100 + "}}",
                "model_args: must not hold more than MAX_DEPTH = 16",
            ),
            ('{"server_optimizer": {"name": "SGD", "args": {"lr": 1' + "0" * 400 + "}}}", "lr in it must be a number"),
            ("[" * 60_000, "the job holds more than MAX_DEPTH = 16 lists and tables in each other"),
            ('{"a":' * 10_000, "the job holds more than MAX_DEPTH = 16 lists and tables in each other"),
            ('{"name": "' + "[" * 100_000, "the job is 100010 bytes of JSON, above MAX_JOB_BYTES = 65536"),
            ('{"' + "k" * 60_000 + '": 1}', "unknown key 'kkkkk"),
            ('{"data_parallel": {"hook": "' + "h" * 60_000 + '"}}', "hook 'hhhhh"),
            ("[1]", "a job must be one JSON object"),
            ("{", "Expecting property name"),
        ],
    )
    def test_a_bad_job_is_refused_in_one_sentence(self, server: Fleet, text: str, sentence: str) -> None:
        with grpc.insecure_channel(server.control) as channel:
            with pytest.raises(grpc.RpcError) as refused:
                rpc.ControlServiceStub(channel).StartJob(pb.StartJobRequest(job=text), timeout=20)
            error: Any = refused.value
            assert (error.code(), reason_of(error)) == (grpc.StatusCode.INVALID_ARGUMENT, "bad_job")
            assert sentence in error.details()
            assert "\n" not in error.details()
            with pytest.raises(grpc.RpcError) as refused:
                rpc.ControlServiceStub(channel).StartRound(pb.StartRoundRequest(overrides=text), timeout=20)
            assert reason_of(refused.value) == "bad_job"
        assert "Traceback" not in server.server.tail(1000)

    @pytest.mark.parametrize(
        ("key", "sentence"),
        [
            ("a\0b", "idempotency_key: must not hold the character U+0000"),
            ("two\nlines", "idempotency_key: must not hold the character U+000A"),
            ("k" * 129, "idempotency_key: must have at most 128 characters, not 129"),
        ],
    )
    def test_a_bad_idempotency_key_is_refused_in_one_sentence(self, server: Fleet, key: str, sentence: str) -> None:
        with grpc.insecure_channel(server.control) as channel:
            stub = rpc.ControlServiceStub(channel)
            calls: list[tuple[Any, Any]] = [
                (stub.StartJob, pb.StartJobRequest(job="{}", idempotency_key=key)),
                (stub.StartRound, pb.StartRoundRequest(idempotency_key=key)),
            ]
            for call, request in calls:
                with pytest.raises(grpc.RpcError) as refused:
                    call(request, timeout=20)
                error: Any = refused.value
                assert (error.code(), reason_of(error)) == (grpc.StatusCode.INVALID_ARGUMENT, "bad_job")
                assert error.details() == sentence

    def test_the_longest_idempotency_key_is_not_truncated(self, control: Control) -> None:
        first, second = (control.start_job(vector_job(), key="k" * 127 + letter) for letter in "ab")
        assert first.job_id != second.job_id

    def test_a_list_of_long_jobs_is_shortened(self, control: Control) -> None:
        long = {"cut": ["x" * 60_000]}  # jobs of another mode do not read it
        started = [control.start_job(vector_job(pipeline=long)).job_id for _ in range(30)]
        listed = [job.job_id for job in control.jobs(limit=1000)]
        assert listed == sorted(started, reverse=True)[: len(listed)]
        assert 8 < len(listed) < 30
        assert control.job(started[0]).job_id == started[0]
        for job_id in reversed(started):  # the list is too long for the fixture that stops what is left
            control.stop_job(job_id)

    @pytest.mark.parametrize("state", ["queued", "running"])
    def test_a_stored_job_that_is_not_valid_any_more_fails_with_a_reason(self, tmp_path: Path, state: str) -> None:
        spec = {**vector_job(), "seed": 2**63, "min_clients": 10**20, "name": "a\0b", "model_args": {"a": [10**30]}}
        with Fleet(tmp_path, {"job": DEFAULTS}) as fleet:
            store = Store(f"sqlite:///{tmp_path / 'state' / 'server' / 'facts.sqlite'}")
            row = store.jobs.create(JobRow(0, "a\0b", spec, 3, 1.0, idempotency_key="old"))
            if state == "running":
                store.jobs.set_state(row.job_id, "running")
                store.rounds.create(RoundRow(0, row.job_id, 1, "training", 1.0, selected=("a",)))
            store.close()
            fleet.restart_server()
            with Control(fleet.control) as control:
                assert list(control.follow_job(row.job_id))[-1].kind == "job_ended"
                job = control.job(row.job_id)
                assert job.state == "failed"
                assert job.reason.startswith("its specification is not valid: name: must not hold the character U+0000")
                with pytest.raises(Failure, match="the key 'old' belongs to job"):
                    control.start_job(vector_job(), key="old")
                after = control.start_job(vector_job())
                assert control.job(after.job_id).state in ("queued", "running")
            assert "Traceback" not in fleet.server.tail(1000)

    @pytest.mark.parametrize(
        ("keys", "sentence"),
        [
            ({"model": "nosuch:net"}, "model: nosuch:net is not offered here as model: correct the name, or"),
            ({"model": "fedring.train.models:mnist_cn"}, "did you mean fedring.train.models:mnist_cnn?"),
            ({"model": "digit_mlp"}, "model: The name 'digit_mlp' is not of the form module:attribute"),
            ({"model": "fedring.no_such_module:model"}, "model: fedring.no_such_module:model is not part of fedring"),
            (
                {"model": "os:system", "model_args": {"command": "true"}},
                'add "os:system as model" to trusted here',
            ),
            ({"model_args": {"size": "x"}}, "model: fedring.train.models:vector: size = 'x': "),
            ({"data": "fedring.data:digit"}, "data: fedring.data:digit is not offered here as data: did you mean"),
            (
                {"data": "fedring.dta:digits"},
                "data: fedring.dta:digits is not part of fedring, which offers fedring.data:",
            ),
            ({"loss": "fedring.train.losses:crossentropy"}, "loss: fedring.train.losses:crossentropy is not offered"),
            ({"optimizer": "sgd"}, "optimizer: The name 'sgd' is not of the form module:attribute"),
            ({"evaluator": "evaluate"}, "evaluator: The name 'evaluate' is not of the form module:attribute"),
            ({"trainer": "trainer"}, "trainer: The name 'trainer' is not of the form module:attribute"),
            ({"evaluate_on_server": True, "data": "fedring.data:mnist"}, "data_root"),
            (
                {"evaluate_on_server": True, "loss": "only.at:clients"},
                "loss: only.at:clients is not offered here as loss",
            ),
            ({"mode": "data_parallel", "data_parallel": {"hook": "dgcc"}}, "a job cannot name the hook 'dgcc'"),
            ({"mode": "data_parallel", "data_parallel": {"hook": "fedring.ddp:hok"}}, "data_parallel.hook: "),
            ({"mode": "pipeline", "pipeline": {"cut": ["31"]}, **DIGITS}, "has no layer 31: did you mean"),
            ({"mode": "pipeline", "pipeline": {"replicas": 200}}, "needs 400 clients, but this server"),
            ({"min_clients": 301}, "min_clients: the job needs 301 clients, but this server takes max_clients=300"),
            ({"model_args": {"size": 300_000}}, "encoding: an update as fp32 has at least 1200000 bytes"),
            ({"start": "newst"}, "did you mean 'newest'?"),
            ({"start": 4711}, "start: version 4711 is not kept, but these are: "),
            ({"start": "best"}, "start: no version of this model that is kept was evaluated"),
            ({"start": "weights.pt"}, "start: start names the file weights.pt, but this server allows none"),
            ({"patience": 2}, "patience compares results"),
            ({"straggler_factor": 0.5}, "straggler_factor must be 0 or at least 1"),
        ],
    )
    def test_a_job_that_cannot_run_is_not_queued(
        self, server: Fleet, control: Control, keys: dict[str, Any], sentence: str
    ) -> None:
        before = len(control.jobs(limit=1000))
        with pytest.raises(Failure) as refused:
            control.start_job(vector_job(**keys))
        assert sentence in str(refused.value)
        assert "\n" not in str(refused.value)
        assert refused.value.exit_code == Exit.CONFIG
        assert len(control.jobs(limit=1000)) == before
        assert "Traceback" not in server.server.tail(1000)

    @pytest.mark.parametrize("key", ["data", "loss", "optimizer", "trainer"])
    def test_a_part_that_only_clients_have_is_not_checked_before_the_job_runs(self, control: Control, key: str) -> None:
        job_id = control.start_job(vector_job(**{key: "only.at:clients"})).job_id
        control.stop_job(job_id)


class TestRounds:
    def test_a_barrier_that_stays_closed_abandons_the_round(
        self, server: Fleet, control: Control, clients: Clients
    ) -> None:
        clients()
        until(lambda: any(client.state == "watching" for client in control.clients()))
        job_id, events = run(control, min_clients=2, barrier_timeout_seconds=0.3, max_abandoned=2, rounds=5)
        round_events = [event for event in events if event.kind.startswith("round_")]
        readiness = "ready=1/2 (min=2, barrier matched)"
        hint = f"; one more client is needed: `fl-client server={server.listen} client_id=NAME` starts one"
        assert [event.text for event in round_events] == [
            f"round 1 of job {job_id} waits for clients: {readiness}",
            f"round 1 of job {job_id} was abandoned: barrier_timeout: {readiness}{hint}",
            f"round 2 of job {job_id} waits for clients: {readiness}",
            f"round 2 of job {job_id} was abandoned: barrier_timeout: {readiness}{hint}",
        ]
        job = control.job(job_id)
        assert job.state == "failed"
        assert job.reason == f"barrier_timeout: {readiness}{hint}"
        rounds = control.rounds(job_id=job_id)
        assert [(round_.phase, round_.reason) for round_ in rounds] == [("abandoned", "barrier_timeout")] * 2

    def test_a_round_with_too_few_updates_publishes_no_model(self, control: Control, clients: Clients) -> None:
        a, b = clients("a", "b")
        job_id, events = run(control, min_clients=2, min_clients_to_aggregate=2)
        before = control.status().model_version
        command = deliver(a)
        failure = fed.Failure(round=command.round, reason="no_data", detail="the folder is gone")
        b.say(fed.WatchRequest(matched=True, failure=failure))
        reason = outcome(control, job_id, events).reason
        assert reason == "too_few_clients: b could not train: no_data: the folder is gone"
        (round_,) = control.rounds(job_id=job_id)
        assert (round_.delivered, list(round_.missing), round_.model_version) == (1, ["b"], 0)
        assert control.status().model_version in (before, before + 1)  # +1 if the job has published the first model

    def test_a_round_ends_at_its_deadline_with_the_updates_that_it_has(
        self, control: Control, clients: Clients
    ) -> None:
        a, b = clients("a", "b")
        job_id, events = run(control, min_clients=2, deadline_seconds=10.0)
        deliver(a)
        assert 0 < b.expect("train").deadline_seconds <= 10
        assert outcome(control, job_id, events).state == "completed"
        (round_,) = control.rounds(job_id=job_id)
        assert (round_.delivered, list(round_.missing)) == (1, ["b"])
        assert 10 <= round_.seconds < 60  # the default deadline

    @pytest.mark.parametrize("keys", [{"sample_clients": 2}, {"sample_ratio": 0.4}])
    def test_a_round_samples_as_many_clients_as_configured(
        self, control: Control, clients: Clients, keys: dict[str, Any]
    ) -> None:
        several = clients("a", "b", "c", "d")
        job_id, events = run(control, min_clients=4, rounds=6, **keys)
        groups = []
        for _ in range(6):
            commands = next_commands(several, 2)
            assert len({command.round for command in commands.values()}) == 1
            groups.append(frozenset(commands))
            for client in several:
                if command := commands.get(client.client_id):
                    client.push(client.header(command, payload_of(ONES)), payload_of(ONES))
        assert outcome(control, job_id, events).state == "completed"
        assert [round_.selected for round_ in control.rounds(job_id=job_id)] == [2] * 6
        assert len(set(groups)) > 1  # not the same clients each time


class TestEvents:
    def test_a_watcher_gets_all_events_of_a_job_in_order_even_later(self, control: Control, clients: Clients) -> None:
        (client,) = clients()
        job_id, events = run(control, rounds=2)
        for _ in range(2):
            deliver(client)
        # "client_joined" may come at any time, and "round_waits" depends on when clients are ready.
        seen = [event for event in events if event.job_id and event.kind != "round_waits"]
        a_round = ["round_started", "update_accepted", "round_published", "round_evaluated"]
        assert [event.kind for event in seen] == ["job_started", *a_round, *a_round, "job_ended"]
        ids = [event.id for event in seen]
        assert ids == sorted(set(ids))
        assert {event.job_id for event in seen} == {job_id}
        for place in (0, 3, len(seen) - 2):
            later = control.follow_job(job_id, control.events(after=ids[place]))
            assert [event for event in later if event.job_id and event.kind != "round_waits"] == seen[place + 1 :]

    def test_an_event_of_a_round_contains_the_state_of_the_round(self, control: Control, clients: Clients) -> None:
        (client,) = clients()
        _, events = run(control)
        deliver(client)
        states = {event.kind: event.state for event in events if event.HasField("state")}
        assert (states["round_started"].phase, states["round_started"].delivered) == ("training", 0)
        assert states["update_accepted"].delivered == 1
        assert states["round_published"].phase == "published"
        assert states["round_published"].upload_bytes > 4 * SIZE
        assert states["round_evaluated"].model_version == states["round_published"].model_version
