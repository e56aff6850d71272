"""A fleet that does everything that must survive a power loss, while a layer logs what it does to its disks.

    python -m tests.power.recording FOLDER JOB...

The layer is preloaded into this program, so that it is in the daemons, too, which are forks. Each daemon is a machine
with a disk of its own: its folder below FOLDER/state. FOLDER/log gets the changes of all disks, and what the machines
tell each other, seen by a proxy in front of each client.
"""

import hashlib
import os
import sys
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fedring.client.policy.promises import dp_of
from fedring.client.transfer.own_values import line_of
from fedring.codec.encoding import NAMES
from fedring.ctl.process import Process
from fedring.daemon.durable import make_folder
from fedring.server.guard.tokens import create_offline
from fedring.server.state.backup.create import back_up
from fedring.v1 import federation_pb2 as pb
from fedring.v1 import secure_pb2 as wire
from tests.call_proxy import CallProxy, Take
from tests.conftest import path_to
from tests.fault.faulty_fleet import wait_for
from tests.fleets import Control, Fleet, until_watching
from tests.forks import Daemon
from tests.power.records import LOG, all_logged, note
from tests.system.wire import vector_job

BACKUPS = "backups"  # the machine to whose disk `flctl backup` writes
CLIENTS = 5  # the fewest whose sum may hide one of them
SIZE = 17_000  # of the model: its values in full are too large for a row of the database
SETTINGS: dict[str, Any] = {
    "keep_models": 4,
    "keep_update_rounds": 3,
    "database_log_bytes": 1 << 18,  # so that the log is emptied and begun again now and then
    "trusted": ["fedring", "user_trainers"],
}
KEPT_ROUNDS, KEPT_MODELS = SETTINGS["keep_update_rounds"], SETTINGS["keep_models"]
_TRUSTED = {"trusted": ["fedring", "user_trainers"]}
_USER_CODE = path_to(Path(__file__).parent.parent / "fault")
_DP: dict[str, Any] = {"noise_multiplier": 1.0, "clip": 0.5, "adaptive": False}
_SECURE: dict[str, Any] = {
    "weights": "uniform",
    "min_clients_to_aggregate": 4,
    "secure_aggregation": {"step_seconds": 120, "keep_ratio": 0.5},
}
_SMALL = {"model_args": {"size": 1000}}
_REAL = {
    "model": "fedring.train.models:digits_mlp",
    "model_args": {},
    "trainer": "",
    "subset_size": 64,
}
SAMPLED_STEPS = 4  # of a training with [sample_dp]: 64 samples, 16 at a time
_ITSELF = 0  # as the process of what this program has done itself, and tells at once
_GROUP = {"checkpoint_every": 3}
_SECURE_CALLS: dict[str, Any] = {
    "SendKeys": wire.SecureKeys,
    "SendShares": wire.SecureShares,
    "SignSurvivors": wire.SurvivorsSignature,
    "SendUnmaskShares": wire.UnmaskShares,
}

JOBS: dict[str, dict[str, Any]] = {
    "secure": _SECURE,
    "secure and [dp]": {
        **_SECURE,
        "secure_aggregation": {"step_seconds": 120},
        "dp": {**_DP, "noise_by": "clients"},
        **_SMALL,
    },
    "[dp]": {"dp": _DP, "weights": "uniform"},
    "optimizer": {
        "server_optimizer": {"name": "SGD", "args": {"lr": 0.5, "momentum": 0.9}},
        "download_encoding": "uniform",
    },
    "scaffold": {"scaffold": True, "momentum": 0.0, "weights": "uniform", "encoding": "packed", **_REAL},
    "private": {
        "model": "user_trainers:halves",
        "trainer": "user_trainers:counted",
        "private": ["own"],
        "encoding": "fp32_sparse",
        **_SMALL,
    },
    "[sample_dp]": {
        "sample_dp": {"noise_multiplier": 1.0},
        "weights": "uniform",
        "batch_size": 16,
        "epochs": 1,
        **_REAL,
    },
    "data-parallel": {
        "mode": "data_parallel",
        "data_parallel": {**_GROUP, "hook": "dgc", "replacement_seconds": 120},
        "batch_size": 16,
        "min_clients": 2,
        **_REAL,
    },
    "pipeline": {
        "mode": "pipeline",
        "pipeline": {**_GROUP, "stages": 2, "micro_batches": 2},
        "batch_size": 16,
        "min_clients": 2,
        **_REAL,
    },
    **{f"encoding {name}": {"encoding": name} for name in NAMES},
}
"""What the fleet trains, two rounds of each."""


