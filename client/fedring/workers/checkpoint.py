"""Checkpoints of a pipeline: files, of which each worker keeps those of its own stages and of one neighbour's.

A file holds one stage after one step: parameters, buffers, and the state of the optimizer. It is written durably and
appears under its name when it is complete. A checkpoint consists of the files of all stages after the same step. The
older one is deleted only after all workers have reached a barrier, so that one checkpoint is always complete.

When a group forms, its workers tell each other which files they have. They continue from the newest step of which all
stages are there, and every file goes to those who should have it.
"""

import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import torch.distributed as dist

from fedring.workers.exchange import exchange_files, gather_integers

Held = frozenset[tuple[int, int]]
"""The step and the stage of each file that a worker has."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Which rank has which stages: rank r is worker r modulo `width`, in pipeline r // width."""

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
        """The ranks that hold the whole update at the end of a round: two, so that one of them may be lost."""
        return list(range(min(2, self.width * self.pipelines)))

    def owner(self, stage: int) -> int:
        """Return the first of the ranks that train a stage."""
        return sum(self.stage_workers[:stage]) if self.stage_workers else stage % self.width

    def kept_by(self, rank: int) -> set[int]:
        """Return the stages whose checkpoint a rank keeps, so that every stage is kept by two ranks if there are two.

        Replicas of a stage keep the same checkpoint. If a stage has one worker, one of the next stage keeps it, too.
        """
        return {*self.stages_of(rank), *(stage for stage, _, target in self.copies() if target == rank)}

    def copies(self) -> list[tuple[int, int, int]]:
        """Return the stages of which only one rank trains them, each with this rank and the one that keeps a copy."""
        if self.pipelines > 1 or self.width == 1:
            return []
        if not self.stage_workers:
            return [(stage, stage % self.width, (stage + 1) % self.width) for stage in range(self.stages)]
        alone = [stage for stage, workers in enumerate(self.stage_workers) if workers == 1]
        return [(stage, self.owner(stage), self.owner((stage + 1) % self.stages)) for stage in alone]


class CheckpointFolder:
    """The checkpoint files of one job, in a folder of their own.

    Args:
        root: The folder for all jobs.
        job: Names the job. Files of other jobs are deleted.
        max_file_bytes: A larger file of a peer is refused.
    """

    def __init__(self, root: Path, job: str, *, max_file_bytes: int) -> None:
        self._folder = root / job
        self.max_file_bytes = max_file_bytes
        if root.exists():
            for other in root.iterdir():
                if other.name != job:
                    shutil.rmtree(other, ignore_errors=True)
        self._folder.mkdir(parents=True, exist_ok=True)
        for part in self._folder.glob("*.part"):  # It was being written when the process was killed.
            part.unlink()

    def path(self, step: int, stage: int) -> Path:
        """Return the file of a stage after a step."""
        return self._folder / f"{step}.{stage}.safetensors"

    def held(self) -> Held:
        """Return which complete files there are."""
        names = (path.name.split(".") for path in self._folder.glob("*.*.safetensors"))
        return frozenset((int(step), int(stage)) for step, stage, _ in names if step.isdecimal() and stage.isdecimal())

    @property
    def steps(self) -> int:
        """The step of the newest checkpoint that is known to be complete on all workers; 0 = there is none.

        While there are files of two steps, it is not known whether the newer one is complete.
        """
        return min((step for step, _ in self.held()), default=0)

    def keep(self, step: int, stages: Collection[int]) -> None:
        """Delete all files but those of these stages after this step."""
        for one in self.held():
            if one[0] != step or one[1] not in stages:
                self.path(*one).unlink(missing_ok=True)

    def note_result(self, step: int, digest: str) -> None:
        """Note that the model after a step, as it is published, has this digest. It need not survive a power loss."""
        (self._folder / "result").write_text(f"{step} {digest}")

    def is_result(self, step: int, digest: str) -> bool:
        """Return whether the model after a step is known to have this digest."""
        try:
            return (self._folder / "result").read_text() == f"{step} {digest}"
        except (OSError, UnicodeDecodeError):
            return False


def share_copies(folder: CheckpointFolder, layout: Layout, step: int) -> None:
    """Finish a checkpoint of which each worker has written its own stages: send them to whom else keeps them.

    Every worker of the default group must call this. When it returns, the checkpoint is complete on all workers, and
    the older one is deleted.
    """
    rank = dist.get_rank()
    copies = layout.copies()
    outgoing = [(folder.path(step, stage), target) for stage, source, target in copies if source == rank]
    incoming = [(folder.path(step, stage), source) for stage, source, target in copies if target == rank]
    for to, source in zip_longest(outgoing, incoming):
        exchange_files(to, source, limit=folder.max_file_bytes)
    dist.barrier()
    folder.keep(step, layout.kept_by(rank))


def recover(folder: CheckpointFolder, layout: Layout) -> int | None:
    """Find the newest complete checkpoint among all workers, and give each of them the files that it keeps.

    Every worker of the default group must call this.

    Returns:
        The step of the checkpoint, of which this worker now has the files of its own stages; None if there is none.
    """
    rank = dist.get_rank()
    everyone = _held_by_all(folder)
    step = newest_complete(everyone, layout.stages)
    if step is None:
        return None
    for stage, source, target in missing(everyone, layout, step):
        path = folder.path(step, stage)
        if rank == source:
            exchange_files((path, target), None)
        elif rank == target:
            exchange_files(None, (path, source), limit=folder.max_file_bytes)
    dist.barrier()
    folder.keep(step, layout.kept_by(rank))
    return step


def newest_complete(everyone: Sequence[Held], stages: int) -> int | None:
    """Return the newest step of which all stages are held by somebody; None if there is none."""
    held: Mapping[int, set[int]] = {step: set() for one in everyone for step, _ in one}
    for one in everyone:
        for step, stage in one:
            held[step].add(stage)
    return max((step for step, found in held.items() if found >= set(range(stages))), default=None)


def missing(everyone: Sequence[Held], layout: Layout, step: int) -> Iterator[tuple[int, int, int]]:
    """Yield each file that somebody should have and has not, in an order that is the same on all workers.

    Yields:
        The stage, the rank that sends it, and the rank that receives it. One rank after the other sends a stage, so
        that not all files come from one of them.
    """
    for stage in range(layout.stages):
        sources = [rank for rank, held in enumerate(everyone) if (step, stage) in held]
        targets = [rank for rank in range(len(everyone)) if stage in layout.kept_by(rank) and rank not in sources]
        for number, target in enumerate(targets):
            yield stage, sources[number % len(sources)], target


def _held_by_all(folder: CheckpointFolder) -> list[Held]:
    mine = [number for one in sorted(folder.held()) for number in one]
    return [frozenset(zip(row[::2], row[1::2], strict=True)) for row in gather_integers(mine)]
