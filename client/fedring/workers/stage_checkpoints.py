"""Checkpoints of a pipeline, in files of single stages.

Each worker keeps those of its own stages and of one neighbour's.

A file holds one stage after one step: parameters, buffers, and the state of the optimizer. It is written durably and
appears under its name when it is complete. A checkpoint consists of the files of all stages after the same step. The
older one is deleted only after all workers have reached a barrier, so that one checkpoint is always complete.

A group that continues from an older checkpoint reaches the same steps again, with other random numbers. A worker may
still have a file of the group before. So files also have the number of the group that wrote them.

When a group forms, its workers tell each other which files they have. They continue from the newest step of which all
stages are there, and every file goes to those who should have it.
"""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from fedring.daemon.durable import delete, make_folder
from fedring.train.errors import TrainError
from fedring.workers.exchange import exchange_files, gather_integers
from fedring.workers.state_file import TensorFile

log = logging.getLogger(__name__)


class Checkpoint(NamedTuple):
    """The name of a checkpoint, which all of its files have."""

    step: int  # of the job
    group: int  # a random number that the group has drawn which wrote it


Held = frozenset[tuple[Checkpoint, int]]
"""The checkpoint and the stage of each file that a worker has."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The stages of each rank.

    Rank r is worker r modulo `width`, in pipeline r // width.
    """

    stages: int
    width: int
    pipelines: int = 1
    stage_workers: tuple[int, ...] = ()  # the number of workers of each stage; () = a worker has every width-th stage

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages that a rank trains."""
        if not self.stage_workers:
            return list(range(rank % self.width, self.stages, self.width))
        return [stage for stage in range(self.stages) if rank < sum(self.stage_workers[: stage + 1])][:1]

    @property
    def deliverers(self) -> list[int]:
        """The ranks that hold the whole update after a round.

        There are two, so that one of them may be lost.
        """
        return list(range(min(2, self.width * self.pipelines)))

    def owner(self, stage: int) -> int:
        """Return the first of the ranks that train a stage."""
        return sum(self.stage_workers[:stage]) if self.stage_workers else stage % self.width

    def kept_by(self, rank: int) -> set[int]:
        """Return the stages whose checkpoint a rank keeps.

        Every stage is kept by two ranks if there are two.

        Replicas of a stage keep the same checkpoint. If a stage has one worker, one of the next stage keeps it, too.
        """
        return {*self.stages_of(rank), *(stage for stage, _, target in self.copies() if target == rank)}

    def copies(self) -> list[tuple[int, int, int]]:
        """Return the stages that need a copy on another rank.

        Returns:
            Each stage that only one rank trains, with this rank and the rank that keeps its copy.
        """
        if self.pipelines > 1 or self.width == 1:
            return []
        if not self.stage_workers:
            return [(stage, stage % self.width, (stage + 1) % self.width) for stage in range(self.stages)]
        alone = [stage for stage, workers in enumerate(self.stage_workers) if workers == 1]
        return [(stage, self.owner(stage), self.owner((stage + 1) % self.stages)) for stage in alone]


class StageCheckpoints:
    """The checkpoint files of one job, in a folder of their own.

    Args:
        root: The folder for all jobs.
        job: The name of the job's folder there, in which damaged files are deleted.
        max_file_bytes: A larger file of a peer is refused.
    """

    def __init__(self, root: Path, job: str, *, max_file_bytes: int) -> None:
        self._folder = root / job
        self.max_file_bytes = max_file_bytes
        make_folder(self._folder)
        for part in self._folder.glob("*.part"):  # It was being written when the process was killed.
            part.unlink()
        for file in self.held():
            with suppress(TrainError):
                self.check(*file)

    def path(self, checkpoint: Checkpoint, stage: int) -> Path:
        """Return the file of a stage."""
        return self._folder / f"{checkpoint.step}.{checkpoint.group}.{stage}.safetensors"

    def check(self, checkpoint: Checkpoint, stage: int) -> None:
        """Delete a stage's file if it is damaged, and say so.

        Raises:
            TrainError: With the reason bad_checkpoint, if it was deleted.
        """
        path = self.path(checkpoint, stage)
        try:
            with TensorFile(path) as file:
                file.check()
        except (TrainError, OSError) as error:
            log.warning("the checkpoint %s is deleted: %s", path, error)
            delete(path)
            raise TrainError("bad_checkpoint", f"The checkpoint {path} was damaged, and deleted: {error}") from error

    def held(self) -> Held:
        """Return which complete files there are."""
        names = [path.name.split(".")[:-1] for path in self._folder.glob("*.*.*.safetensors")]
        numbers = [[int(part) for part in name] for name in names if len(name) == 3 and all(map(str.isdecimal, name))]
        return frozenset((Checkpoint(step, group), stage) for step, group, stage in numbers)

    @property
    def steps(self) -> int:
        """The step of the newest checkpoint known to be complete everywhere.

        It is 0 if there is none. Files alone do not tell: this worker may have written the first ones before another
        was lost.
        """
        noted = self._noted("complete")
        return max((one.step for one, _ in self.held() if _name(one) == noted), default=0)

    def keep(self, checkpoint: Checkpoint | None, stages: Collection[int]) -> None:
        """Keep only these stages of a complete checkpoint; None = no file.

        All other files are deleted.
        """
        if checkpoint is not None:
            self._note("complete", _name(checkpoint))
        for one in self.held():
            if one[0] != checkpoint or one[1] not in stages:
                self.path(*one).unlink(missing_ok=True)

    def note_result(self, checkpoint: Checkpoint, digest: str) -> None:
        """Note the digest of a checkpoint's published model."""
        self._note("result", f"{_name(checkpoint)} {digest}")

    def is_result(self, checkpoint: Checkpoint, digest: str) -> bool:
        """Return whether a checkpoint's model has this digest.

        It is false if the digest is not known.
        """
        return self._noted("result") == f"{_name(checkpoint)} {digest}"

    def note_fastest(self, micro_batches: int, settings: str) -> None:
        """Note the number of micro-batches that was measured as the fastest.

        Args:
            micro_batches: The number.
            settings: The settings of the job with which it was measured.
        """
        self._note("fastest", f"{micro_batches} {settings}")

    def fastest(self, settings: str) -> int:
        """Return the number noted for the same settings; 0 = none."""
        number, _, noted = self._noted("fastest").partition(" ")
        return int(number) if noted == settings and number.isdecimal() else 0

    def _note(self, subject: str, text: str) -> None:
        """Write a note, unless the disk is full."""
        with suppress(OSError):
            (self._folder / subject).write_text(text)

    def _noted(self, subject: str) -> str:
        try:
            return (self._folder / subject).read_text()
        except (OSError, UnicodeDecodeError):
            return ""


