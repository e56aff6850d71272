"""A round, as a pure state machine.

`apply(state, event, now)` is the only way in which a state changes. `due(state, now)` says what has become necessary,
and `wake_at(state, now)` when to ask again if no event comes. A kind of round is data: the phases that it goes through
(`SYNCHRONOUS`, unless its rules name others), and the steps that it adds to them (`Steps`), which stand between the
command and the model. Nothing here reads a clock, sends, stores, or knows what a model is.

    waiting ──Started──► training ──Closed──► aggregating ──Published──► published ──Finished──► (none)
       └───────Abandoned─────┴──────Abandoned──────┘ ─────────────────► abandoned ───┘
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from math import ceil, floor, inf
from operator import itemgetter
from statistics import median
from typing import Any

from fedring.server.round.events import (
    OPEN,
    Abandon,
    Abandoned,
    Aggregate,
    Closed,
    Decided,
    Delayed,
    Delivered,
    Effect,
    Enlisted,
    Evaluated,
    Event,
    Failed,
    Finish,
    Finished,
    Freed,
    Held,
    Joined,
    Left,
    LeftBehind,
    Lost,
    MakeModel,
    Matched,
    Member,
    Moved,
    Phase,
    PhaseStep,
    Presence,
    Published,
    Resumed,
    Round,
    RoundOpened,
    RoundRules,
    RoundState,
    Shared,
    Stalled,
    Start,
    Started,
    Stepped,
)
from fedring.server.sessions.members import Members
from fedring.train.jobs.labels import match

_LEAVE_SECONDS = 1.0
"""A client whose round has ended has so long to say that it has left it, before others begin without it."""


class IllegalEvent(Exception):
    """An event that is impossible in this state, by a server defect."""


def apply(state: RoundState, event: Event, now: float) -> RoundState:
    """Return the state after `event`, which happened at `now` (monotonic seconds)."""
    match event:
        case Joined(client, labels, max_jobs):
            return _with(state, client, Member(Presence.JOINED, now, labels, max_jobs=max_jobs))
        case Matched(client):
            return _member(state, client, Presence.MATCHED, now)
        case Left(client):
            return _left(state, client, now)
        case LeftBehind(client):
            return _changed(state, client, late=now)
        case Freed(client):
            return _changed(state, client, late=None)
        case Decided(client, unapproved):
            return _changed(state, client, unapproved=unapproved)
        case Shared(busy):
            return replace(state, busy=busy)
        case RoundOpened(number, rules, elapsed):
            _require(state.round is None, event, state)
            return replace(state, round=Round(number, rules, Phase.WAITING, now - elapsed))
        case Resumed(round_, grace, elapsed):
            _require(state.round is None, event, state)
            # A member that is away since a moment in the future has more than the usual grace to come back.
            away = Member(Presence.AWAY, now + max(0.0, grace - round_.rules.grace))
            missing = dict.fromkeys(round_.selected | round_.evaluators, away)
            known = Members({**missing, **state.members}.items())
            return replace(state, members=known, round=replace(round_, since=now - elapsed))
        case Finished():
            _require(state.round is not None and state.round.phase not in OPEN, event, state)
            here = ((c, m) for c, m in state.members.items() if m.presence is not Presence.AWAY)
            return RoundState(Members(here), None)
    if state.round is None:
        raise IllegalEvent(f"{event} without a round")
    after = _apply_to_round(state.round, event, now)
    # A client that was chosen may have left before the event came, and is not in `members` then.
    members = state.members
    if after.selected is not state.round.selected or after.evaluators is not state.round.evaluators:
        for client in after.selected | after.evaluators:
            if client not in members:
                members = members.having(client, Member(Presence.AWAY, now))
    return replace(state, members=members, round=after)


def _apply_to_round(round_: Round, event: Event, now: float) -> Round:
    match event:
        # An upload may be repeated; only its first delivery counts for the median time.
        case Delivered(clients) if round_.phase is Phase.TRAINING and clients <= round_.selected:
            if not (fresh := frozenset(clients) - round_.delivered):
                return round_
            seconds = round_.delivery_seconds + (now - round_.since,) * len(fresh)
            stalled, delivered = round_.stalled - fresh, round_.delivered | fresh
            return replace(round_, delivered=delivered, delivery_seconds=seconds, stalled=stalled)
        case Stalled(client):
            return replace(round_, stalled=round_.stalled | {client} & _training(round_))
        case Moved(client):
            return replace(round_, stalled=round_.stalled - {client})
        case Enlisted(client) if round_.phase is Phase.TRAINING:
            return replace(round_, selected=round_.selected | {client})
        case Lost(client) if round_.phase is Phase.AGGREGATING:
            return replace(round_, delivered=round_.delivered - {client}, failed=round_.failed | {client})
        case Delayed(lost):
            steps = round_.steps.delayed(lost) if round_.steps is not None else None
            return replace(round_, since=round_.since + lost, steps=steps)
        case Held(seconds_) if round_.phase is Phase.WAITING:
            return replace(round_, held=round_.held + seconds_)
        case Stepped(inner) if round_.steps is not None:
            return replace(round_, steps=round_.steps.happened(inner, now))
        case Failed(client, number):
            known = number == round_.number and client in round_.selected
            return replace(round_, failed=round_.failed | {client}) if known else round_
        case Evaluated(client):
            return replace(round_, evaluated=round_.evaluated | {client} & round_.evaluators)
        case Abandoned(reason) if round_.phase in OPEN:
            return replace(round_, phase=Phase.ABANDONED, since=now, reason=reason)
    # The other events end a phase. The rules may list other phases than a synchronous round has.
    pairs = pairwise(_phases(round_.rules))
    following = {step.ended_by: after.phase for step, after in pairs if step.phase is round_.phase}
    if type(event) not in following:
        raise IllegalEvent(f"{event} while {round_.phase}")
    moved = replace(round_, phase=following[type(event)], since=now, held=0.0)
    match event:
        case Started(clients, steps):
            return replace(moved, selected=clients, steps=steps)
        case Closed() if round_.steps is not None:
            return replace(moved, steps=round_.steps.closed(round_.delivered))
        case Published(evaluators):
            return replace(moved, evaluators=evaluators)
    return moved


def due(state: RoundState, now: float) -> Effect | None:
    """Return the effect that is due at `now`.

    None means that nothing is due until the next event or `wake_at`.
    """
    round_ = state.round
    if round_ is None:
        return None
    if round_.phase is Phase.ABANDONED:
        return Finish()
    if _steps_go_on(round_) and round_.steps is not None and (effect := round_.steps.due(reachable(state, now), now)):
        return effect
    return _step(round_).due(state, round_, now)


def wake_at(state: RoundState, now: float) -> float:
    """Return when `due` may change without an event.

    In monotonic seconds; inf means never.
    """
    round_ = state.round
    if round_ is None or round_.phase is Phase.ABANDONED:
        return inf
    graces = (state.members[client].since + round_.rules.grace for client in _absent(state, round_))
    wakes = [at for at in (*graces, stragglers_at(round_), *_leaving(state, round_)) if at > now]
    wakes.append(waits_until(state, round_))
    if _steps_go_on(round_) and round_.steps is not None and not round_.steps.ended:
        wakes += [round_.steps.wake_at(), next_loss(state, now)]
    return min(wakes, default=inf)


def deadline(round_: Round) -> float:
    """Return the latest end of the round's current phase.

    In monotonic seconds; inf means never.
    """
    return round_.since + round_.held + seconds(round_.rules, round_.phase)


def stalls_at(round_: Round | None, client: str, moved: float) -> float:
    """Return when a client stalls unless it makes progress before.

    In monotonic seconds; inf means never.

    Args:
        round_: the round in progress.
        client: a client in session.
        moved: when it last made progress, in monotonic seconds.
    """
    if round_ is None or not round_.rules.stalled_after or client not in round_.selected or client in round_.stalled:
        return inf
    if round_.phase not in (Phase.TRAINING, Phase.PUBLISHED) or (client in round_.delivered and _steps_go_on(round_)):
        return inf
    if not awaits(round_, client):
        return inf
    return max(moved, round_.since) + round_.rules.stalled_after


def stragglers_at(round_: Round) -> float:
    """Return when the round ends without its stragglers.

    In monotonic seconds; inf means not yet known.

    That is `straggler_factor` times the median time of a delivery, once at least half of the clients have delivered:
    the first few may be much faster than most.
    """
    rules, count = round_.rules, len(round_.delivered)
    if round_.phase is not Phase.TRAINING or not rules.straggler_factor or not round_.delivery_seconds:
        return inf
    if count < rules.min_to_aggregate or 2 * count < len(round_.selected):
        return inf
    return round_.since + rules.straggler_factor * median(round_.delivery_seconds)


def seconds(rules: RoundRules, phase: Phase) -> float:
    """Return the longest duration of a phase by the rules, in seconds."""
    return next(step.limit(rules) for step in _phases(rules) if step.phase is phase)


def ready(state: RoundState, rules: RoundRules) -> list[str]:
    """Return the clients that may be selected, sorted."""
    return [client for client in unhindered(state, rules) if client not in state.busy]


def busy(state: RoundState, rules: RoundRules) -> list[str]:
    """Return the clients that other rounds have for now.

    They could take part otherwise. Sorted.
    """
    return [client for client in unhindered(state, rules) if client in state.busy]


def unhindered(state: RoundState, rules: RoundRules) -> list[str]:
    """Return the clients that nothing but other rounds can hold back, sorted."""
    free = ((c, member) for c, member in _passed(state, rules) if member.late is None)
    return [client for client, member in free if rules.job_id not in member.unapproved]


def unapproved(state: RoundState, rules: RoundRules) -> list[str]:
    """Return the clients whose sites have not approved the job yet, sorted."""
    # Mostly there are none, which is known without the walk over all others.
    asked = {client for client, member in state.members.items() if rules.job_id in member.unapproved}
    return [client for client, _ in _suitable(state, rules) if client in asked] if asked else []


def needed(rules: RoundRules) -> int:
    """Return how many clients must be ready before a round begins.

    One is enough for an asynchronous job that has clients at work already.
    """
    return 1 if rules.barrier == "none" or rules.carried else rules.min_clients


def late(state: RoundState, rules: RoundRules) -> list[str]:
    """Return the clients that still work on ended rounds.

    They could take part otherwise. Sorted.
    """
    return [client for client, member in _passed(state, rules) if member.late is not None]


def _passed(state: RoundState, rules: RoundRules) -> list[tuple[str, Member]]:
    passed = (Presence.MATCHED,) if rules.barrier == "matched" else (Presence.JOINED, Presence.MATCHED)
    return [(client, member) for client, member in _suitable(state, rules) if member.presence in passed]


def suitable(state: RoundState, rules: RoundRules) -> list[str]:
    """Return the clients that the round can select, sorted.

    Only their names and labels count, not whether they are ready.
    """
    return [client for client, _ in _suitable(state, rules)]


def _suitable(state: RoundState, rules: RoundRules) -> list[tuple[str, Member]]:
    """Return the clients of `suitable`, each with its facts.

    A round asks again and again while it waits, so all is read in one walk.
    """
    here = [(c, member) for c, member in state.members.items() if member.max_jobs and c not in rules.left_out]
    if rules.labels:
        here = [(c, member) for c, member in here if match(member.labels, rules.labels)]
    return sorted(here, key=itemgetter(0))


def sample(candidates: list[str], round_: Round) -> list[str]:
    """Return the clients that take part, drawn with the round's seed."""
    rules = round_.rules
    count = rules.sample_clients or ceil(rules.sample_ratio * len(candidates))
    count = ceil(rules.select_factor * max(count, rules.min_to_aggregate))
    if count >= len(candidates):
        return candidates
    return random.Random(f"{rules.seed}:{round_.number}").sample(candidates, count)


