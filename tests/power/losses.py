"""Power losses at many moments of one recording, each of which is checked."""

import json
import os
import random
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fedring.v1 import federation_pb2 as pb
from tests.conftest import ROOT
from tests.fault.faulty_fleet import wait_for
from tests.fleets import Control, until_watching
from tests.power.checks import backup_faults, checkpoint_faults, client_faults, server_faults
from tests.power.disk import LOSSES, UNSEEN, Disk, Loss
from tests.power.recording import BACKUPS, Machines
from tests.power.records import Record, Told, layered, read_records, told


@dataclass(frozen=True, slots=True)
class Outcome:
    """One power loss."""

    machine: str
    at: int  # behind this many records
    loss: Loss
    faults: list[str]


class Recording:
    """What a recorded fleet has done to its disks, and what it has told.

    Args:
        folder: As `record_in` has left it.
        without: Says which syncs the programs leave out.
    """

    def __init__(self, folder: Path, without: Callable[[Record], bool] = lambda record: False) -> None:
        self.folder, self.state = folder, (folder / "state").resolve()
        self.records = list(read_records(folder / "log"))
        self.records = [each for each in self.records if not (each.kind in "BEF" and without(each))]
        self.told = told(self.records)
        self.machines = sorted({each.machine for each in self.told})

    def differences(self) -> list[str]:
        """Return the files that the records do not lead to."""
        disk = Disk(self.state)
        for record in self.records:
            disk.feed(record)
        real = {str(path.relative_to(self.state)): path for path in self.state.rglob("*") if path.is_file()}
        made = disk.now()
        seen = {path for path in real.keys() | made.keys() if not path.endswith(UNSEEN)}
        wrong = {path for path in seen if path not in real or made.get(path) != real[path].read_bytes()}
        return sorted(wrong | {path for path in disk.mapped if not path.endswith(UNSEEN)})

    def losses(self, count: int, seed: int, scratch: Path) -> Iterator[Outcome]:
        """Let the power fail `count` times; yield what became of it.

        Half of the losses are the server's, the others take turns. They come at moments at which something happens on
        the machine's disk.

        Args:
            count: The number of losses.
            seed: Decides when, and what is lost.
            scratch: A folder that does not exist.
        """
        rng = random.Random(seed)
        others = [name for name in self.machines if name != "server"]
        moments = {
            name: [at for at, each in enumerate(self.records) if f"/{name}/" in each.name] for name in self.machines
        }
        drawn = []
        for number in range(count):
            turn = number // 2 + number // (2 * len(LOSSES))  # so that each loses in each way in the end
            machine = "server" if number % 2 else others[turn % len(others)]
            drawn.append((rng.choice(moments[machine]) + 1, number, machine))
        disk, kept, fed = Disk(self.state), dict[str, list[tuple[int, str, str]]](), 0
        checkpoints = _Checkpoints(self.state)
        for at, number, machine in sorted(drawn):
            while fed < at:
                record = self.records[fed]
                disk.feed(record)
                fed += 1
                checkpoints.feed(record, disk)
                if record.kind == "R" and "/kept-" in record.other:
                    path = Path(record.other)
                    content = _digest_in(disk.content(record.other))
                    kept.setdefault(path.parent.name, []).append((fed, path.name, content))
            loss = LOSSES[number // 2 % len(LOSSES)]
            disk.lose_power(scratch, loss, random.Random(f"{seed} {number}"))
            try:
                faults = list(checkpoint_faults(scratch / machine, checkpoints.certain(machine)))
                faults += self._faults(scratch, machine, at, kept.get(machine, []))
                yield Outcome(machine, at, loss, faults)
            finally:
                shutil.rmtree(scratch)

    def go_on(self, at: int, seed: int, folder: Path) -> list[str]:
        """Let the power of all machines fail, start them with what is left, and let them end what they had begun.

        Args:
            at: Behind so many records.
            seed: Decides what is lost.
            folder: For the machines; it does not exist.

        Returns:
            What went wrong: jobs that fail, errors in logs, and what was said in two ways before the loss and after.
        """
        disk, rng = Disk(self.state), random.Random(seed)
        for record in self.records[:at]:
            disk.feed(record)
        disk.lose_power(folder / "state", rng.choice(LOSSES), rng)
        shutil.copyfile(self.folder / "log", folder / "log")
        faults = []
        with Machines(folder, folder / "log", self._commands(at)) as machines:
            with Control(machines.control) as control:
                until_watching(control, len(machines.clients))
                for job in control.jobs():
                    wait_for(machines, "the end of a job", partial(list, control.follow_job(job.job_id)))
            machines.run({"encoding": "packed"})
            with Control(machines.control) as control:
                ended = [(job.job_id, job.state, job.reason) for job in control.jobs()]
            daemons = (machines.server, *machines.clients)
            faults += [f"job {job}: {state}: {reason}" for job, state, reason in ended if state != "completed"]
            faults += [f"{each.name}: an error in the log" for each in daemons if "Traceback" in each.log.read_text()]
        # What was said behind the loss did not happen.
        records = self.records[:at] + list(read_records(folder / "log"))[len(self.records) :]
        return faults + _said_twice(told(records))

    def _commands(self, at: int) -> dict[str, dict[int, pb.TrainCmd]]:
        """Return the commands that clients were given before these records, by client and round."""
        commands = defaultdict[str, dict[int, pb.TrainCmd]](dict)
        for words in (each.words for each in self.told if each.at < at and "command" in each.words):
            command = pb.TrainCmd.FromString(bytes.fromhex(words["command"]))
            commands[words["to"]][command.round] = command
        return commands

    def _faults(self, folder: Path, machine: str, at: int, kept: list[tuple[int, str, str]]) -> Iterator[str]:
        said = [each for each in self.told if each.machine == machine and each.at < at]
        if machine == "server":
            return server_faults(folder / machine, said)
        if machine == BACKUPS:
            return backup_faults(folder / machine, said)
        last = max((each.at for each in said if "offered" in each.words), default=0)
        noted = [(name, content) for when, name, content in kept if when <= last]
        return client_faults(folder / machine, machine, said, self.state / machine, noted)


class _Checkpoints:
    """The checkpoints that workers have written, in the order of the records.

    A worker that begins to write one has trained on since the one before, which must therefore be on its disk until it
    is deleted.
    """

    def __init__(self, state: Path) -> None:
        self._state = str(state)
        self._written: dict[tuple[str, str], bytes] = {}  # by machine and path
        self._certain: dict[tuple[str, str], bytes] = {}

    def feed(self, record: Record, disk: Disk) -> None:
        """Look at a record, which the disk has done."""
        name = record.other if record.kind == "R" else record.name
        machine, _, path = name.removeprefix(f"{self._state}/").partition("/")
        if not path.startswith("checkpoints/"):
            return
        if record.kind == "C":
            self._certain |= {place: content for place, content in self._written.items() if place[0] == machine}
            self._written = {place: content for place, content in self._written.items() if place[0] != machine}
        elif record.kind == "R" and path.endswith(".safetensors"):
            self._written[machine, path] = disk.content(name)
        elif record.kind == "U":
            self._written.pop((machine, path), None)
            self._certain.pop((machine, path), None)

    def certain(self, machine: str) -> dict[str, bytes]:
        """Return the contents of the machine's checkpoints that must be there, by their paths."""
        return {path: content for (name, path), content in self._certain.items() if name == machine}


def record_in(folder: Path, library: Path, jobs: Sequence[str]) -> None:
    """Let a fleet train these jobs of tests.power.recording, and record what it does to its disks."""
    (folder / "state").mkdir(parents=True)
    variables = {**os.environ, **layered(library, folder / "log", folder / "state"), "OMP_NUM_THREADS": "1"}
    variables["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
    command = [sys.executable, "-m", "tests.power.recording", str(folder), *jobs]
    done = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the recording failed:\n{done.stdout}{done.stderr}")


def _said_twice(said: Sequence[Told]) -> list[str]:
    """Return which messages of rounds with secure aggregation a client has said in two ways."""
    texts = defaultdict[tuple[str, str, int, int], set[str]](set)
    for words in (each.words for each in said if "said" in each.words):
        texts[words["machine"], words["said"], words["epoch"], words["round"]].add(words["text"])
    return [
        f"{name} of {who} in round {number} was two things"
        for (who, name, _, number), all_ in texts.items()
        if len(all_) > 1
    ]


def _digest_in(content: bytes) -> str:
    """Return the digest that a kept file says of its content; not all of them were left by an update."""
    length = int.from_bytes(content[:8], "little")
    return str(json.loads(content[8 : 8 + length])["__metadata__"]["digest"])