class Machine(Daemon):
    """A daemon that is killed between two records of what it does to its disk, so that none is missing."""

    def kill(self) -> None:
        with all_logged(Path(os.environ[LOG])) if LOG in os.environ else nullcontext():
            super().kill()


class Machines(Fleet):
    """A server and its clients, which may be those of a state that is there.

    Args:
        folder: Of the state and the logs of the daemons.
        log: Gets a note of all that is told.
        commands: Each client's commands by round, those that it was given before it starts.
    """

    daemon = Machine

    def __init__(
        self, folder: Path, log: Path, commands: Mapping[str, dict[int, pb.TrainCmd]] = MappingProxyType({})
    ) -> None:
        super().__init__(folder, SETTINGS, [_TRUSTED] * CLIENTS, env=_USER_CODE)
        for number, client in enumerate(self.clients):
            client.env["FL_TEST_CLIENT"] = str(number)
        self._log, self._commands, self._proxies = log, commands, ExitStack()
        self._backups = folder / "state" / BACKUPS
        self.precious = False  # whether updates of the job leave what takes the place of something older

    def start(self) -> None:
        for folder in ("logs", "state"):
            (self.directory / folder).mkdir(parents=True, exist_ok=True)
        self.start_server()
        for client in self.clients:
            line = _Line(self, client, self._commands.get(client.name, {}))
            proxy = self._proxies.enter_context(CallProxy(self.listen, line.upward, line.downward))
            client.settings["server"] = proxy.address
            client.start()

    def stop(self) -> None:
        super().stop()
        self._proxies.close()

    def note(self, machine: Process, **words: Any) -> None:
        """Note that a machine has told something."""
        note(self._log, machine=machine.name, pid=machine.pid, **words)

    def run(self, keys: Mapping[str, Any], *, disturbed: bool = False) -> None:
        """Run a job of two rounds, and note what the server says of it.

        Args:
            keys: Of the job.
            disturbed: Whether the server and a client are killed in it.
        """
        fixed = {"model_args": {"size": SIZE}, "trainer": "user_trainers:lesson", "min_clients": CLIENTS, "rounds": 2}
        self.precious = bool(keys.keys() & {"scaffold", "private"})
        with Control(self.control) as control:
            until_watching(control, CLIENTS)
            job = vector_job(**{**fixed, "deadline_seconds": 240, "start": "newest", **keys})
            if "mode" in keys:  # a group sends its model as it is
                del job["encoding"]
            job_id = control.start_job(job).job_id
            self.note(self.server, job=job_id)
            if disturbed:
                events = control.follow_job(job_id)
                wait_for(self, "an update", lambda: next(each for each in events if each.kind == "update_accepted"))
                self.restart(0)
                self.restart_server()
        with Control(self.control) as control:
            for event in wait_for(self, "the end of the job", lambda: list(control.follow_job(job_id))):
                if event.kind == "round_published":
                    self.note(self.server, published=event.round, version=event.state.model_version)
                    if "dp" in keys:
                        self.note(self.server, charged_round=event.round)
            ended = control.job(job_id)
            self.note(self.server, ended=job_id, state=ended.state)
            assert ended.state == "completed", ended.reason
            self.note(self.server, token=control.tokens.create("client", f"of-job-{job_id}").token.token_id)
        self._back_up(f"behind-job-{job_id}")

    def _back_up(self, name: str) -> None:
        """Make a token and a backup of the running server as flctl does, and note that it has said so."""
        state = Path(self.server.settings["state_dir"])
        row, _ = create_offline(state, "operator", name, 0)
        note(self._log, machine=self.server.name, pid=_ITSELF, token=row.token_id)
        if not self._backups.exists():
            make_folder(self._backups)  # an operator has made it long ago
        back_up(state, self._backups / name)
        note(self._log, machine=BACKUPS, pid=_ITSELF, backup=name)


