"""An open round, and its kind."""

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, ClassVar

from google.protobuf.descriptor import FileDescriptor
from grpc import aio

from fedring.codec import CodecError
from fedring.codec.schema import Schema
from fedring.daemon.metrics import Registry
from fedring.server.aggregation.terms import Terms
from fedring.server.group.rendezvous import Rendezvous
from fedring.server.model.guards import weight_of
from fedring.server.model.masked_sum import GroupMasks
from fedring.server.model.transforms.listing import RoundSteps, Transforms, transforms_of
from fedring.server.model.transforms.transform import ClosedRound, Past
from fedring.server.round.events import Member, Phase, PhaseStep, RoundRules, RoundState, Steps
from fedring.server.round.trace import RoundTrace
from fedring.server.state.rows import ModelRow, RoundRow, UpdateRow
from fedring.train.jobs.job import Job
from fedring.train.jobs.override_table import with_overrides
from fedring.train.metrics import combine, with_origin
from fedring.train.orders.commands import client_command
from fedring.v1 import federation_pb2 as pb
from fedring.v1.rendezvous_pb2 import Done

PERIOD = 1.0
"""Seconds between two notes of the time that open rounds have left. Each says what will be left at the next one: a kill
gives no notice."""


@dataclass(slots=True)
class ClientTraffic:
    """The bytes and seconds of one client's transfers in one round."""

    upload_bytes: int = 0
    download_bytes: int = 0
    upload_seconds: float = 0.0
    download_seconds: float = 0.0


