"""Power losses at many moments of one recording, each of which is checked."""

import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.power.checks import client_faults, server_faults
from tests.power.disk import LOSSES, UNSEEN, Disk, Loss
from tests.power.records import Told, read_records, told


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
        folder: As tests.power.recording has left it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.state = folder, (folder / "state").resolve()
        self.records = list(read_records(folder / "log"))
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

        Half of the losses are the server's. They come at moments at which something happens on the machine's disk.

        Args:
            count: The number of losses.
            seed: Decides when, and what is lost.
            scratch: A folder that does not exist.
        """
        rng = random.Random(seed)
        clients = [name for name in self.machines if name != "server"]
        moments = {name: [at for at, each in enumerate(self.records) if f"/{name}/" in each.name] for name in self.machines}
        drawn = []
        for number in range(count):
            machine = "server" if number % 2 else rng.choice(clients)
            drawn.append((rng.choice(moments[machine]) + 1, number, machine))
        disk, kept, fed = Disk(self.state), dict[str, list[tuple[int, str, str]]](), 0
        for at, number, machine in sorted(drawn):
            while fed < at:
                record = self.records[fed]
                disk.feed(record)
                fed += 1
                if record.kind == "R" and "/kept-" in record.other:
                    path = Path(record.other)
                    update = _update_of(disk.content(record.other))
                    kept.setdefault(path.parent.name, []).append((fed, path.name, update))
            loss = LOSSES[number // 2 % len(LOSSES)]
            disk.lose_power(scratch, loss, random.Random(f"{seed} {number}"))
            try:
                yield Outcome(machine, at, loss, list(self._faults(scratch, machine, at, kept.get(machine, []))))
            finally:
                shutil.rmtree(scratch)

    def _faults(self, folder: Path, machine: str, at: int, kept: list[tuple[int, str, str]]) -> Iterator[str]:
        said = [each for each in self.told if each.machine == machine and each.at < at]
        if machine == "server":
            return server_faults(folder / machine, said)
        last = max((each.at for each in said if "offered" in each.words), default=0)
        noted = [(name, update) for when, name, update in kept if when <= last]
        return client_faults(folder / machine, machine, said, self.state / machine, noted)


def _update_of(content: bytes) -> str:
    """Return the update that has left a kept file."""
    length = int.from_bytes(content[:8], "little")
    return str(json.loads(content[8 : 8 + length])["__metadata__"]["update"])