def _name(checkpoint: Checkpoint) -> str:
    return f"{checkpoint.step} {checkpoint.group}"


def share_copies(folder: StageCheckpoints, layout: Layout, checkpoint: Checkpoint) -> None:
    """Send a checkpoint's stages to the ranks that keep copies.

    Each worker has written its own stages before.

    Every worker of the default group must call this. When it returns, the checkpoint is complete on all workers, and
    the older one is deleted.
    """
    rank = dist.get_rank()
    copies = layout.copies()
    outgoing = [(folder.path(checkpoint, stage), target) for stage, source, target in copies if source == rank]
    incoming = [(folder.path(checkpoint, stage), source) for stage, source, target in copies if target == rank]
    for to, source in zip_longest(outgoing, incoming):
        exchange_files(to, source, limit=folder.max_file_bytes)
    dist.barrier()
    folder.keep(checkpoint, layout.kept_by(rank))


def recover(folder: StageCheckpoints, layout: Layout) -> Checkpoint | None:
    """Find the newest complete checkpoint among all workers.

    Each of them gets the files that it keeps.

    Every worker of the default group must call this.

    Returns:
        The checkpoint, of which this worker now has the files of its own stages; None if there is none.

    Raises:
        TrainError: With the reason bad_peer, if a worker does not say which files it has, or sends too much.
    """
    rank = dist.get_rank()
    everyone = _held_by_all(folder)
    checkpoint = newest_complete(everyone, layout.stages)
    if checkpoint is None:
        return None
    for stage, source, target in missing(everyone, layout, checkpoint):
        path = folder.path(checkpoint, stage)
        if rank == source:
            folder.check(checkpoint, stage)  # the other one would find the same damage, again in each round
            exchange_files((path, target), None)
        elif rank == target:
            exchange_files(None, (path, source), limit=folder.max_file_bytes)
    # Older files are deleted only when all workers have their files of this checkpoint.
    dist.barrier()
    folder.keep(checkpoint, layout.kept_by(rank))
    return checkpoint


def newest_complete(everyone: Sequence[Held], stages: int) -> Checkpoint | None:
    """Return the newest checkpoint with all stages on any workers.

    It is None if there is none.
    """
    held: Mapping[Checkpoint, set[int]] = {checkpoint: set() for one in everyone for checkpoint, _ in one}
    for one in everyone:
        for checkpoint, stage in one:
            held[checkpoint].add(stage)
    return max((checkpoint for checkpoint, found in held.items() if found >= set(range(stages))), default=None)


def missing(everyone: Sequence[Held], layout: Layout, checkpoint: Checkpoint) -> Iterator[tuple[int, int, int]]:
    """Yield each file that a worker lacks.

    The order is the same on all workers.

    Yields:
        The stage, the rank that sends it, and the rank that receives it. One rank after the other sends a stage, so
        that not all files come from one of them.
    """
    for stage in range(layout.stages):
        sources = [rank for rank, held in enumerate(everyone) if (checkpoint, stage) in held]
        targets = [rank for rank in range(len(everyone)) if stage in layout.kept_by(rank) and rank not in sources]
        for number, target in enumerate(targets):
            yield stage, sources[number % len(sources)], target


def _held_by_all(folder: StageCheckpoints) -> list[Held]:
    mine = [number for (step, group), stage in sorted(folder.held()) for number in (step, group, stage)]
    rows = gather_integers(mine)
    if any(len(row) % 3 or min(row, default=0) < 0 for row in rows):
        raise TrainError("bad_peer", "a worker does not say which checkpoints it has.")
    return [frozenset((Checkpoint(*row[at : at + 2]), row[at + 2]) for at in range(0, len(row), 3)) for row in rows]
