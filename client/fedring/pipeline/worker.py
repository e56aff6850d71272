"""Workers of a pipeline, each with its part of a schedule.

A `LocalPipeline` has all of its workers in one process.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from fedring.pipeline.errors import PipelineError, described
from fedring.pipeline.replicas import add_up, share_buffers
from fedring.pipeline.run import EvaluationRun, Inputs, Report, Run, Watch
from fedring.pipeline.stage import Stage
from fedring.pipeline.transport import LocalTransport, StageTransport
from fedring.schedules.routes import Routes, chain
from fedring.schedules.schedule import Action, Kind, Schedule, forwards
from fedring.schedules.simulation import check, simulate
from fedring.schedules.traffic import Traffic


class Worker:
    """One worker of a pipeline, with its stages.

    Attributes:
        stages: The worker's stages, by their numbers.
        schedule: The schedule that all workers follow.
        routes: Which stage uses which tensors of which other one.
        transport: Carries messages to and from other workers.
        index: The number of the worker in the schedule.
        step: The number of the next run.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        schedule: Schedule,
        transport: StageTransport,
        *,
        routes: Routes | None = None,
        index: int | None = None,
        replicas: dist.ProcessGroup | None = None,
        credits: int = 0,
        watch: Watch | None = None,
    ) -> None:
        """Make a worker.

        Args:
            stages: All stages that the schedule gives to one worker, by their numbers.
            schedule: The schedule.
            transport: Carries messages to and from other workers.
            routes: Which stage uses which tensors of which other one; None means a chain.
            index: The number of the worker in the schedule. It is needed if the stage has several workers.
            replicas: The group of the workers with the same stage, as stage_group() returns it. They add up their
                gradients, unless the stage has a function `average` of its own, which must also return sums.
            credits: The credits to check the schedule with; 0 means those of the transport.
            watch: Is called before each forward and backward.

        Raises:
            ScheduleError: If the schedule is wrong, or deadlocks.
            PipelineError: If the stages are not those of one worker, or the group of their replicas is missing.
        """
        self.routes = routes or chain(schedule.stages)
        # A wrong schedule would not fail later but deadlock, with all workers waiting for each other.
        check(schedule, routes=self.routes, credits=credits or getattr(transport, "credits", 0))
        workers = {worker for stage in stages for worker in schedule.owners(stage)} if index is None else {index}
        if len(workers) != 1 or set(stages) != {s for worker in workers for s in schedule.stages_of(worker)}:
            raise PipelineError(
                f"stages {sorted(stages)} are not the stages of one worker of {schedule.name}; if a stage has several "
                "workers, pass index"
            )
        self.stages, self.schedule, self.transport = stages, schedule, transport
        self.index = workers.pop()
        self.step = 0
        self._traffic = Traffic(schedule, self.routes)
        self._replicas, self._watch = replicas, watch
        for number, stage in stages.items():
            _prepare(stage, number, self.routes)
            if len(schedule.owners(number)) == 1:
                continue
            if replicas is None:
                raise PipelineError(
                    f"stage {number} has {len(schedule.owners(number))} workers: pass replicas=stage_group(schedule)"
                )
            stage.average = stage.average or partial(add_up, group=replicas)

    def run(
        self,
        inputs: Inputs | None = None,
        targets: Sequence[Tensor | None] | None = None,
        *,
        weights: Sequence[float] | None = None,
    ) -> Report:
        """Do this worker's part of one run of the schedule.

        All workers must call this at the same time.

        Args:
            inputs: The tensors of the batch that this worker's stages read: by name, the micro-batches [batch, ...]. A
                sequence alone is that of "inputs". Micro-batches that other replicas do may be None.
            targets: The targets of the micro-batches, [batch, ...] each, on the workers of the last stage.
            weights: The weights of the micro-batches' mean losses in that of their update, on the workers of the last
                stage. None means the number of their targets. They are needed if targets are None.

        Returns:
            The report of the worker. If the last stage has replicas, the loss of an update is the sum of theirs.

        Raises:
            PipelineError: If a stage cannot go on. After any error, the stages keep nothing of the run, and the
                transport is aborted.
        """
        run = Run(self.stages, self._traffic, self.transport, index=self.index, step=self.step, watch=self._watch)
        with self._failing_together(run):
            run.feed(inputs, targets, weights)
            self._do_all(run)
        return run.report

    def evaluate(self, inputs: Inputs | None = None, *, micro_batches: int = 0) -> list[Tensor] | None:
        """Run forwards only, in evaluation mode with the newest weights.

        All workers must call this at the same time.

        No worker needs the whole model. The stages keep nothing, and weights do not change. Replicas of a stage take
        over the buffers of replica 0.

        Args:
            inputs: As for run().
            micro_batches: Their number, equal on all workers; 0 means as many as in a run.

        Returns:
            The outputs of the last stage without its loss, [batch, ...] each, in the order of the micro-batches, on the
            worker of the last stage; if it has replicas, each returns those of its micro-batches. None on all others.

        Raises:
            ScheduleError: If the number is negative.
            PipelineError: If a stage cannot go on. After any error, the transport is aborted.
        """
        schedule = forwards(self.schedule, micro_batches or self.schedule.micro_batches)
        traffic = Traffic(schedule, self.routes)
        run = EvaluationRun(self.stages, traffic, self.transport, index=self.index, step=self.step)
        with self._failing_together(run):
            run.feed_inputs(inputs)
            # All replicas must evaluate one model; the running averages of each have seen only its own micro-batches.
            if self._replicas is not None:
                for stage in self.stages.values():
                    share_buffers(stage.module, self._replicas)
            self._do_all(run)
        return run.outputs if schedule.stages - 1 in self.stages else None

    def _do_all(self, run: Run) -> None:
        began = time.perf_counter()
        self.transport.open(run.traffic, self.index, self.step)
        for action in run.traffic.schedule.workers[self.index]:
            run.do(action)
        self.transport.close()
        self.step += 1
        run.report.seconds = time.perf_counter() - began

    @contextmanager
    def _failing_together(self, run: Run) -> Iterator[None]:
        """Let all workers fail after an error inside the context.

        The stages drop their state of the run.
        """
        try:
            yield
        except BaseException as error:  # whatever it is, the other workers must not wait for this one
            run.forget()
            numbers = ", ".join(map(str, self.stages))
            self.transport.abort(f"stage {numbers} has failed: {described(error)}")
            raise


