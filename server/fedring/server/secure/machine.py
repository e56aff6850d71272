"""The secure aggregation of one round, as a pure state machine.

`apply(state, event, now)` is the only way in which a state changes. `due(state, reachable, now)` says what has become
necessary, and `wake_at(state)` when to ask again if no event comes. Nothing here reads a clock, sends, or stores.

    keys ──Grouped──► shares ──PeersChosen──► updates ──SurvivorsChosen──► survivors ──SignersChosen──► unmask ──► done
    (all clients)        └──── each group for itself; GroupFailed ends the way of one group at any step ────┘

A client that does not answer in its step is out of the round. Each step ends when all clients have answered that can
still come, and after `step_seconds` at the latest, except for the updates: these end with the round's training. The
machine of the round drives this one, as its steps.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf
from random import Random

from fedring.daemon.wording import listed
from fedring.secure.limits import group_count
from fedring.server.round import events as rd
from fedring.server.round.machine import IllegalEvent
from fedring.server.secure.events import (
    ORDER,
    Answered,
    Combined,
    CombineShares,
    Effect,
    Event,
    FormGroups,
    GiveUp,
    Group,
    Grouped,
    GroupFailed,
    PeersChosen,
    ProtocolState,
    SecureStep,
    SignersChosen,
    StepsDelayed,
    SurvivorsChosen,
    UpdatesClosed,
)

TOO_FEW_FOR_THRESHOLD = "too_few_for_threshold"
TOO_FEW_TO_UNMASK = "too_few_to_unmask"


@dataclass(frozen=True, slots=True)
class SecureSteps:
    """Secure aggregation in the form of a round's steps."""

    state: ProtocolState

    @property
    def ended(self) -> bool:
        """Whether all groups have failed, or their masks are known."""
        return self.state.ended

    def happened(self, event: object, now: float) -> "SecureSteps":
        """Return the state after an event of the secure aggregation."""
        if not isinstance(event, Event):
            raise IllegalEvent(f"{event} is no event of secure aggregation")
        return SecureSteps(apply(self.state, event, now))

    def closed(self, delivered: frozenset[str]) -> "SecureSteps":
        """Return the state after the round has closed.

        `delivered` are the clients whose updates it has.
        """
        return SecureSteps(apply(self.state, UpdatesClosed(delivered), 0.0))

    def delayed(self, seconds: float) -> "SecureSteps":
        """Return the state after a time without progress."""
        return SecureSteps(apply(self.state, StepsDelayed(seconds), 0.0))

    def due(self, reachable: frozenset[str], now: float) -> rd.Effect | None:
        """Return the effect that is due now, if there is one.

        `reachable` are the clients that can still answer.
        """
        match due(self.state, reachable, now):
            case None:
                return None
            case GiveUp(reason):
                return rd.Abandon(reason, _too_few(self.state))
            case effect:
                return rd.TakeStep(effect)

    def wake_at(self) -> float:
        """Return when `due` may change without an event.

        In monotonic seconds; inf means never.
        """
        return wake_at(self.state)


def apply(state: ProtocolState, event: Event, now: float) -> ProtocolState:
    """Return the state after `event`, which happened at `now` (monotonic seconds)."""
    match event:
        # Keys that come after the groups were drawn are too late: no group could hold them.
        case Answered(SecureStep.KEYS, client):
            return replace(state, keys=state.keys | {client} & state.clients) if not state.groups else state
        case Answered(step, client):
            return _answered(state, step, client)
        case Grouped(drawn):
            _require(not state.groups, event)
            return replace(state, groups=tuple(Group(members, since=now) for members in drawn))
        case PeersChosen(place, peers):
            return _next(state, place, SecureStep.SHARES, event, now, peers=peers)
        case UpdatesClosed(accepted):
            _require(state.accepted is None, event)
            return replace(state, accepted=accepted)
        case SurvivorsChosen(survivors):
            _require(state.accepted is not None and not state.chosen, event)
            pairs = zip(state.groups, survivors, strict=True)
            return replace(
                state,
                groups=tuple(
                    _with_survivors(group, names, state.rules.survivors(len(group.members)), now)
                    for group, names in pairs
                ),
            )
        case SignersChosen(place, signers):
            return _next(state, place, SecureStep.SURVIVORS, event, now, signers=signers)
        case Combined(place):
            return _next(state, place, SecureStep.UNMASK, event, now)
        case GroupFailed(place, reason, liars):
            return _replace(state, place, replace(state.groups[place], reason=reason, liars=liars))
        case StepsDelayed(seconds):
            groups = tuple(replace(group, since=group.since + seconds) for group in state.groups)
            return replace(state, since=state.since + seconds, groups=groups)


