"""One run of a schedule on the stages of one worker."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from time import perf_counter
from typing import NamedTuple

from torch import Tensor

from fedring.pipeline.errors import PipelineError, add_note
from fedring.pipeline.messages import NO_GRADIENT, Key, StageMessage
from fedring.pipeline.stage import LOSS, Stage
from fedring.pipeline.transport import StageTransport
from fedring.schedules.schedule import Action, Kind, Versions
from fedring.schedules.traffic import Traffic

Watch = Callable[[Action, Sequence[Tensor]], None]
"""Is called before each forward and backward, with the action and the weights that it uses."""

Inputs = Mapping[str, Sequence[Tensor | None]] | Sequence[Tensor | None]
"""The micro-batches of each tensor of the batch, [batch, ...] each, by name; a sequence alone is that of "inputs"."""


class Spent(NamedTuple):
    """The number of actions of one kind, and their time."""

    actions: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Report:
    """The losses and times of one worker in a run."""

    losses: list[float] = field(default_factory=list)  # one for each update, on the worker of the last stage
    seconds: float = 0.0  # of the whole run
    spent: dict[tuple[int, Kind], Spent] = field(default_factory=dict)  # by stage and kind of action

    @property
    def busy_seconds(self) -> float:
        """The seconds in which the worker computed."""
        return sum(spent.seconds for spent in self.spent.values())

    def seconds_of(self, kind: Kind) -> float:
        """Return the seconds that all stages spent with one kind of actions."""
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


class Run:
    """One run of a schedule on the stages of one worker.

    The caller decides when to do which action.

    Attributes:
        traffic: The schedule, and the messages of its actions.
        index: The number of the worker in the schedule.
        report: The worker's actions and times so far.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        traffic: Traffic,
        transport: StageTransport,
        *,
        index: int,
        step: int,
        watch: Watch | None = None,
        report: Report | None = None,
    ) -> None:
        self.traffic, self.index, self.report = traffic, index, report or Report()
        self._stages, self._transport, self._step, self._watch = stages, transport, step, watch
        self._last = traffic.schedule.stages - 1
        self._base = {number: stage.stash.version for number, stage in stages.items()}
        self._uses = Counter(
            (action.stage, action.version)
            for action in traffic.schedule.workers[index]
            if action.kind is not Kind.UPDATE
        )
        self._inputs: Mapping[str, Sequence[Tensor | None]] = {}
        self._targets: Sequence[Tensor | None] = ()
        self._weights: Sequence[float] = ()
        self._floating: dict[int, bool] = {}  # whether the tensor of an edge has gradients

    def feed(
        self, inputs: Inputs | None, targets: Sequence[Tensor | None] | None, weights: Sequence[float] | None = None
    ) -> None:
        """Give inputs and targets of the micro-batches to local stages.

        Stages that read the batch get inputs; the last stage gets targets.

        Args:
            inputs: The tensors of the batch.
            targets: The targets of each micro-batch.
            weights: The weight of each micro-batch's loss; None means the number of its targets.

        Raises:
            PipelineError: If something is missing, or its number is not that of the schedule.
        """
        self.feed_inputs(inputs)
        if self._last not in self._stages:
            return
        self._targets = self._checked(self._last, "targets", targets)
        if weights is None:
            weights = [len(part) for part in self._targets if part is not None]
        if len(weights) != len(self._targets):
            raise PipelineError(
                f"stage {self._last} has {len(weights)} weights for {len(self._targets)} micro-batches: if a worker "
                "gets only some of the targets, pass the weights of all micro-batches"
            )
        # A weight of NaN would spoil the model, and weights of 0 alone would be divided by their sum.
        self._weights = weights
        for micro_batch, weight in enumerate(weights):
            if not 0 <= weight < inf or not sum(self._of_same_update(micro_batch)):
                raise PipelineError(
                    f"the weight {weight} of micro-batch {micro_batch} must be finite and not negative, and the "
                    "weights of an update must not all be 0"
                )

    def feed_inputs(self, inputs: Inputs | None) -> None:
        """Give the micro-batches to the local stages that read them.

        Raises:
            PipelineError: If something is missing, or its number is not that of the schedule.
        """
        named = inputs if isinstance(inputs, Mapping) else {} if inputs is None else {"inputs": inputs}
        self._inputs = {
            name: self._checked(stage, name, named.get(name))
            for stage in self._stages
            for name in self.traffic.routes.from_batch(stage)
        }

    def do(self, action: Action) -> None:
        """Do an action, and send its results.

        The messages that it needs are received before.
        """
        if action.kind is Kind.UPDATE:
            with add_note(_place(action)):
                self._update(action)
            return
        received = self._receive(action)
        if self._watch is not None:
            self._watch(action, self._weights_of(action))
        began = perf_counter()
        try:
            if action.kind is Kind.FORWARD:
                results = self._forward(action, received)
            else:
                results = self._stages[action.stage].backward(action.micro_batch, received)
        except Exception as error:  # without `add_note`, which takes as long as some layers
            error.add_note(_place(action))
            raise
        self.report.add(action, perf_counter() - began)
        self._drop_after(action)
        self._send(action, results)

    def forget(self) -> None:
        """Let all stages drop their state of this run."""
        for stage in self._stages.values():
            stage.forget()

    def _checked(self, stage: int, what: str, given: Sequence[Tensor | None] | None) -> Sequence[Tensor | None]:
        """Return the micro-batches of a stage, unless it misses one."""
        count, needed = self.traffic.schedule.micro_batches, self.traffic.schedule.micro_batches_of(stage, self.index)
        if given is None or len(given) != count:
            raise PipelineError(
                f"stage {stage} needs the {what} of {count} micro-batches, and got {0 if given is None else len(given)}"
            )
        missing = [micro_batch for micro_batch in needed if given[micro_batch] is None]
        if missing:
            raise PipelineError(f"worker {self.index} needs the {what} of micro-batch {missing[0]} for stage {stage}")
        return given

    def _receive(self, action: Action) -> dict[str, Tensor]:
        """Return the tensors that an action gets from other stages.

        For a backward, they are the sums of the gradients that later stages sent.
        """
        received: dict[str, Tensor] = {}
        for edge in self.traffic.received(action):
            if action.kind is Kind.BACKWARD and not self._floating[edge]:
                continue
            tensor = self._take(action, edge)
            name = self.traffic.edges[edge].tensor
            if action.kind is Kind.FORWARD:
                self._note(edge, tensor)
                received[name] = tensor.requires_grad_() if tensor.is_floating_point() else tensor
            elif tensor.shape != NO_GRADIENT.shape:  # the gradients of a micro-batch without samples are empty, too
                received[name] = _sum(received[name], tensor, name) if name in received else tensor
        return received

    def _take(self, action: Action, edge: int) -> Tensor:
        message = self._transport.receive(Key(self._step, action.kind, edge, action.micro_batch))
        same_version = self.traffic.schedule.versions is not Versions.STASHED  # on all stages
        if same_version and message.version != self._version(action):
            raise PipelineError(
                f"the message for {action} was computed with version {message.version} of the weights, and the "
                f"schedule needs version {self._version(action)}"
            )
        return message.tensor

    def _send(self, action: Action, results: Mapping[str, Tensor]) -> None:
        edges = self.traffic.sent(action)
        if action.kind is Kind.BACKWARD:
            edges = [edge for edge in edges if self._floating[edge]]
            # All later stages wait for this message, so say at once why it cannot come.
            if edges and not results:
                names = ", ".join(self.traffic.edges[edge].tensor for edge in edges)
                raise PipelineError(
                    f"stage {action.stage} has no gradient for {names}: its outputs do not depend on its inputs"
                )
        for edge in edges:
            name = self.traffic.edges[edge].tensor
            if name not in results and action.kind is Kind.FORWARD:
                raise PipelineError(
                    f"stage {action.stage} returned {', '.join(results)}, but stage {self.traffic.edges[edge].target} "
                    f"needs {name} of it"
                )
            tensor = results.get(name, NO_GRADIENT)
            if action.kind is Kind.FORWARD:
                self._note(edge, tensor)
            key = Key(self._step, action.kind, edge, action.micro_batch)
            self._transport.send(StageMessage(key, self._version(action), tensor))

    def _note(self, edge: int, tensor: Tensor) -> None:
        """Remember whether the tensor of an edge has gradients.

        Only floating ones do.
        """
        if self._floating.setdefault(edge, tensor.is_floating_point()) != tensor.is_floating_point():
            raise PipelineError(
                f"{self.traffic.edges[edge].tensor} is {tensor.dtype} in one micro-batch and was not in another: "
                "all must be floating, or none"
            )

    def _forward(self, action: Action, received: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        last, micro_batch = action.stage == self._last, action.micro_batch
        outputs = self._stages[action.stage].forward(
            micro_batch,
            self._with_batch(action, received),
            version=self._version(action),
            target=self._targets[micro_batch] if last else None,
            share=self._share(micro_batch) if last else 1.0,
        )
        if last:
            update = micro_batch // self.traffic.schedule.interval
            self.report.losses += [0.0] * (update + 1 - len(self.report.losses))
            self.report.losses[update] += outputs[LOSS].item()
        return outputs

    def _with_batch(self, action: Action, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the inputs of a forward, from other stages and the batch."""
        names = self.traffic.routes.from_batch(action.stage)
        read = {name: self._inputs[name][action.micro_batch] for name in names}
        return {**received, **{name: tensor for name, tensor in read.items() if tensor is not None}}

    def _update(self, action: Action) -> None:
        began = perf_counter()
        base = self._base[action.stage]
        keep = [base + version for (stage, version), left in self._uses.items() if stage == action.stage and left]
        self._stages[action.stage].update(keep=keep)
        self.report.add(action, perf_counter() - began)

    def _drop_after(self, action: Action) -> None:
        """Drop the version of the action's weights after its last use."""
        self._uses[action.stage, action.version] -= 1
        if not self._uses[action.stage, action.version]:
            self._stages[action.stage].stash.drop(self._version(action))

    def _weights_of(self, action: Action) -> Sequence[Tensor]:
        stage = self._stages[action.stage]
        if action.kind is Kind.FORWARD:
            return stage.stash.weights(self._version(action))
        return stage.weights_of(action.micro_batch)

    def _version(self, action: Action) -> int:
        return self._base[action.stage] + action.version

    def _share(self, micro_batch: int) -> float:
        """Return the micro-batch's share of the loss of its update.

        The mean losses of all micro-batches of an update, each times its share, add up to the mean over all samples.
        """
        return self._weights[micro_batch] / sum(self._of_same_update(micro_batch))

    def _of_same_update(self, micro_batch: int) -> Sequence[float]:
        """Return the weights of the micro-batches of the same update."""
        interval = self.traffic.schedule.interval
        first = micro_batch // interval * interval
        return self._weights[first : first + interval]


class EvaluationRun(Run):
    """A run of forwards only, in evaluation mode.

    Attributes:
        outputs: The outputs of the last stage for the worker's micro-batches, in their order.
    """

    def __init__(
        self, stages: Mapping[int, Stage], traffic: Traffic, transport: StageTransport, *, index: int, step: int
    ) -> None:
        super().__init__(stages, traffic, transport, index=index, step=step)
        self.outputs: list[Tensor] = []

    def _forward(self, action: Action, received: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        outputs = self._stages[action.stage].evaluate(self._with_batch(action, received))
        if action.stage == self._last:
            if len(outputs) != 1:
                raise PipelineError(f"the last stage returned {', '.join(outputs)}: it must return one tensor")
            self.outputs += outputs.values()
        return outputs


def _sum(first: Tensor, second: Tensor, name: str) -> Tensor:
    """Return the sum of two gradients of one tensor."""
    if first.shape != second.shape:
        raise PipelineError(
            f"the gradients of {name} have the shapes {list(first.shape)} and {list(second.shape)}, which must be equal"
        )
    return first + second


def _place(action: Action) -> str:
    """Return the place of an action, for the note of an error."""
    if action.kind is Kind.UPDATE:
        return f"in the update of stage {action.stage}"
    what = "forward" if action.kind is Kind.FORWARD else "backward"
    return f"in the {what} of micro-batch {action.micro_batch} in stage {action.stage}"