class LocalPipeline:
    """A pipeline whose workers are all in this process.

    Each stage is on the device of its parameters.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        schedule: Schedule,
        *,
        routes: Routes | None = None,
        watch: Watch | None = None,
    ) -> None:
        """Make a pipeline.

        Args:
            stages: The stages in order; of a stage with replicas, one for each of them.
            schedule: The schedule.
            routes: Which stage uses which tensors of which other one; None means a chain.
            watch: Is called before each forward and backward.

        Raises:
            ScheduleError: If the schedule is wrong, or deadlocks.
            PipelineError: If the number of stages is wrong.
        """
        self.routes = routes or chain(schedule.stages)
        check(schedule, routes=self.routes)
        places = [(number, worker) for number in range(schedule.stages) for worker in schedule.owners(number)]
        if len(stages) != len(places):
            raise PipelineError(f"{len(stages)} stages were given for a schedule of {len(places)} stages and replicas")
        self.stages, self.schedule = stages, schedule
        self.step = 0
        self._workers: list[dict[int, Stage]] = [{} for _ in schedule.workers]
        for stage, (number, worker) in zip(stages, places, strict=True):
            _prepare(stage, number, self.routes)
            self._workers[worker][number] = stage
        self._watch = watch

    def run(self, inputs: Inputs, targets: Sequence[Tensor], *, weights: Sequence[float] | None = None) -> Report:
        """Do the actions of all workers in one run.

        The order is one that the schedule allows.

        Args:
            inputs: The tensors of the batch: by name, the micro-batches [batch, ...]. A sequence alone is that of
                "inputs".
            targets: Their targets, [batch, ...] each.
            weights: The weights of the micro-batches' mean losses; None means the number of their targets.
        """
        transport, report = LocalTransport(), Report()
        traffic = Traffic(self.schedule, self.routes)
        runs = [
            Run(stages, traffic, transport, index=worker, step=self.step, watch=self._watch, report=report)
            for worker, stages in enumerate(self._workers)
        ]
        for run in runs:
            run.feed(inputs, targets, weights)
        self._do_all(runs)
        return report

    def evaluate(self, inputs: Inputs) -> list[Tensor]:
        """Run forwards only, in evaluation mode with the newest weights.

        Returns the outputs of the last stage.

        Args:
            inputs: As for run(), but as many micro-batches as you like.

        Raises:
            ScheduleError: If there are none.
        """
        given = next(iter(inputs.values()), ()) if isinstance(inputs, Mapping) else inputs
        traffic = Traffic(forwards(self.schedule, len(given)), self.routes)
        firsts = [
            {number: self._workers[self.schedule.owners(number)[0]][number] for number in stages}
            for stages in self._workers
        ]
        transport = LocalTransport()
        runs = [
            EvaluationRun(stages, traffic, transport, index=worker, step=self.step)
            for worker, stages in enumerate(firsts)
        ]
        for run in runs:
            run.feed_inputs(inputs)
        self._do_all(runs)
        # Replicas of the last stage do micro-batches in turn, so their outputs are merged in that order.
        last = self.schedule.stages - 1
        queues = [iter(runs[worker].outputs) for worker in self.schedule.owners(last)]
        return [next(queues[micro_batch % len(queues)]) for micro_batch in range(len(given))]

    def _do_all(self, runs: Sequence[Run]) -> None:
        began, traffic = time.perf_counter(), runs[0].traffic
        summed: set[Action] = set()
        try:
            for span in simulate(traffic.schedule, routes=self.routes).spans:
                action = span.action
                if action.kind is Kind.UPDATE and action not in summed:
                    summed.add(action)
                    owners = traffic.schedule.owners(action.stage)
                    _add_up_here([self._workers[worker][action.stage] for worker in owners])
                runs[span.worker].do(action)
        except BaseException:
            for run in runs:
                run.forget()
            raise
        self.step += 1
        runs[0].report.seconds = time.perf_counter() - began


def _prepare(stage: Stage, number: int, routes: Routes) -> None:
    """Name the output of a stage that returns one unnamed tensor."""
    names = list(routes.consumers(number))
    if len(names) == 1:
        stage.output = names[0]


def _add_up_here(replicas: Sequence[Stage]) -> None:
    """Add up the gradients of local replicas of a stage.

    All of them are in this process.
    """
    if len(replicas) == 1:
        return
    for same in zip(*(stage.stash.parameters for stage in replicas), strict=True):
        gradients = [parameter.grad for parameter in same if parameter.grad is not None]
        if gradients:
            total = torch.stack(gradients).sum(0)
            for parameter in same:
                parameter.grad = total.to(parameter.device, copy=True)
