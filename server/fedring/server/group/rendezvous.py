"""The group of the round in progress, and what its workers are told; a thin shell around groups.py."""

import asyncio
import time
from collections.abc import Callable, Container, Iterable
from math import inf

from fedring.rpc.identity import Role, uri_of
from fedring.server.group import machine as gr
from fedring.server.group.returns import Returns
from fedring.v1 import rendezvous_pb2 as pb

_MOST_GENERATION = 1 << 31
_RETURNS = 2.0  # times as long as others took is worth to wait for the next one


class Rendezvous:
    """Keeps the state of a round's group; `tell(kind, text)` is told what operators may want to know."""

    def __init__(self, tell: Callable[[str, str], None], returns: Returns) -> None:
        self.round = 0  # whose group this is
        self.state: gr.State | None = None  # None = no round that needs a group has been opened
        self.done: dict[str, pb.Done] = {}  # what each member says of its work in the round
        self.moved = asyncio.Event()  # set, and replaced by a new one, with each change
        self._tell, self._returns = tell, returns
        self._generation = 0  # the newest of all rounds
        self._resumed = False

    def open(
        self, number: int, rules: gr.Rules, expected: Iterable[str], done: dict[str, pb.Done], *, resumed: bool = False
    ) -> None:
        """Let the workers of a round gather.

        Args:
            number: the round's.
            rules: what its groups obey.
            expected: the clients that were selected.
            done: takes what each worker says of its work.
            resumed: whether the round was open before the server was restarted.
        """
        self._generation += 1
        self.round, self.done, self._resumed = number, done, resumed
        self._become(gr.State(rules, frozenset(expected), generation=self._generation, since=time.monotonic()))

    def handle(self, event: gr.Event) -> None:
        """Take the event into the state; whoever is concerned learns what follows from it."""
        before = self.state
        if before is None or not self.active:
            return
        now = time.monotonic()
        patient = gr.apply(before, gr.Slow(_RETURNS * self._returns.slowest), now) if before.rules.whole else before
        after = gr.apply(patient, event, now)
        if after == before and not isinstance(event, gr.Expected):  # of others than the expected, some may be wanted
            return
        self._become(after)
        if before.phase in (gr.Phase.JOINING, gr.Phase.RUNNING, gr.Phase.DONE) and after.phase is gr.Phase.GATHERING:
            self.done.clear()
            self._tell("group_lost", f"generation {before.generation} has ended: {after.reason}")
        if before.phase is not gr.Phase.RUNNING and after.phase is gr.Phase.RUNNING:
            steps = max(after.workers[name].steps for name in after.members)
            text = f"generation {after.generation}: {len(after.members)} workers go on after step {steps} of the job"
            self._tell("group_formed", text)

    def take(self, client: str, done: pb.Done) -> None:
        """The worker has trained to the end."""
        if self.state is not None and client in self.state.members and done.generation == self.state.generation:
            self.done[client] = done
        self.handle(gr.Done(client, done.generation, done.digest))

    def give_up(self, reason: str) -> bool:
        """Whether the round ends because one of its workers cannot train; not if others hold what was trained."""
        if not self.active or (self.state is not None and self.state.phase is gr.Phase.DONE):
            return False
        self.close(reason)
        return True

    def close(self, reason: str) -> None:
        """The round is over, and its workers are told."""
        self.handle(gr.Closed(reason))

    @property
    def active(self) -> bool:
        """Whether a round's group exists that has not ended."""
        return self.state is not None and self.state.phase is not gr.Phase.ENDED

    def can_know(self, generation: int) -> bool:
        """Whether a worker can have been told of the generation; after a restart nobody remembers."""
        return generation <= self._generation or (self._resumed and generation < _MOST_GENERATION)

    @property
    def workers(self) -> Container[str] | None:
        """The clients that have trained as members; None after a restart, when nobody remembers, and all may have."""
        return None if self._resumed else self.done.keys()

    @property
    def wait_seconds(self) -> float | None:
        """How long to wait for the next event before time itself changes something; None = for ever."""
        now = time.monotonic()
        at = gr.wake_at(self.state, now) if self.state else inf
        return None if at == inf else at - now

    def view(self, client: str, round_: int) -> pb.GroupMessage:
        """What the client, as a worker of that round, is to do now."""
        if self.state is None or self.round != round_:
            return pb.GroupMessage(ended=pb.Ended(reason="next_round"))
        return view(self.state, client)

    def _become(self, state: gr.State) -> None:
        self.state = state
        self._generation = max(self._generation, state.generation)
        self.moved.set()
        self.moved = asyncio.Event()


def view(state: gr.State, client: str) -> pb.GroupMessage:
    """What the client is to do in this state."""
    generation = state.generation
    if state.phase is gr.Phase.ENDED:
        return pb.GroupMessage(ended=pb.Ended(reason=state.reason))
    if client not in state.workers:
        return pb.GroupMessage(ended=pb.Ended(reason="too_late"))
    if state.phase is gr.Phase.GATHERING:
        return pb.GroupMessage(prepare=pb.Prepare(generation=generation))
    if client not in state.members:
        return pb.GroupMessage(wait=pb.Wait())
    if state.phase is gr.Phase.JOINING:
        addresses = [state.workers[name].address for name in state.members]
        identities = [uri_of(Role.CLIENT, name) for name in state.members]
        rank = state.members.index(client)
        group = pb.Group(generation=generation, rank=rank, members=addresses, identities=identities)
        return pb.GroupMessage(group=group)
    if state.phase is gr.Phase.RUNNING:
        return pb.GroupMessage(start=pb.Start(generation=generation))
    if client == state.deliverer:
        return pb.GroupMessage(deliver=pb.Deliver(generation=generation))
    return pb.GroupMessage(wait=pb.Wait())