@dataclass(slots=True)
class OpenRound:
    """One open round; owned by `Rounds`.

    Attributes:
        state: the machine's state: all clients that are here, and this round. Only `Rounds` changes it.
        changed: set whenever the state has changed; whoever runs the round clears it.
        settling: held while a phase of the round ends, and while a batch of updates is committed.
        group: its workers, if they train together.
        kind: the differences of this round from a plain one.
        outstanding: the clients that still work on its command, each with the end of its time, monotonic seconds; only
            of a kind whose commands outlast their rounds.
        carried: the clients that worked on commands of its job's earlier rounds when it was opened.
    """

    row: RoundRow
    job: Job  # with the settings of this round
    command: pb.TrainCmd
    base: ModelRow
    model: pb.SmallModel | None = None  # the base model, if it is small enough to travel with the command
    state: RoundState = field(default_factory=RoundState)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    settling: asyncio.Lock = field(default_factory=asyncio.Lock)
    group: Rendezvous | None = None
    trace: RoundTrace = field(default_factory=RoundTrace)
    kind: "RoundKind" = field(init=False)
    made: ModelRow | None = None  # the model that it has published
    outstanding: dict[str, float] = field(default_factory=dict)
    carried: frozenset[str] = frozenset()
    absent: Mapping[str, Member] = field(default_factory=dict)  # those of them that are away
    published: int = 0  # models that its job had published before, if its kind asks for them
    drawn: frozenset[str] = frozenset()  # clients that it takes, from before the command is noted on the disk
    held_since: float = 0.0  # since when it waits for its turn or for people, monotonic seconds; 0 = it does not
    started: float = 0.0  # when the command was sent, monotonic seconds; 0 = it was not yet
    accepted: dict[str, UpdateRow] = field(default_factory=dict)
    in_memory: set[str] = field(default_factory=set)  # clients whose accepted payloads were never read from the disk
    traffic: dict[str, ClientTraffic] = field(default_factory=dict)
    done: dict[str, Done] = field(default_factory=dict)  # reports of a group's workers
    stragglers: frozenset[str] = frozenset()  # clients that straggler_factor or select_factor has left out
    left_out: frozenset[str] = frozenset()  # clients that are not drawn: an earlier round has proved them wrong
    prepared: RoundSteps | None = None  # the transforms' steps for the accepted updates; None = not known yet
    failures: list[str] = field(default_factory=list)  # sentences: who could not train, what was damaged
    asked: bool = False  # whether a client has failed in it whose site had not approved the job then
    unevaluated: dict[str, str] = field(default_factory=dict)  # sentences on evaluations that lack figures, by client
    stop_reason: str = ""  # why the round ends without a model if the disk refuses that model; "" = nobody asked
    making: bool = False  # whether its model is made right now, and is published in a moment
    retryable: bool = True  # False if the job's next rounds would end as this one does
    transforms: Transforms = field(init=False)  # of the job
    _terms: dict[int, Terms] = field(default_factory=dict)  # by the size of the client's group

    def __post_init__(self) -> None:
        self.transforms = transforms_of(self.job)
        self.kind = RoundKind(self)

    def event(self, seconds: float, model: pb.SmallModel | None = None, overrides: Sequence[int] = ()) -> bytes:
        """Return the serialized command.

        Args:
            seconds: how long the clients have.
            model: the base model, if the command is to carry it.
            overrides: the places of those that hold for the client.
        """
        command = pb.TrainCmd(deadline_seconds=seconds, model=model)
        own = with_overrides(self.job, overrides)
        command.MergeFrom(self.command if own is self.job else client_command(self.command, own))
        return pb.ServerEvent(train=command).SerializeToString()

    def terms(self, client: str, schema: Schema) -> Terms:
        """Return the demands of the round on an update.

        Args:
            client: whose update it is.
            schema: of the base model.

        Raises:
            UnknownRound: "not_selected", if the client is in no group of a round that has groups.
        """
        members = self.kind.members_with(client)
        if (known := self._terms.get(members)) is None:
            terms = Terms(self.base.digest, self.command.max_update_bytes, schema)
            known = self._terms[members] = self.transforms.terms(terms, self.command, members)
        return known

    def closed(self, secret: str, past: Past) -> ClosedRound:
        """Return the round as it is when it takes no more updates.

        Args:
            secret: of the run, which clients do not know.
            past: of the round's job.
        """
        groups = self.kind.sums
        chosen = self.accepted if groups is None else [client for group in groups for client in group.clients]
        updates = [self.accepted[client] for client in sorted(chosen)]
        told = {client: with_overrides(self.job, places) for client, places in self.row.overrides.items()}
        shown = (self.kind.expected, secret, groups, past, told)
        return ClosedRound(self.job, self.command, updates, *shown, in_memory=frozenset(self.in_memory))

    @property
    def ids(self) -> dict[str, object]:
        """The round and its job, for logs."""
        return {"round": self.row.round, "job": self.row.job_id}

    @property
    def phase(self) -> Phase | None:
        """The phase of the round.

        None before it begins, and after it has finished.
        """
        return self.state.round.phase if self.state.round else None

    @property
    def stalled(self) -> frozenset[str]:
        """The clients that make no progress."""
        return self.state.round.stalled if self.state.round else frozenset()

    @property
    def members(self) -> frozenset[str]:
        """The clients that take part in it, until it ends."""
        round_ = self.state.round
        drawn = self.drawn | self.carried
        return (drawn | round_.selected | round_.evaluators) - round_.failed if round_ else drawn

    @property
    def draws(self) -> bool:
        """Whether it may take more clients now."""
        waits = self.phase is Phase.WAITING and not self.drawn
        return waits or (self.kind.lasting and self.phase is Phase.TRAINING)

    @property
    def alone(self) -> bool:
        """Whether its clients take part in no other round meanwhile."""
        return self.job.training.grouped or self.kind.alone

    def asks(self, client: str) -> bool:
        """Return whether the client was asked to train or to evaluate."""
        round_ = self.state.round
        return round_ is not None and (client in round_.selected or client in round_.evaluators)

    @property
    def title(self) -> str:
        """The name of the round for people, by its job."""
        return f"round {self.row.job_round} of job {self.row.job_id}"

    @property
    def missing(self) -> list[str]:
        """The selected clients without a result, sorted."""
        return sorted({*self.row.selected}.difference(self.accepted, self.done, self.kind.going_on))

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline, above 0."""
        return max(self.job.deadline_seconds - (time.monotonic() - self.started), 0.001)

    def seconds_of(self, client: str) -> float:
        """Return the seconds until a client's own deadline, above 0."""
        until = self.outstanding.get(client)
        return self.seconds_left if until is None else max(until - time.monotonic(), 0.001)

    def ended(self, phase: Phase, *, reason: str = "", model_version: int = 0) -> RoundRow:
        """Return the row of the round as it ends."""
        stats = self.stats(time.monotonic() - self.started if self.started else 0.0)
        now, going_on = time.time(), self.kind.going_on
        selected = tuple(client for client in self.row.selected if client not in going_on)
        ended = replace(self.row, phase=phase, reason=reason, model_version=model_version, ended_at=now, stats=stats)
        return replace(ended, selected=selected)

    def stats(self, seconds: float) -> dict[str, Any]:
        """Return the figures for the round's row.

        `seconds` is the time from the command to the model.
        """
        clients: dict[str, dict[str, Any]] = {}
        # A client that moved bytes but delivered nothing has a row, too.
        for client in sorted(self.traffic.keys() | self.accepted.keys() | self.done.keys()):
            moved, update = self.traffic.get(client, ClientTraffic()), self.accepted.get(client)
            done = self.done.get(client, Done())
            clients[client] = {
                "num_samples": update.num_samples if update else done.num_samples,
                "train_seconds": update.train_seconds if update else done.train_seconds,
                "encoding": update.packets[0].encoding if update else "",
                "upload_bytes": moved.upload_bytes,
                "download_bytes": moved.download_bytes,
                "upload_seconds": moved.upload_seconds,
                "download_seconds": moved.download_seconds,
                "metrics": dict(update.metrics if update else done.metrics),
            }
        trained = combine((weight_of(self.job, row["num_samples"]), row["metrics"]) for row in clients.values())
        named = {key: sorted(getattr(self, key)) for key in ("stalled", "stragglers", "left_out")}
        return {
            "seconds": seconds,
            "clients": clients,
            "metrics": with_origin("train", trained),
            "settings": {key: getattr(self.command, key) for key in self.job.scheduled} | (self.row.settings or {}),
            **(self.prepared.stats() if self.prepared else {}),
            **{key: names for key, names in named.items() if names},
            **self.kind.stats(),
        }