def updates_needed(round_: Round) -> int:
    """Return the number of updates with which the round closes.

    With `select_factor`, more clients were drawn than that; otherwise it is that of all clients. It follows from those
    that were drawn, because after a restart nobody knows from how many they were.
    """
    rules, drawn = round_.rules, len(round_.selected)
    if rules.select_factor == 1:
        return drawn
    # Where there were too few clients to draw more, all of them were drawn.
    by_ratio = max(floor(drawn / rules.select_factor + 1e-9), ceil(rules.sample_ratio * drawn))
    return min(max(rules.sample_clients or by_ratio, rules.min_to_aggregate), drawn)


def pending(state: RoundState, now: float) -> frozenset[str]:
    """Return the clients whose answers the round still waits for.

    They were asked, have not answered, and are not lost.
    """
    round_ = state.round
    if round_ is None:
        return frozenset()
    lost = {c for c in _absent(state, round_) if now >= state.members[c].since + round_.rules.grace}
    return _outstanding(round_) - lost


def awaits(round_: Round | None, client: str) -> bool:
    """Return whether the client still has a part in the round.

    Stalled clients have, too. This is asked for each client again and again, so it builds no sets.
    """
    if round_ is None or client in round_.failed:
        return False
    if _steps_go_on(round_):
        return client in round_.selected and (round_.steps is not None or client not in round_.delivered)
    return client in round_.evaluators and client not in round_.evaluated


