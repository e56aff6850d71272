"""A worker of a pipeline, which runs its part of a schedule; and a pipeline whose stages are all in one process."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from fedring.pipeline.errors import PipelineError, add_note
from fedring.pipeline.messages import Key, Message
from fedring.pipeline.stage import Stage
from fedring.pipeline.transport import LocalTransport, Transport
from fedring.schedules.schedule import Action, Kind, Schedule, Versions
from fedring.schedules.simulation import check, neighbours, simulate

Watch = Callable[[Action, Sequence[Tensor]], None]
"""Is called before each forward and backward, with the action and the weights that it uses."""


class Spent(NamedTuple):
    """The number of actions of one kind, and their time."""

    actions: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Report:
    """What one worker did in a run."""

    losses: list[float] = field(default_factory=list)  # one for each update, on the worker of the last stage
    seconds: float = 0.0  # of the whole run
    spent: dict[tuple[int, Kind], Spent] = field(default_factory=dict)  # by stage and kind of action

    @property
    def busy_seconds(self) -> float:
        """The seconds in which the worker computed."""
        return sum(spent.seconds for spent in self.spent.values())

    def seconds_of(self, kind: Kind) -> float:
        """Return the seconds that all stages of the worker spent with one kind of actions."""
        return sum(spent.seconds for (_, what), spent in self.spent.items() if what is kind)

    def add(self, action: Action, seconds: float) -> None:
        """Count an action and its time."""
        place = action.stage, action.kind
        before = self.spent.get(place, Spent())
        self.spent[place] = Spent(before.actions + 1, before.seconds + seconds)

    @property
    def bubble(self) -> float:
        """The share of the time in which the worker computed nothing."""
        return 1 - self.busy_seconds / self.seconds if self.seconds else 0.0


class Worker:
    """One worker of a pipeline, with its stages.

    Attributes:
        stages: The worker's stages, by their numbers.
        schedule: The schedule that all workers follow.
        transport: Carries messages to and from other workers.
        index: The number of the worker in the schedule.
        step: The number of the next run.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        schedule: Schedule,
        transport: Transport,
        *,
        credits: int = 0,
        watch: Watch | None = None,
    ) -> None:
        """Make a worker.

        Args:
            stages: All stages that the schedule gives to one worker, by their numbers.
            schedule: The schedule.
            transport: Carries messages to and from other workers.
            credits: What the schedule is checked with; 0 means the credits of the transport.
            watch: Is called before each forward and backward.

        Raises:
            ScheduleError: If the schedule is wrong, or deadlocks.
            PipelineError: If the stages are not those of one worker.
        """
        check(schedule, credits=credits or getattr(transport, "credits", 0))
        workers = {schedule.owner(stage) for stage in stages}
        if len(workers) != 1 or set(stages) != {s for s in range(schedule.stages) if schedule.owner(s) in workers}:
            raise PipelineError(f"stages {sorted(stages)} are not the stages of one worker of {schedule.name}")
        self.stages, self.schedule, self.transport = stages, schedule, transport
        self.index = workers.pop()
        self.step = 0
        self._watch = watch

    def run(self, inputs: Sequence[Tensor] | None = None, targets: Sequence[Tensor] | None = None) -> Report:
        """Do this worker's part of one run of the schedule. All workers must call this at the same time.

        Args:
            inputs: The micro-batches, [batch, ...] each, on the worker of the first stage.
            targets: Their targets, [batch, ...] each, on the worker of the last stage.

        Raises:
            PipelineError: If a stage cannot go on. After any error, the stages keep nothing of the run, and the
                transport is aborted.
        """
        run = Run(self.stages, self.schedule, self.transport, step=self.step, watch=self._watch)
        run.feed(inputs, targets)
        began = time.perf_counter()
        try:
            self.transport.open(self.schedule, self.index, self.step)
            for action in self.schedule.workers[self.index]:
                run.do(action)
            self.transport.close()
        except BaseException:  # whatever it is, the other workers must not wait for this one
            run.forget()
            self.transport.abort()
            raise
        self.step += 1
        run.report.seconds = time.perf_counter() - began
        return run.report


