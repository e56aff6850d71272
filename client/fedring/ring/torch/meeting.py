"""The agreement of workers, through a store, on the next generation's members.

Each worker has a slot, a number below the size of the world that its launcher gives it. Each try to form a generation
is an attempt. In the newest attempt a worker takes the seat of its slot: one key of the store with its address. Then
one worker closes the attempt: it replaces the last membership by the next one, in one atomic operation, so that every
attempt has exactly one membership, even if workers die at any time. The keys are

    membership          the `Membership` of the attempt that was closed last, as JSON
    ATTEMPT/SLOT        the `Candidate` of the slot in the attempt that is open, as JSON

Those who wait look at the store again and again. Its own `wait` would do, but that of a TCPStore prints two lines
whenever the time is up, and a replacement may wait for hours. A store needs `check`, `delete_key` and `compare_set`,
which TCPStore, FileStore, HashStore and PrefixStore have.
"""

import logging
import secrets
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict
from torch.distributed import DistNetworkError

from fedring.c10d import PrefixStore, Store, TCPStore
from fedring.ring.engine.endpoint import Endpoint
from fedring.ring.errors import PeerLost, RingError
from fedring.ring.options import RingOptions
from fedring.ring.transport.channels import is_serving

log = logging.getLogger(__name__)

_TICK = 0.1  # seconds between looks at the store, with at most _OFTEN workers; with more, in proportion
_OFTEN = 10
_PROBES = 16  # workers that are asked at once whether they still run
_GENERATIONS = 1 << 32  # as many as a frame can tell apart


class Candidate(BaseModel):
    """A worker that wants to be a member of the next generation."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    worker: str  # tells it from all other workers, also from those that had its slot before
    slot: int
    size: int  # of the world, as its launcher says
    address: str
    step: int  # finished steps of its training
    formed: int = -1  # the newest attempt whose members it has seen come together; -1 = none


class Membership(BaseModel):
    """The members of a generation, by rank."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base: int  # the number of the first generation
    attempt: int = -1
    members: tuple[Candidate, ...] = ()
    survivors: int = 0  # so many of the members, the first ones, had the state of the training when it was closed

    @property
    def generation(self) -> int:
        """The number that all frames of the generation carry."""
        return (self.base + self.attempt) % _GENERATIONS

    @property
    def addresses(self) -> list[str]:
        """The addresses of the members, by rank."""
        return [member.address for member in self.members]

    def has_survivor(self, candidate: Candidate) -> bool:
        """Return whether the candidate is a member with the training's state.

        A member that joined with this membership may have got the state only if it has seen the generation form, and
        has got it only if it is as far as the others were.
        """
        rank = next((rank for rank, member in enumerate(self.members) if member.worker == candidate.worker), None)
        if rank is None or rank < self.survivors:
            return rank is not None
        return candidate.formed == self.attempt and candidate.step >= self.members[0].step

    def next(self, candidates: Sequence[Candidate] = ()) -> "Membership":
        """Return the membership of the next attempt.

        Survivors come first, and among them those with the most finished steps.

        So rank 0 has the newest state. Without survivors and with equal steps, ranks are in the order of slots.
        """
        order = sorted(candidates, key=lambda one: (not self.has_survivor(one), -one.step, one.slot))
        survivors = sum(map(self.has_survivor, candidates))
        return Membership(base=self.base, attempt=self.attempt + 1, members=tuple(order), survivors=survivors)

    def may_close(self, seats: Sequence[Candidate], mine: Candidate, *, min_size: int, last_call_over: bool) -> bool:
        """Return whether the candidate `mine` may close the next attempt.

        The attempt would be closed with the candidates `seats`.

        It may if they fill all slots, or if it has waited long enough for the others. As long as a survivor is among
        the candidates, only survivors decide that it is enough.
        """
        if len(seats) == mine.size:
            return True
        survivors = any(map(self.has_survivor, seats))
        return last_call_over and len(seats) >= min_size and (self.has_survivor(mine) or not survivors)


@dataclass(frozen=True, slots=True)
class Terms:
    """The number of workers of a generation, and the waiting times.

    Attributes:
        slot: This worker's slot.
        size: The number of slots.
        min_size: The number of workers that are enough once the last call is over.
        last_call: Seconds that workers wait for the other slots before `min_size` workers are enough.
        timeout: Seconds that a generation may take to form.
    """

    slot: int
    size: int
    min_size: int
    last_call: float
    timeout: float

    def __post_init__(self) -> None:
        if not 0 <= self.slot < self.size:
            raise ValueError(f"slot {self.slot} is not one of {self.size}: slots are numbered from 0")
        if not 1 <= self.min_size <= self.size:
            raise ValueError(f"min_size={self.min_size} is not from 1 to size={self.size}")