def reachable(state: RoundState, now: float) -> frozenset[str]:
    """Return the selected clients that can still answer.

    They have not failed, and are here or may still come back.
    """
    round_ = state.round
    return frozenset(c for c in round_.selected - round_.failed if now < _lost_at(state, c)) if round_ else frozenset()


def next_loss(state: RoundState, now: float) -> float:
    """Return when `reachable` loses its next client if none comes back.

    In monotonic seconds; inf means never.
    """
    return min((_lost_at(state, client) for client in reachable(state, now)), default=inf)


def _lost_at(state: RoundState, client: str) -> float:
    member = state.members[client]
    away = member.presence is Presence.AWAY and state.round is not None
    return member.since + state.round.rules.grace if away and state.round else inf


def _outstanding(round_: Round) -> frozenset[str]:
    return frozenset() if round_.phase is Phase.ABANDONED else _step(round_).asked(round_)


def _steps_go_on(round_: Round) -> bool:
    """Return whether the kind's steps still matter.

    Once there is a model, they do not.
    """
    return round_.phase in OPEN


def _phases(rules: RoundRules) -> tuple[PhaseStep, ...]:
    return rules.phases or SYNCHRONOUS


def _step(round_: Round) -> PhaseStep:
    return next(step for step in _phases(round_.rules) if step.phase is round_.phase)


