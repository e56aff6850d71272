"""A worker of a pipeline: runs its part of a schedule, step by step."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from fedring.pipeline.errors import PipelineError, noted
from fedring.pipeline.messages import Key, Message
from fedring.pipeline.stage import Stage
from fedring.pipeline.transport import LocalTransport, Transport
from fedring.schedules.schedule import Action, Kind, Schedule, Versions
from fedring.schedules.simulation import check, neighbours, simulate

Watch = Callable[[Action, Sequence[Tensor]], None]  # what is about to be done, and the weights that it uses


class Spent(NamedTuple):
    """How often something was done, and in how many seconds."""

    actions: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Report:
    """What a run came to on a worker; the losses are of the one that has the last stage, one an update."""

    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    spent: dict[tuple[int, Kind], Spent] = field(default_factory=dict)  # by stage, and by what it did

    @property
    def busy_seconds(self) -> float:
        """Seconds in which the worker computed."""
        return sum(spent.seconds for spent in self.spent.values())

    def seconds_of(self, kind: Kind) -> float:
        """Seconds in which all its stages did this."""
        return sum(spent.seconds for (_, what), spent in self.spent.items() if what is kind)

    def add(self, action: Action, seconds: float) -> None:
        """The action is counted."""
        place = action.stage, action.kind
        before = self.spent.get(place, Spent())
        self.spent[place] = Spent(before.actions + 1, before.seconds + seconds)

    @property
    def bubble(self) -> float:
        """The share of the time in which the worker computed nothing."""
        return 1 - self.busy_seconds / self.seconds if self.seconds else 0.0


class Worker:
    """Stages of one process, by their numbers; run() does its part of one run of the schedule."""

    def __init__(
        self,
        stages: Mapping[int, Stage],
        schedule: Schedule,
        transport: Transport,
        *,
        credits: int = 0,
        watch: Watch | None = None,
    ) -> None:
        check(schedule, credits=credits or getattr(transport, "credits", 0))
        workers = {schedule.owner(stage) for stage in stages}
        if len(workers) != 1 or set(stages) != {s for s in range(schedule.stages) if schedule.owner(s) in workers}:
            raise PipelineError(f"stages {sorted(stages)} are not those of one worker of {schedule.name}")
        self.stages, self.schedule, self.transport = stages, schedule, transport
        self.index = workers.pop()
        self.step = 0
        self._watch = watch

    def run(self, inputs: Sequence[Tensor] | None = None, targets: Sequence[Tensor] | None = None) -> Report:
        """Every action is done; the worker of the first stage gives the micro-batches, that of the last the targets."""
        run = Run(self.stages, self.schedule, self.transport, step=self.step, watch=self._watch)
        run.feed(inputs, targets)
        began = time.perf_counter()
        try:
            self.transport.open(self.schedule, self.index, self.step)
            for action in self.schedule.workers[self.index]:
                run.do(action)
            self.transport.close()
        except BaseException:  # whatever it is, nobody is to wait for this worker
            run.forget()
            self.transport.abort()
            raise
        self.step += 1
        run.report.seconds = time.perf_counter() - began
        return run.report


class LocalPipeline:
    """All stages in one process, each where its parameters are: single-machine model parallelism."""

    def __init__(self, stages: Sequence[Stage], schedule: Schedule, *, watch: Watch | None = None) -> None:
        check(schedule)
        if len(stages) != schedule.stages:
            raise PipelineError(f"{len(stages)} stages for a schedule of {schedule.stages}")
        self.stages, self.schedule = stages, schedule
        self.step = 0
        self._order = [span.action for span in simulate(schedule).spans]
        self._watch = watch

    def run(self, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> Report:
        """Every action of every worker is done, each as soon as it could be."""
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
    """One run of a schedule: the actions of some stages, whoever decides when."""

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
        """The first and the last stage have their micro-batches."""
        ends = ((0, inputs, "inputs"), (self._schedule.stages - 1, targets, "targets"))
        for stage, given, what in ends:
            if stage in self._stages and (given is None or len(given) != self._schedule.micro_batches):
                raise PipelineError(f"stage {stage} needs the {what} of {self._schedule.micro_batches} micro-batches")
        self._inputs, self._targets = inputs or (), targets or ()

    def do(self, action: Action) -> None:
        """The action is done, and its message sent."""
        if action.kind is Kind.UPDATE:
            with noted(_place(action)):
                self._update(action)
            return
        came = self._receive(action)
        if self._watch is not None:
            self._watch(action, self._weights(action))
        began = time.perf_counter()
        with noted(_place(action)):
            result = self._forward(action, came) if action.kind is Kind.FORWARD else self._backward(action, came)
        self.report.add(action, time.perf_counter() - began)
        self._used(action)
        _, target = neighbours(action, self._schedule)
        if target is not None:
            if result is None:
                raise PipelineError(f"stage {action.stage} has no gradient for stage {target}: its inputs have no part")
            key = Key(self._step, action.kind, target, action.micro_batch)
            self._transport.send(Message(key, self._version(action), result))

    def forget(self) -> None:
        """The stages keep nothing of this run."""
        for stage in self._stages.values():
            stage.forget()

    def _receive(self, action: Action) -> Tensor | None:
        source, _ = neighbours(action, self._schedule)
        if source is None:
            return None
        message = self._transport.receive(Key(self._step, action.kind, action.stage, action.micro_batch))
        equal = self._schedule.versions is not Versions.STASHED
        if equal and message.version != self._version(action):
            raise PipelineError(f"{action} came from weights {message.version}, not {self._version(action)}")
        return message.tensor

    def _forward(self, action: Action, came: Tensor | None) -> Tensor:
        last = action.stage == self._schedule.stages - 1
        inputs = self._inputs[action.micro_batch] if came is None else came
        output = self._stages[action.stage].forward(
            action.micro_batch,
            inputs.requires_grad_() if came is not None and came.is_floating_point() else inputs,
            version=self._version(action),
            target=self._targets[action.micro_batch] if last else None,
            share=self._share(action.micro_batch) if last else 1.0,
        )
        if last:
            self._add_loss(action.micro_batch, output)
        return output

    def _backward(self, action: Action, came: Tensor | None) -> Tensor | None:
        return self._stages[action.stage].backward(action.micro_batch, came)

    def _update(self, action: Action) -> None:
        began = time.perf_counter()
        base = self._base[action.stage]
        keep = [base + version for (stage, version), left in self._uses.items() if stage == action.stage and left]
        self._stages[action.stage].update(keep=keep)
        self.report.add(action, time.perf_counter() - began)

    def _used(self, action: Action) -> None:
        """A version that no later action uses is gone."""
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
        """The micro-batch's part of its update's samples: its mean losses, times their shares, add up to the mean."""
        first = micro_batch // self._schedule.interval * self._schedule.interval
        batch = range(first, min(first + self._schedule.interval, self._schedule.micro_batches))
        return len(self._targets[micro_batch]) / sum(len(self._targets[m]) for m in batch)

    def _add_loss(self, micro_batch: int, part: Tensor) -> None:
        update = micro_batch // self._schedule.interval
        self.report.losses += [0.0] * (update + 1 - len(self.report.losses))
        self.report.losses[update] += part.item()


def _place(action: Action) -> str:
    """Where an error in the action happened."""
    if action.kind is Kind.UPDATE:
        return f"in the update of stage {action.stage}"
    what = "forward" if action.kind is Kind.FORWARD else "backward"
    return f"in the {what} of micro-batch {action.micro_batch} in stage {action.stage}"