class Meeting:
    """A worker's part in the attempts of one store.

    It lasts as long as the worker uses the store.

    Args:
        store: The store.
        options: The options of this worker's endpoints.
    """

    def __init__(self, store: Store, options: RingOptions) -> None:
        self.store = store
        self.options = options
        self._worker = uuid.uuid4().hex
        self._formed = -1

    def take_part(self, terms: Terms, *, step: int = 0, deadline: float) -> tuple[Endpoint, Membership]:
        """Wait for a membership with this worker.

        Returns the worker's endpoint in that generation, and the membership.

        The caller closes the endpoint. Not all members may come: then form the next generation.

        Args:
            terms: How many workers to wait for.
            step: How many steps of the training this worker has finished.
            deadline: When to give up, by the monotonic clock.

        Raises:
            PeerLost: A slot has stayed empty; the error names it.
            RingError: Another worker has this worker's slot, workers of the last generation still run, or the store
                is gone.
        """
        try:
            while True:
                last = self._last()
                endpoint = Endpoint(self.options, generation=last.next().generation)
                mine = Candidate(
                    worker=self._worker,
                    slot=terms.slot,
                    size=terms.size,
                    address=endpoint.address,
                    step=step,
                    formed=self._formed,
                )
                try:
                    # The endpoint listens before the seat is taken: others ask it whether this worker still runs.
                    membership = _Attempt(self.store, last, mine, terms, self.options).wait_until_closed(deadline)
                except BaseException:
                    endpoint.close()
                    raise
                if mine in membership.members:
                    return endpoint, membership
                endpoint.close()
                log.info("attempt %d was closed without this worker", membership.attempt)
        except DistNetworkError as error:
            raise RingError(store_is_gone(self.store)) from error

    def formed(self, membership: Membership) -> None:
        """Note that all members have come together."""
        self._formed = membership.attempt

    def waiting(self, size: int) -> int:
        """Return how many workers wait for an empty slot.

        These are the slots that the last generation did not fill.
        """
        last = self._last()
        empty = set(range(size)) - {member.slot for member in last.members}
        texts = [self.store.compare_set(_seat(last.attempt + 1, slot), "", "") for slot in sorted(empty)]
        return len(_running([Candidate.model_validate_json(text) for text in texts if text], last.next(), self.options))

    def _last(self) -> Membership:
        """Return the newest membership.

        Before the first attempt is closed it has no members.
        """
        none = Membership(base=secrets.randbelow(_GENERATIONS))
        return Membership.model_validate_json(self.store.compare_set("membership", "", none.model_dump_json()))