def _absent(state: RoundState, round_: Round) -> Iterator[str]:
    return (c for c in _outstanding(round_) if state.members[c].presence is Presence.AWAY)


def _member(state: RoundState, client: str, presence: Presence, now: float) -> RoundState:
    known = state.members.get(client)
    return _with(state, client, replace(known, presence=presence, since=now) if known else Member(presence, now))


def _with(state: RoundState, client: str, member: Member) -> RoundState:
    return replace(state, members=state.members.having(client, member))


def _changed(state: RoundState, client: str, **changes: Any) -> RoundState:
    """Note something of a client, if it is here."""
    known = state.members.get(client)
    return state if known is None else _with(state, client, replace(known, **changes))


def _left(state: RoundState, client: str, now: float) -> RoundState:
    """Note that a client is away, or forget it.

    It is forgotten if no round waits for it: clients come and go without end.
    """
    if client not in state.members:
        return state
    if state.round is not None and client in state.round.selected | state.round.evaluators:
        return _member(state, client, Presence.AWAY, now)
    return replace(state, members=state.members.without(client))


def _require(legal: bool, event: Event, state: RoundState) -> None:
    if not legal:
        raise IllegalEvent(f"{event} while {state.round.phase if state.round else 'no round is open'}")


def _nobody(round_: Round) -> frozenset[str]:
    return frozenset()


