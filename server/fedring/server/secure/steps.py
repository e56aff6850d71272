"""Secure aggregation as steps of a round's machine, and their metrics."""

from collections.abc import Sequence
from dataclasses import dataclass

from fedring.daemon.metrics import SECONDS, Registry
from fedring.server.round.events import Abandon, Effect, TakeStep
from fedring.server.round.machine import IllegalEvent
from fedring.server.secure import events as ev
from fedring.server.secure import machine as sm

_MOST_NAMES = 10


@dataclass(frozen=True, slots=True)
class SecureSteps:
    """Secure aggregation in the form of a round's steps."""

    state: ev.ProtocolState

    @property
    def ended(self) -> bool:
        """Whether all groups have failed, or their masks are known."""
        return self.state.ended

    def happened(self, event: object, now: float) -> "SecureSteps":
        """Return the state after an event of the secure aggregation."""
        if not isinstance(event, ev.Event):
            raise IllegalEvent(f"{event} is no event of secure aggregation")
        return SecureSteps(sm.apply(self.state, event, now))

    def closed(self, delivered: frozenset[str]) -> "SecureSteps":
        """Return the state after the round has closed.

        `delivered` are the clients whose updates it has.
        """
        return SecureSteps(sm.apply(self.state, ev.UpdatesClosed(delivered), 0.0))

    def delayed(self, seconds: float) -> "SecureSteps":
        """Return the state after a time without progress."""
        return SecureSteps(sm.apply(self.state, ev.StepsDelayed(seconds), 0.0))

    def due(self, reachable: frozenset[str], now: float) -> Effect | None:
        """Return the effect that is due now, if there is one.

        `reachable` are the clients that can still answer.
        """
        match sm.due(self.state, reachable, now):
            case None:
                return None
            case ev.GiveUp(reason):
                return Abandon(reason, _too_few(self.state))
            case effect:
                return TakeStep(effect)

    def wake_at(self) -> float:
        """Return when `due` may change without an event.

        In monotonic seconds; inf means never.
        """
        return sm.wake_at(self.state)


class SecureMetrics:
    """Counts the steps of all groups of all rounds."""

    def __init__(self, registry: Registry) -> None:
        steps = [step for step in ev.SecureStep if step is not ev.SecureStep.DONE]
        text = "What each step of secure aggregation took, group by group."
        self.seconds = registry.histogram("fl_server_secure_step_seconds", text, SECONDS, step=steps)
        text = "Clients that secure aggregation went on without from each of its steps on."
        self.lost = registry.counter("fl_server_secure_lost_clients_total", text, step=steps)


def listed(names: Sequence[str]) -> str:
    """Return names for a sentence: the first of many."""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def _too_few(state: ev.ProtocolState) -> str:
    if not state.groups:
        answered, asked = len(state.keys), len(state.clients)
        return f"{answered} of {asked} clients have sent their keys in time, and {state.rules.fewest} are needed"
    left = sum(len(group.survivors or group.peers) for group in state.groups if not group.reason)
    liars = sorted(name for group in state.groups for name in group.liars)
    why = f": bad_share: {listed(liars)} sent wrong shares" if liars else ""
    return f"the masks of {left} updates can be removed, and {state.rules.needed} updates are needed{why}"