def due(state: ProtocolState, reachable: frozenset[str], now: float) -> Effect | None:
    """Return the effect that is due now.

    None means that nothing is due until the next event or `wake_at`.

    Args:
        state: the state.
        reachable: the clients that can still answer: they have not failed, and are here or may come back in time.
        now: monotonic seconds.
    """
    rules = state.rules
    if not state.groups:
        waiting = (state.clients - state.keys) & reachable
        if waiting and state.accepted is None and now < state.since + rules.step_seconds:
            return None
        clients = state.keys & reachable
        return FormGroups(clients) if len(clients) >= rules.fewest else GiveUp(TOO_FEW_FOR_THRESHOLD)
    for place, group in enumerate(state.groups):
        if (decision := _decision(state, place, group, reachable, now)) is not None:
            return decision
    # Survivors are chosen for all groups at once, since the round closes its updates once.
    if state.accepted is not None and not state.chosen and any(not group.reason for group in state.groups):
        kept = (group.peers if not group.reason else () for group in state.groups)
        return SurvivorsChosen(tuple(tuple(name for name in peers if name in state.accepted) for peers in kept))
    return _give_up(state)


def wake_at(state: ProtocolState) -> float:
    """Return when `due` may change without an event.

    In monotonic seconds; inf means never.

    The clients that can still answer may become fewer before; whoever knows them must ask again then.
    """
    if not state.groups:
        return state.since + state.rules.step_seconds
    waiting = (group for group in state.groups if not group.ended and group.step is not SecureStep.UPDATES)
    return min((group.since + state.rules.step_seconds for group in waiting), default=inf)


def out(state: ProtocolState) -> frozenset[str]:
    """Return the clients that a round goes on without.

    They have no group, were in one that failed, or have given no shares.
    """
    if not state.groups:
        return frozenset()
    inside: set[str] = set()
    for group in state.groups:
        if not group.reason:
            inside.update(group.members if group.step is SecureStep.SHARES else group.peers)
    return state.clients - inside


def took(before: ProtocolState, after: ProtocolState, now: float) -> list[tuple[SecureStep, float]]:
    """Return the ended steps between two states, with durations in seconds."""
    ended = []
    if after.groups and not before.groups:
        ended.append((SecureStep.KEYS, max(0.0, now - before.since)))
    for old, new in zip(before.groups, after.groups, strict=False):
        if not old.ended and (old.step is not new.step or new.reason):
            ended.append((old.step, max(0.0, now - old.since)))
    return ended


def lost(state: ProtocolState) -> dict[str, int]:
    """Return the number of clients lost in each ended step.

    By the step's name, and also for steps without losses.
    """
    counts: dict[str, int] = {}
    if state.groups:
        counts[SecureStep.KEYS] = len(state.clients) - sum(len(group.members) for group in state.groups)
    for group in state.groups:
        rows = (group.members, group.peers, group.survivors, group.signers)
        # Each step hands on those who answered, so two neighbouring lists differ by the lost ones.
        for step, before, after in zip(ORDER[1:], rows, rows[1:], strict=False):
            if ORDER.index(group.step) > ORDER.index(step):
                counts[step] = counts.get(step, 0) + len(before) - len(after)
        if group.step is SecureStep.DONE:
            missing, step = len(group.signers) - len(group.answered), SecureStep.UNMASK
        elif group.reason and group.step is SecureStep.UPDATES:
            missing, step = len(group.peers) - len(group.survivors), group.step
        else:
            missing, step = len(group.asked) - len(group.answered) if group.reason else 0, group.step
        counts[step] = counts.get(step, 0) + missing
    return counts


def _answered(state: ProtocolState, step: SecureStep, client: str) -> ProtocolState:
    place = state.place(client)
    if place is None:
        return state
    group = state.groups[place]
    if group.step is not step or group.reason or client not in group.asked:
        return state  # it is too late
    return _replace(state, place, replace(group, answered=group.answered | {client}))