def _training(round_: Round) -> frozenset[str]:
    return round_.selected - round_.delivered - round_.failed - round_.stalled


def _evaluating(round_: Round) -> frozenset[str]:
    return round_.evaluators - round_.evaluated


def _due_waiting(state: RoundState, round_: Round, now: float) -> Effect | None:
    # Code that asks whether to stop does so within moments. A round that began before would always leave it out.
    if any(now < at for at in _leaving(state, round_)):
        return None
    candidates = ready(state, round_.rules)
    if len(candidates) >= needed(round_.rules):
        return Start(frozenset(sample(candidates, round_)))
    return given_up(state, round_, now)


def given_up(state: RoundState, round_: Round, now: float) -> Effect | None:
    """Return the end of a round that has waited too long.

    None while it may wait for clients.
    """
    return Abandon("barrier_timeout") if now >= waits_until(state, round_) else None


def waits_until(state: RoundState, round_: Round) -> float:
    """Return the deadline of the phase.

    In monotonic seconds. It is later while people at sites could still let the round begin, and inf while it waits its
    turn.
    """
    if round_.phase is Phase.WAITING and _waits_its_turn(state, round_):
        return inf
    if round_.phase is Phase.WAITING and _asks_people(state, round_):
        return max(deadline(round_), round_.since + round_.rules.approval_timeout)
    return deadline(round_)


def is_held(state: RoundState) -> bool:
    """Return whether a round waits for something else than clients.

    It waits for its turn, or for people at sites.
    """
    round_ = state.round
    if round_ is None or round_.phase is not Phase.WAITING:
        return False
    return _waits_its_turn(state, round_) or _asks_people(state, round_)


def _asks_people(state: RoundState, round_: Round) -> bool:
    """Return whether people at sites could let the round begin."""
    missing = unapproved(state, round_.rules)
    return bool(missing) and len(ready(state, round_.rules)) + len(missing) >= needed(round_.rules)


def _waits_its_turn(state: RoundState, round_: Round) -> bool:
    """Return whether enough clients are here, and only other rounds have them.

    Those end, and then it is this one's turn, so such a wait has no deadline.
    """
    return bool(state.busy) and len(unhindered(state, round_.rules)) >= needed(round_.rules)


def _leaving(state: RoundState, round_: Round) -> Iterator[float]:
    """Yield the times until which a new round waits for late clients."""
    if round_.phase is Phase.WAITING:
        times = (state.members[client].late for client in late(state, round_.rules))
        yield from (since + _LEAVE_SECONDS for since in times if since is not None)


def _due_training(state: RoundState, round_: Round, now: float) -> Effect | None:
    enough = len(round_.delivered) >= round_.rules.min_to_aggregate
    if round_.rules.close_at_minimum and enough:
        return Aggregate()
    late = pending(state, now)
    if enough and len(round_.delivered) >= updates_needed(round_):
        return Aggregate(late)
    if late and now < deadline(round_):
        return Aggregate(late) if now >= stragglers_at(round_) else None
    return Aggregate() if enough else Abandon("too_few_clients")


def _due_aggregating(state: RoundState, round_: Round, now: float) -> Effect | None:
    return MakeModel() if round_.steps is None or round_.steps.ended else None


def _due_published(state: RoundState, round_: Round, now: float) -> Effect | None:
    return Finish() if not pending(state, now) or now >= deadline(round_) else None


SYNCHRONOUS = (
    PhaseStep(Phase.WAITING, Started, lambda rules: rules.barrier_timeout, _nobody, _due_waiting),
    PhaseStep(Phase.TRAINING, Closed, lambda rules: rules.deadline, _training, _due_training),
    PhaseStep(Phase.AGGREGATING, Published, lambda rules: inf, _nobody, _due_aggregating),
    PhaseStep(Phase.PUBLISHED, Finished, lambda rules: rules.evaluate_timeout, _evaluating, _due_published),
)
"""All selected clients train from the same model, and one aggregation makes the next."""