class _Line:
    """Notes what a client and the server tell each other."""

    def __init__(self, machines: Machines, client: Process, commands: Mapping[int, pb.TrainCmd]) -> None:
        self._machines, self._client = machines, client
        self._offered: pb.UpdateOffer | None = None  # with its own call
        self._small: deque[pb.UpdateOffer] = deque()  # of the newest call, without their answers
        self._rounds: dict[str, int] = {}  # of the newest message of each secure call
        self._commands = dict(commands)

    def upward(self, method: str) -> Take:
        """Return what takes the messages of the client."""
        if kind := _SECURE_CALLS.get(method):
            return lambda data: self._say(method, kind.FromString(data).round, data)
        if method == "PushSmallUpdates":
            self._small = deque()  # what an earlier call has not answered is offered again
        return {"PushUpdate": self._offer, "PushSmallUpdates": self._offer_small}.get(method, _ignore)

    def downward(self, method: str) -> Take:
        """Return what takes those of the server."""
        if method in _SECURE_CALLS:
            return lambda data: self._tell(taken=method, client=self._client.name, round=self._rounds[method])
        answers = {"PushUpdate": self._answer, "PushSmallUpdates": self._answer_small, "Watch": self._event}
        return answers.get(method, _ignore)

    def _say(self, method: str, number: int, data: bytes) -> None:
        self._rounds[method] = number
        command, text = self._commands[number], hashlib.sha256(data).hexdigest()
        name = {"run": command.run_id, "epoch": command.epoch, "round": number, "base": command.model_digest}
        self._machines.note(self._client, said=method, text=text, **name)

    def _offer(self, data: bytes) -> None:
        message = pb.ClientUpdate.FromString(data)
        if message.HasField("offer"):
            self._offered = message.offer
            self._note_offer(message.offer)

    def _offer_small(self, data: bytes) -> None:
        offer = pb.SmallUpdate.FromString(data).offer
        self._small.append(offer)
        self._note_offer(offer)

    def _note_offer(self, offer: pb.UpdateOffer) -> None:
        command = self._commands[pb.UpdateHeader.FromString(offer.header).round]
        dp = dp_of(command.job)
        self._machines.note(
            self._client,
            offered=offer.name,
            digest=offer.payload_digest,
            round=command.round,
            line=line_of(command).key,
            charged=dp is not None and not dp.by_clients,
            secure=command.HasField("secure"),
            sampled=bool(command.job.sample_dp),
            precious=self._machines.precious,
        )

    def _answer(self, data: bytes) -> None:
        if pb.UpdateReply.FromString(data).HasField("accepted") and self._offered is not None:
            self._accept(self._offered)

    def _answer_small(self, data: bytes) -> None:
        self._accept(self._small.popleft())

    def _accept(self, offer: pb.UpdateOffer) -> None:
        header = pb.UpdateHeader.FromString(offer.header)
        self._tell(accepted=offer.payload_digest, client=header.client_id, round=header.round, name=offer.name)

    def _event(self, data: bytes) -> None:
        event = pb.ServerEvent.FromString(data)
        if event.HasField("train"):
            self._commands[event.train.round] = event.train
            command = event.train.SerializeToString().hex()
            self._tell(
                round_begun=event.train.round, model=event.train.model_digest, to=self._client.name, command=command
            )

    def _tell(self, **words: Any) -> None:
        self._machines.note(self._machines.server, **words)


def _ignore(data: bytes) -> None:
    """Take a message that is of no interest."""


def main() -> None:
    """Train the jobs that the command line names, and disturb every other one."""
    folder = Path(sys.argv[1])
    with Machines(folder, folder / "log") as machines:
        for number, name in enumerate(sys.argv[2:]):
            machines.run(JOBS[name], disturbed=number % 2 == 1)


if __name__ == "__main__":
    main()
