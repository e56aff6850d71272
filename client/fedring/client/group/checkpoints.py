"""A worker's checkpoints of a data-parallel job.

It writes them, and continues from them after all workers were killed.
"""

import logging
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fedring.client.group.hooks import JobHook
from fedring.train.errors import SeamError
from fedring.workers.replica import Replica
from fedring.workers.replica_checkpoints import KEPT, BadCheckpoint, CannotKeep, Content, ReplicaCheckpoints
from fedring.workers.resume import Resumption, agree, is_same_on_all, replica_content, restore_replica

log = logging.getLogger(__name__)


class JobCheckpoints:
    """The checkpoints of one job on one worker.

    Args:
        folder: The folder of the checkpoints, which only this worker uses.
        job: Names the job; the checkpoints of other jobs are deleted.

    Attributes:
        steps: The steps of the checkpoints that were found at the start and can still be used, the newest first.
        random: The state of random numbers with which training goes on; None = the round's own seed.
    """

    def __init__(self, folder: Path, job: str) -> None:
        self._folder = ReplicaCheckpoints(folder, job)
        self._taken = (0, 0)  # round and step of the newest one that this process has taken
        self._works = True
        self.steps = self._folder.steps()
        self.random: Content | None = None

    @property
    def metrics(self) -> dict[str, float]:
        """The bytes and seconds spent on checkpoints by this process, by name."""
        return {"checkpoint_bytes": self._folder.bytes_written, "checkpoint_seconds": round(self._folder.seconds, 6)}

    def take(self, replica: Replica, hook: JobHook, random: Content, *, round_: int) -> None:
        """Write a checkpoint, unless this step has one.

        If that is impossible, the reason is logged and training continues.

        Args:
            replica: Model, optimizer and progress.
            hook: The job's hook.
            random: The state of random numbers.
            round_: The number of the round.
        """
        steps = replica.progress.steps
        if not self._works or self._taken == (round_, steps):
            return
        content = {"round": round_, "workers": dist.get_world_size(), "random": random, "hook": hook.saved()}
        try:
            self._folder.write(steps, {**content, "replica": replica_content(replica)})
            self._taken = round_, steps
        except CannotKeep as error:
            log.error("this job has no checkpoints on this worker, because %s", error)
            self._works = False

    def resume(self, replica: Replica, hook: JobHook, *, live: bool, round_: int) -> Resumption | None:
        """Continue from a checkpoint, unless a worker's memory is as new.

        The memory of all workers of the default group counts. Every worker of the group must call this.

        Args:
            replica: Model, optimizer and progress, which are restored if this worker has the checkpoint.
            hook: The job's hook, likewise.
            live: Whether this worker has the job's state in memory.
            round_: The number of the round.

        Returns:
            The checkpoint; `on_all` says whether the whole group is as it was when the checkpoint was taken, in this
            round, so that nothing has to be exchanged. None if the group does not go on from one.

        Raises:
            SeamError: With the reason bad_checkpoint, if this worker's checkpoint cannot be used; it is deleted.
        """
        self.random = None
        found = agree(self.steps, live=replica.progress.steps if live else None, most=KEPT)
        if found is None or found.step not in self.steps:
            return found
        try:
            content = self._folder.read(found.step)
            same_round = content["round"] == round_
            restore_replica(replica, content["replica"], same_round=same_round)
            hook.restore(content["hook"], replica.progress.steps)
        except (BadCheckpoint, KeyError, TypeError, ValueError) as error:
            self._folder.drop_after(-1)
            self.steps = []
            detail = f"The checkpoint of step {found.step} cannot be used and was deleted: {error}."
            raise SeamError("bad_checkpoint", detail) from error
        as_before = (
            found.on_all and is_same_on_all(content, replica.model) and content["workers"] == dist.get_world_size()
        )
        within = as_before and same_round  # else the hook enters the group, as it does when a round begins
        if within:
            self.random = content["random"]
        log.info("continuing from the checkpoint of step %d", found.step, extra={"step": found.step})
        return Resumption(found.step, on_all=within)

    def drop_after(self, step: int) -> None:
        """Delete the checkpoints of later steps, which will be taken again."""
        self._folder.drop_after(step)
        self.steps = [one for one in self.steps if one <= step]


def job_name(key: tuple[Any, ...]) -> str:
    """Return the name of a job in its checkpoints.

    It consists of the server's run, its epoch and the job's id.
    """
    return " ".join(map(str, key))
