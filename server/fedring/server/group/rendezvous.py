"""The group of one round: a thin shell around the machine."""

import asyncio
import time
from collections.abc import Callable, Container, Iterable
from math import inf

from fedring.rpc.identity import Role, uri_of
from fedring.server.group import machine as gr
from fedring.v1 import rendezvous_pb2 as pb

_MOST_GENERATION = 1 << 31
_RETURNS = 2.0  # a lost worker is waited for this many times as long as others took to come back


News = tuple[str, str]
"""The kind and the text of an event that operators may want to know."""


class Rendezvous:
    """Keeps the state of one round's group, and instructs workers.

    Args:
        number: the round's.
        rules: the rules of its groups.
        expected: the clients that were selected.
        done: receives the reports of workers.
        slowest: returns how many seconds clients take to come back, at most; 0 if nothing is known.
        generation: the number of its first generation.
        resumed: whether the round was open before the server was restarted.

    Attributes:
        round: the number of the round whose group this is.
        state: the machine's state.
        moved: set, and replaced by a new event, with each change of the state.
    """

    def __init__(
        self,
        number: int,
        rules: gr.GroupRules,
        expected: Iterable[str],
        done: dict[str, pb.Done],
        *,
        slowest: Callable[[], float],
        generation: int = 1,
        resumed: bool = False,
    ) -> None:
        self.round, self.moved = number, asyncio.Event()
        self.state = gr.GroupState(rules, frozenset(expected), generation=generation, since=time.monotonic())
        self._done, self._slowest, self._resumed = done, slowest, resumed
        self._result: dict[str, pb.Done] = {}  # the reports of the members that held the newest result
        self._accepted = False
        self._other_samples: dict[str, int] = {}  # what members had found when operators were told that it differs

    def handle(self, event: gr.Event) -> list[News]:
        """Apply the event, and return news of the change for operators."""
        before = self.state
        if not self.active:
            return []
        now = time.monotonic()
        patient = gr.apply(before, gr.Slow(_RETURNS * self._slowest()), now) if before.rules.whole else before
        after = gr.apply(patient, event, now)
        if after == before and not isinstance(event, gr.Expected):  # other clients than those expected may be wanted
            return []
        self._become(after)
        if after.phase is gr.GroupPhase.DONE:
            self._result = dict(self._done)
        news = []
        if (
            before.phase in (gr.GroupPhase.JOINING, gr.GroupPhase.RUNNING, gr.GroupPhase.DONE)
            and after.phase is gr.GroupPhase.GATHERING
        ):
            if not self._accepted:
                self._done.clear()
            news.append(("group_lost", f"generation {before.generation} has ended: {after.reason}"))
        if before.phase is not gr.GroupPhase.RUNNING and after.phase is gr.GroupPhase.RUNNING:
            steps = max(after.workers[name].steps for name in after.members)
            who = "1 worker goes" if len(after.members) == 1 else f"{len(after.members)} workers go"
            text = f"generation {after.generation}: {who} on after step {steps} of the job"
            news.append(("group_formed", text))
            if text := self._new_difference({name: after.workers[name].samples for name in after.members}):
                news.append(("other_samples", text))
        return news

    def note(self, client: str, done: pb.Done) -> None:
        """Keep a member's report of its work, and ignore other clients."""
        if client in self.state.members and done.generation == self.state.generation and not self._accepted:
            self._done[client] = done

    def accept(self) -> None:
        """Keep the reports of the members whose result was accepted.

        Those that have lost the server meanwhile have worked for it, too.
        """
        self._accepted = True
        self._done.update(self._result)

    @property
    def can_give_up(self) -> bool:
        """Whether a worker that cannot train ends the group.

        It does not if others hold the trained result.
        """
        return self.active and self.state.phase is not gr.GroupPhase.DONE

    @property
    def active(self) -> bool:
        """Whether the group has not ended."""
        return self.state.phase is not gr.GroupPhase.ENDED

    @property
    def failure(self) -> str:
        """The reason of a group that has failed, or nothing."""
        return "" if self.active else self.state.reason

    @property
    def must_be_whole(self) -> bool:
        """Whether the group cannot go on with fewer workers."""
        return self.state.rules.whole

    @property
    def generation(self) -> int:
        """The newest generation of the group."""
        return self.state.generation

    def can_know(self, generation: int) -> bool:
        """Return whether a worker can have been told of the generation.

        After a restart nobody remembers which were told.
        """
        return generation <= self.state.generation or (self._resumed and generation < _MOST_GENERATION)

    @property
    def workers(self) -> Container[str] | None:
        """The clients that have trained as members.

        None after a restart, when nobody remembers, and all may have.
        """
        return None if self._resumed else self._done.keys()

    @property
    def wait_seconds(self) -> float | None:
        """Seconds until time itself changes something; None means never.

        They hold if no event comes before.
        """
        now = time.monotonic()
        at = gr.wake_at(self.state, now)
        return None if at == inf else at - now

    def view(self, client: str) -> pb.GroupMessage:
        """Return the client's present instruction."""
        return view(self.state, client)

    def _new_difference(self, found: dict[str, int]) -> str:
        """Return a sentence if members have found different numbers of samples.

        It is empty if they have not, or if operators have been told before, in an earlier generation. Members that do
        not say how many are left out.

        Args:
            found: The number of each member's training samples; 0 = it does not say.
        """
        said = {name: count for name, count in found.items() if count}
        if len(set(said.values())) < 2 or said == self._other_samples:
            return ""
        self._other_samples = said
        fewest, most = min(said, key=said.__getitem__), max(said, key=said.__getitem__)
        return (
            f"{fewest} has found {said[fewest]} training samples and {most} {said[most]}: all workers must find the "
            "same, or the group takes some samples twice and leaves out others, or breaks"
        )

    def _become(self, state: gr.GroupState) -> None:
        self.state = state
        self.moved.set()
        self.moved = asyncio.Event()


def view(state: gr.GroupState, client: str) -> pb.GroupMessage:
    """Return the client's instruction in this state."""
    generation = state.generation
    if state.phase is gr.GroupPhase.ENDED:
        return pb.GroupMessage(ended=pb.Ended(reason=state.reason))
    if client not in state.workers:
        return pb.GroupMessage(ended=pb.Ended(reason="too_late"))
    if state.phase is gr.GroupPhase.GATHERING:
        return pb.GroupMessage(prepare=pb.Prepare(generation=generation))
    # A worker outside the group stays connected: the next generation may need it.
    if client not in state.members:
        return pb.GroupMessage(wait=pb.Wait())
    if state.phase is gr.GroupPhase.JOINING:
        addresses = [state.workers[name].address for name in state.members]
        identities = [uri_of(Role.CLIENT, name) for name in state.members]
        rank = state.members.index(client)
        group = pb.Group(generation=generation, rank=rank, members=addresses, identities=identities)
        return pb.GroupMessage(group=group)
    if state.phase is gr.GroupPhase.RUNNING:
        return pb.GroupMessage(start=pb.Start(generation=generation))
    if client == state.deliverer:
        return pb.GroupMessage(deliver=pb.Deliver(generation=generation))
    return pb.GroupMessage(wait=pb.Wait())