class _Attempt:
    """A worker's part in the attempt after the last membership.

    Args:
        store: The store.
        last: The last membership.
        mine: This worker.
        terms: How many workers to wait for.
        options: The options of this worker's endpoint, with which it asks others whether they still run.
    """

    def __init__(self, store: Store, last: Membership, mine: Candidate, terms: Terms, options: RingOptions) -> None:
        self._store, self._last, self._mine, self._terms, self._options = store, last, mine, terms, options
        self._next = last.next()
        self._keys = [_seat(self._next.attempt, slot) for slot in range(terms.size)]
        self._last_call_ends = time.monotonic() + terms.last_call
        self._obstacle: RingError | None = None

    def wait_until_closed(self, deadline: float) -> Membership:
        """Take a seat, and return the membership that closes the attempt.

        This worker closes the attempt itself if that is possible.
        """
        self._take_seat(arriving=True)
        while True:
            newest = Membership.model_validate_json(self._read("membership"))
            if newest.attempt > self._last.attempt:
                return newest
            self._take_seat(arriving=False)
            if self._close():
                continue
            left = deadline - time.monotonic()
            if left <= 0:
                self._store.compare_set(self._keys[self._mine.slot], self._mine.model_dump_json(), "")
                raise self._too_late()
            time.sleep(min(_TICK * max(1.0, self._terms.size / _OFTEN), left))

    def _take_seat(self, *, arriving: bool) -> None:
        """Take the seat of this worker's slot, unless it holds it.

        A worker that arrives replaces an earlier one of its slot, unless that is a survivor which still runs.
        """
        key, text = self._keys[self._mine.slot], self._mine.model_dump_json()
        held = self._store.compare_set(key, "", text).decode()
        while held != text:
            other = Candidate.model_validate_json(held)
            survivors = self._last.has_survivor(self._mine), self._last.has_survivor(other)
            precedes = (arriving or survivors[0]) and not survivors[1]
            if not precedes and self._runs(other):
                raise RingError(
                    f"slot {self._mine.slot} belongs to the worker at {_tcp(other.address)}: "
                    f"stop one of the two, or give it another slot"
                )
            self._store.compare_set(key, held, text)
            held = self._store.compare_set(key, "", text).decode()

    def _close(self) -> bool:
        """Close the attempt if this worker may.

        Returns whether the attempt is closed.
        """
        over = time.monotonic() >= self._last_call_ends
        if not over and not self._store.check(self._keys):
            return False
        seats = self._seats()
        if not self._last.may_close(seats, self._mine, min_size=self._terms.min_size, last_call_over=over):
            return False
        others = [one for one in seats if one.worker != self._mine.worker]
        running = _running(others, self._next, self._options)
        if gone := [one for one in others if one not in running]:
            for one in gone:
                self._store.compare_set(self._keys[one.slot], one.model_dump_json(), "")
            first = min(gone, key=lambda one: one.slot)
            self._obstacle = PeerLost(
                f"rank {first.slot} has come, but {_tcp(first.address)} cannot be reached", rank=first.slot
            )
            return False
        # Without a survivor the training would begin anew. So first make sure that no member of the last generation
        # still runs, for which two trainings would go on side by side.
        if not any(map(self._last.has_survivor, seats)):
            taken = {one.address for one in seats}
            before = [member for member in self._last.members if member.address not in taken]
            if running := _running(before, self._last, self._options):
                self._last_call_ends = time.monotonic() + self._terms.last_call
                where = _tcp(running[0].address)
                self._obstacle = RingError(f"a worker of the last generation still runs at {where}, and goes on")
                return False
        last, closed = self._last.model_dump_json(), self._last.next(seats).model_dump_json()
        # Of several workers that close the attempt at once, the store lets one succeed; the others read its membership.
        if self._store.compare_set("membership", last, closed).decode() == closed:
            for key in self._seats_before():
                self._store.delete_key(key)
        return True

    def _seats(self) -> list[Candidate]:
        """Return this attempt's candidates for a world of the same size."""
        texts = filter(None, map(self._read, self._keys))
        return [one for one in map(Candidate.model_validate_json, texts) if one.size == self._mine.size]

    def _seats_before(self) -> list[str]:
        size = max([self._terms.size, *(member.size for member in self._last.members)])
        return [_seat(self._last.attempt, slot) for slot in range(size)]

    def _read(self, key: str) -> str:
        """Return the value of a key, or "" if there is none.

        Unlike the store's `get`, this never waits for the key.
        """
        return self._store.compare_set(key, "", "").decode()

    def _runs(self, candidate: Candidate) -> bool:
        return bool(_running([candidate], self._next, self._options))

    def _too_late(self) -> RingError:
        """Return the error of a worker whose time is up."""
        there = {one.slot for one in self._seats()} | {self._mine.slot}
        missing = [slot for slot in range(self._terms.size) if slot not in there]
        late = f"within {self._terms.timeout:g} s"
        obstacle = self._obstacle
        if obstacle is not None and (obstacle.rank in missing if missing else obstacle.rank is None):
            return type(obstacle)(f"no generation was formed {late}: {obstacle}", rank=obstacle.rank)
        if not missing:
            return RingError(f"no generation was formed {late}, although all {self._terms.size} slots are filled")
        return PeerLost(f"rank {missing[0]} did not come {late}", rank=missing[0])


def _running(workers: Sequence[Candidate], membership: Membership, options: RingOptions) -> list[Candidate]:
    """Return the workers that run in the membership's generation."""
    if not workers:
        return []
    with ThreadPoolExecutor(min(_PROBES, len(workers))) as pool:
        found = pool.map(lambda one: is_serving(one.address, options, generation=membership.generation), workers)
        return [one for one, runs in zip(workers, found, strict=True) if runs]


def store_is_gone(store: Store) -> str:
    """Return the error text for a store that does not answer."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    where = f" at {store.host}:{store.port}" if isinstance(store, TCPStore) else ""
    return (
        f"the store{where} is gone: if a worker hosted it, that worker has ended, and nobody can meet there any more. "
        f"Use a store that outlives the workers: that of `flctl store`, a FileStore, or torchrun's"
    )


def _seat(attempt: int, slot: int) -> str:
    return f"{attempt}/{slot}"


def _tcp(address: str) -> str:
    return address.partition(";")[0]