class CannotResume(Exception):
    """A round cannot go on after a restart.

    `reason` is that with which it is abandoned.
    """

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


@dataclass(eq=False)
class RoundKind:
    """The course of one open round of the plain kind.

    A kind says which phases its rounds go through and which steps it adds to them (both are pure, see
    `fedring.server.round.machine`), performs these steps, and makes durable what its clients are told.

    Attributes:
        open: the round.
        phases: that it goes through.
        tells_all: whether all its clients are told of its end, also those that have delivered.
        alone: whether its clients answer for no other round meanwhile.
        lasting: whether its command outlasts it: clients go on, and their updates count in a later round of the job.
        recoverable: errors in making the model that `recover` may mend.
    """

    open: OpenRound
    phases: ClassVar[tuple[PhaseStep, ...]] = ()
    tells_all: ClassVar[bool] = False
    alone: ClassVar[bool] = False
    lasting: ClassVar[bool] = False
    recoverable: ClassVar[tuple[type[CodecError], ...]] = ()

    async def prepare(self) -> None:
        """Complete the command and the rules of a new round.

        Nobody was told of it yet.
        """

    def rules(self, rules: RoundRules) -> RoundRules:
        """Return the rules of the round, as the kind changes them."""
        return replace(rules, phases=self.phases)

    async def start(self, row: RoundRow) -> None:
        """Store everything that the command depends on.

        Args:
            row: the round's row with its clients, which is stored next.

        Raises:
            StorageFailed: if that cannot be kept.
        """

    def steps(self, clients: frozenset[str]) -> Steps | None:
        """Return the steps that begin with the command."""
        return None

    async def perform(self, effect: object) -> None:
        """Perform an effect of the steps.

        Raises:
            StorageFailed: if a decision cannot be kept. It is due again.
        """

    async def restore(self) -> Steps | None:
        """Return the steps of a round that a restart has interrupted.

        Raises:
            CannotResume: if it must end.
        """
        return None

    def resumed(self) -> None:
        """Take up the decisions of before the restart."""

    def check_update(self, client: str) -> None:
        """Check that the client may deliver an update now; UnknownRound if not."""

    @property
    def room(self) -> float:
        """How many more updates it takes."""
        return inf

    def answered(self, told: OpenRound, client: str) -> None:
        """Note that a client has delivered, or said that it cannot.

        Args:
            told: the round whose command it was.
            client: the client.
        """

    @property
    def going_on(self) -> Collection[str]:
        """The clients that go on after the round has ended."""
        return ()

    @property
    def expected(self) -> int:
        """The fixed number of clients that a private mean is divided by."""
        return len(self.open.row.selected)

    @property
    def evaluates(self) -> bool:
        """Whether the server evaluates the model of this round.

        Only if the job asks for that at all.
        """
        return True

    def members_with(self, client: str) -> int:
        """Return the size of the client's group.

        It is 0 if the round's updates are not summed in groups.
        """
        return 0

    def waits_for(self, client: str) -> bytes:
        """Return the event that asks a client for its part.

        It is b"" if the steps wait for nothing from it.
        """
        return b""

    @property
    def sums(self) -> list[GroupMasks] | None:
        """The groups whose sums make the model.

        None if each update is known.
        """
        return None

    async def lost(self, clients: frozenset[str], reason: str) -> bool:
        """Go on without damaged updates.

        Returns:
            Whether the round can still publish.
        """
        return True

    async def recover(self, error: CodecError) -> bool:
        """Go on after one of the `recoverable` errors.

        Returns:
            Whether the round can still publish.
        """
        return False

    def figures(self) -> dict[str, Any]:
        """Return how far the steps are, as JSON."""
        return {}

    def stats(self) -> dict[str, Any]:
        """Return the figures of the kind for the round's row."""
        return self.figures()


class KindMaker:
    """A kind of rounds. Each hook does nothing by default."""

    wire: ClassVar[FileDescriptor | None] = None
    """The file of the services that only clients of such rounds call; None = there are none."""

    @classmethod
    def declare(cls, registry: Registry) -> Any:
        """Declare the metrics of such rounds, and return them."""

    def kind_of(self, open_: OpenRound) -> RoundKind | None:
        """Return the course of a round, if it is of this kind."""
        return None

    def add_services(self, server: aio.Server) -> None:
        """Add the services of `wire` to a server."""

    def outlasts(self, row: RoundRow) -> bool:
        """Return whether clients must learn that an old round is over.

        They may keep something of it until then, also after a restart of the server.
        """
        return False