class LocalPipeline:
    """A pipeline whose stages are all in this process, each on the device of its parameters."""

    def __init__(self, stages: Sequence[Stage], schedule: Schedule, *, watch: Watch | None = None) -> None:
        check(schedule)
        if len(stages) != schedule.stages:
            raise PipelineError(f"{len(stages)} stages were given for a schedule of {schedule.stages} stages")
        self.stages, self.schedule = stages, schedule
        self.step = 0
        self._order = [span.action for span in simulate(schedule).spans]
        self._watch = watch

    def run(self, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> Report:
        """Do the actions of all workers in one run, in an order that the schedule allows.

        Args:
            inputs: The micro-batches, [batch, ...] each.
            targets: Their targets, [batch, ...] each.
        """
        run = Run(dict(enumerate(self.stages)), self.schedule, LocalTransport(), step=self.step, watch=self._watch)
        run.feed(inputs, targets)
        began = time.perf_counter()
        try:
            for action in self._order:
                run.do(action)
        except BaseException:
            run.forget()
            raise
        self.step += 1
        run.report.seconds = time.perf_counter() - began
        return run.report


class Run:
    """One run of a schedule on some of its stages. The caller decides when to do which action."""

    def __init__(
        self,
        stages: Mapping[int, Stage],
        schedule: Schedule,
        transport: Transport,
        *,
        step: int,
        watch: Watch | None = None,
    ) -> None:
        self._stages, self._schedule, self._transport = stages, schedule, transport
        self._step, self._watch = step, watch
        self._base = {number: stage.stash.version for number, stage in stages.items()}
        self._uses = Counter(
            (action.stage, action.version)
            for stage in stages
            for action in schedule.of_stage(stage)
            if action.kind is not Kind.UPDATE
        )
        self._inputs: Sequence[Tensor] = ()
        self._targets: Sequence[Tensor] = ()
        self.report = Report()

    def feed(self, inputs: Sequence[Tensor] | None, targets: Sequence[Tensor] | None) -> None:
        """Give the micro-batches to the first stage and their targets to the last stage, if they are here.

        Raises:
            PipelineError: If one of them is missing, or their number is not that of the schedule.
        """
        ends = ((0, inputs, "inputs"), (self._schedule.stages - 1, targets, "targets"))
        for stage, given, what in ends:
            if stage in self._stages and (given is None or len(given) != self._schedule.micro_batches):
                raise PipelineError(
                    f"stage {stage} needs the {what} of {self._schedule.micro_batches} micro-batches, and got "
                    f"{0 if given is None else len(given)}"
                )
        self._inputs, self._targets = inputs or (), targets or ()

    def do(self, action: Action) -> None:
        """Do an action, after receiving the message that it needs, and send its result."""
        if action.kind is Kind.UPDATE:
            with add_note(_place(action)):
                self._update(action)
            return
        received = self._receive(action)
        if self._watch is not None:
            self._watch(action, self._weights(action))
        began = time.perf_counter()
        with add_note(_place(action)):
            if action.kind is Kind.FORWARD:
                result: Tensor | None = self._forward(action, received)
            else:
                result = self._backward(action, received)
        self.report.add(action, time.perf_counter() - began)
        self._drop_after(action)
        _, target = neighbours(action, self._schedule)
        if target is not None:
            if result is None:
                raise PipelineError(
                    f"stage {action.stage} has no gradient for stage {target}: its output does not depend on its inputs"
                )
            key = Key(self._step, action.kind, target, action.micro_batch)
            self._transport.send(Message(key, self._version(action), result))

    def forget(self) -> None:
        """Let all stages drop what they keep of this run."""
        for stage in self._stages.values():
            stage.forget()

    def _receive(self, action: Action) -> Tensor | None:
        source, _ = neighbours(action, self._schedule)
        if source is None:
            return None
        message = self._transport.receive(Key(self._step, action.kind, action.stage, action.micro_batch))
        same_version = self._schedule.versions is not Versions.STASHED  # on all stages
        if same_version and message.version != self._version(action):
            raise PipelineError(
                f"the message for {action} was computed with version {message.version} of the weights, and the "
                f"schedule needs version {self._version(action)}"
            )
        return message.tensor

    def _forward(self, action: Action, received: Tensor | None) -> Tensor:
        last = action.stage == self._schedule.stages - 1
        inputs = self._inputs[action.micro_batch] if received is None else received
        name = "inputs" if action.stage == 0 else f"stage{action.stage - 1}"
        (output,) = (
            self._stages[action.stage]
            .forward(
                action.micro_batch,
                {name: inputs.requires_grad_() if received is not None and received.is_floating_point() else inputs},
                version=self._version(action),
                target=self._targets[action.micro_batch] if last else None,
                share=self._share(action.micro_batch) if last else 1.0,
            )
            .values()
        )
        if last:
            self._add_loss(action.micro_batch, output)
        return output

    def _backward(self, action: Action, received: Tensor | None) -> Tensor | None:
        stage = self._stages[action.stage]
        gradients = {} if received is None else {stage.output: received}
        return next(iter(stage.backward(action.micro_batch, gradients).values()), None)

    def _update(self, action: Action) -> None:
        began = time.perf_counter()
        base = self._base[action.stage]
        keep = [base + version for (stage, version), left in self._uses.items() if stage == action.stage and left]
        self._stages[action.stage].update(keep=keep)
        self.report.add(action, time.perf_counter() - began)

    def _drop_after(self, action: Action) -> None:
        """Drop the version that the action used, if no later action uses it."""
        self._uses[action.stage, action.version] -= 1
        if not self._uses[action.stage, action.version]:
            self._stages[action.stage].stash.drop(self._version(action))

    def _weights(self, action: Action) -> Sequence[Tensor]:
        stage = self._stages[action.stage]
        if action.kind is Kind.FORWARD:
            return stage.stash.weights(self._version(action))
        return stage.weights_of(action.micro_batch)

    def _version(self, action: Action) -> int:
        return self._base[action.stage] + action.version

    def _share(self, micro_batch: int) -> float:
        """Return the micro-batch's share of the samples of its update.

        The mean losses of all micro-batches of an update, each times its share, add up to the mean over all samples.
        """
        first = micro_batch // self._schedule.interval * self._schedule.interval
        batch = range(first, min(first + self._schedule.interval, self._schedule.micro_batches))
        return len(self._targets[micro_batch]) / sum(len(self._targets[m]) for m in batch)

    def _add_loss(self, micro_batch: int, part: Tensor) -> None:
        update = micro_batch // self._schedule.interval
        self.report.losses += [0.0] * (update + 1 - len(self.report.losses))
        self.report.losses[update] += part.item()


def _place(action: Action) -> str:
    """Return where in the pipeline the action is, for the note of an error."""
    if action.kind is Kind.UPDATE:
        return f"in the update of stage {action.stage}"
    what = "forward" if action.kind is Kind.FORWARD else "backward"
    return f"in the {what} of micro-batch {action.micro_batch} in stage {action.stage}"