def _next(
    state: ProtocolState,
    place: int,
    step: SecureStep,
    event: Event,
    now: float,
    *,
    peers: tuple[str, ...] | None = None,
    signers: tuple[str, ...] | None = None,
) -> ProtocolState:
    """Return the state with a group moved on from `step`."""
    group = state.groups[place]
    _require(group.step is step and not group.reason, event)
    after = ORDER[ORDER.index(step) + 1]
    # What came for the unmasking still counts when the group is done: it says who was lost.
    answered = group.answered if after is SecureStep.DONE else frozenset[str]()
    moved = replace(group, step=after, since=now, answered=answered)
    return _replace(
        state,
        place,
        replace(
            moved,
            peers=group.peers if peers is None else peers,
            signers=group.signers if signers is None else signers,
        ),
    )


def _with_survivors(group: Group, survivors: tuple[str, ...], needed: int, now: float) -> Group:
    if group.reason:
        return group
    if group.step is not SecureStep.UPDATES:  # its clients could not send updates yet
        return replace(group, reason=TOO_FEW_FOR_THRESHOLD)
    if len(survivors) < needed:
        return replace(group, survivors=survivors, reason=TOO_FEW_TO_UNMASK)
    return replace(group, survivors=survivors, step=SecureStep.SURVIVORS, since=now, answered=frozenset())


def _decision(state: ProtocolState, place: int, group: Group, reachable: frozenset[str], now: float) -> Effect | None:
    """Return the effect that ends the group's step.

    None if the group has ended, or waits for its clients or for the round.
    """
    if group.ended or group.step is SecureStep.UPDATES:
        return None
    waiting = (set(group.asked) - group.answered) & reachable
    if waiting and now < group.since + state.rules.step_seconds:
        return None
    enough = len(group.answered) >= group.threshold
    answered = tuple(name for name in group.asked if name in group.answered)
    if group.step is SecureStep.SHARES:
        return PeersChosen(place, answered) if enough else GroupFailed(place, TOO_FEW_FOR_THRESHOLD)
    if not enough:
        return GroupFailed(place, TOO_FEW_TO_UNMASK)
    return SignersChosen(place, answered) if group.step is SecureStep.SURVIVORS else CombineShares(place)


def _give_up(state: ProtocolState) -> GiveUp | None:
    """Return that the round cannot publish any more, if that is so."""
    if any(group.step is SecureStep.SHARES and not group.reason for group in state.groups):
        return None
    alive = [group for group in state.groups if not group.reason]
    left = sum(len(group.survivors if state.chosen else group.peers) for group in alive)
    if alive and left >= state.rules.needed:
        return None
    asked_for_updates = any(group.peers for group in state.groups)
    return GiveUp(TOO_FEW_TO_UNMASK if state.accepted is not None and asked_for_updates else TOO_FEW_FOR_THRESHOLD)


def _too_few(state: ProtocolState) -> str:
    if not state.groups:
        answered, asked = len(state.keys), len(state.clients)
        return f"{answered} of {asked} clients have sent their keys in time, and {state.rules.fewest} are needed"
    left = sum(len(group.survivors or group.peers) for group in state.groups if not group.reason)
    liars = sorted(name for group in state.groups for name in group.liars)
    why = f": bad_share: {listed(liars)} sent wrong shares" if liars else ""
    return f"the masks of {left} updates can be removed, and {state.rules.needed} updates are needed{why}"


def _replace(state: ProtocolState, place: int, group: Group) -> ProtocolState:
    return replace(state, groups=tuple(group if at == place else other for at, other in enumerate(state.groups)))


def _require(legal: bool, event: object) -> None:
    if not legal:
        raise IllegalEvent(f"{event} cannot happen now")


def form_groups(clients: Iterable[str], size: int, draw: Random) -> tuple[tuple[str, ...], ...]:
    """Return random groups of nearly equal size.

    Each is in rising order of client id.

    Args:
        clients: the clients, at least MIN_GROUP.
        size: how many clients a group should have, to which its remainder is added; 0 = as few groups as possible. A
            group never has more than MAX_GROUP.
        draw: the source of randomness.
    """
    names = sorted(clients)
    draw.shuffle(names)
    count = group_count(len(names), size)
    return tuple(sorted(tuple(sorted(names[place::count])) for place in range(count)))
