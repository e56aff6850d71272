"""Steps, state, events and effects of a round's secure aggregation.

Nothing here computes. `fedring.server.secure.machine` says what follows from an event, and when.
"""

from dataclasses import dataclass
from enum import StrEnum

from fedring.secure.limits import MIN_GROUP, fewest_survivors, threshold


class SecureStep(StrEnum):
    """The step of a group; it says which messages clients owe."""

    KEYS = "keys"
    SHARES = "shares"
    UPDATES = "updates"
    SURVIVORS = "survivors"  # the signature of whose updates count
    UNMASK = "unmask"
    DONE = "done"  # the masks of the sum are known


ORDER = tuple(SecureStep)
"""The steps, one after the other."""


@dataclass(frozen=True, slots=True)
class SecureRules:
    """The rules of a round's secure aggregation."""

    step_seconds: float  # the longest time of a step
    needed: int = 1  # updates that a model must be made of
    group_size: int = 0  # clients that a group should have; 0 = as many as possible
    own_noise: bool = False  # whether clients add noise, of which a sum must have enough

    @property
    def fewest(self) -> int:
        """The number of clients that the round needs after their keys came."""
        return max(MIN_GROUP, self.needed, threshold(self.group_size) if self.group_size else 0)

    def survivors(self, clients: int) -> int:
        """How many clients of a group of so many must survive."""
        return fewest_survivors(clients, self.needed if self.own_noise else 0)


@dataclass(frozen=True, slots=True)
class Group:
    """Clients whose updates add up under masks.

    All tuples are in rising order of client id.
    """

    members: tuple[str, ...]
    step: SecureStep = SecureStep.SHARES
    since: float = 0.0  # when the step began, monotonic seconds
    peers: tuple[str, ...] = ()  # members whose shares have come in time
    survivors: tuple[str, ...] = ()  # peers whose updates count; never changes
    signers: tuple[str, ...] = ()  # survivors whose signatures have come in time
    answered: frozenset[str] = frozenset()  # clients that have answered in this step
    reason: str = ""  # why the group has failed; empty = it has not
    liars: tuple[str, ...] = ()  # members that were proved to have sent wrong shares, if that let the group fail

    @property
    def threshold(self) -> int:
        """How many members must answer to the end."""
        return threshold(len(self.members))

    @property
    def asked(self) -> tuple[str, ...]:
        """The clients that are asked for something in this step."""
        match self.step:
            case SecureStep.SHARES:
                return self.members
            case SecureStep.UPDATES:
                return self.peers
            case SecureStep.SURVIVORS:
                return self.survivors
            case SecureStep.UNMASK:
                return self.signers
        return ()

    @property
    def ended(self) -> bool:
        """Whether the group has failed, or its masks are known."""
        return bool(self.reason) or self.step is SecureStep.DONE


@dataclass(frozen=True, slots=True)
class ProtocolState:
    """The secure aggregation of one round."""

    rules: SecureRules
    clients: frozenset[str]  # that were selected
    since: float  # when the clients were asked for their keys, monotonic seconds
    keys: frozenset[str] = frozenset()  # clients whose keys have come
    groups: tuple[Group, ...] = ()  # empty until all keys have come that are waited for
    accepted: frozenset[str] | None = None  # clients whose updates are accepted; None = the round still takes updates

    @property
    def step(self) -> SecureStep:
        """The step of the group that is furthest behind.

        Failed groups do not count.
        """
        if not self.groups:
            return SecureStep.KEYS
        steps = [group.step for group in self.groups if not group.reason]
        return min(steps, key=ORDER.index) if steps else max((g.step for g in self.groups), key=ORDER.index)

    @property
    def chosen(self) -> bool:
        """Whether it was decided whose updates count."""
        return any(group.survivors for group in self.groups)

    @property
    def ended(self) -> bool:
        """Whether all groups have failed, or their masks are known."""
        return bool(self.groups) and all(group.ended for group in self.groups)

    def place(self, client: str) -> int | None:
        """Return the number of the client's group; None if it has none."""
        return next((place for place, group in enumerate(self.groups) if client in group.members), None)


@dataclass(frozen=True, slots=True)
class Answered:
    """A client's message of a step has come, and is durable."""

    step: SecureStep
    client: str


@dataclass(frozen=True, slots=True)
class Grouped:
    """The clients with keys form these groups.

    Each is in rising order of client id.
    """

    groups: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class PeersChosen:
    """These members of a group mask their updates for each other."""

    group: int
    peers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class UpdatesClosed:
    """The round takes no more updates; those of these clients are accepted."""

    accepted: frozenset[str]


@dataclass(frozen=True, slots=True)
class SurvivorsChosen:
    """These members' updates count, group by group.

    A group with too few left fails.
    """

    survivors: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class SignersChosen:
    """These survivors, which have signed, are asked for their shares."""

    group: int
    signers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Combined:
    """The masks of a group are known."""

    group: int


@dataclass(frozen=True, slots=True)
class GroupFailed:
    """The sum of a group will never be known."""

    group: int
    reason: str
    liars: tuple[str, ...] = ()  # members that were proved to have sent wrong shares


@dataclass(frozen=True, slots=True)
class StepsDelayed:
    """Nobody could go on for these seconds, so they do not count."""

    seconds: float


Event = (
    Answered
    | Grouped
    | PeersChosen
    | UpdatesClosed
    | SurvivorsChosen
    | SignersChosen
    | Combined
    | GroupFailed
    | StepsDelayed
)


@dataclass(frozen=True, slots=True)
class FormGroups:
    """The effect that draws the groups of clients, answered by Grouped."""

    clients: frozenset[str]


@dataclass(frozen=True, slots=True)
class CombineShares:
    """Make the masks of a group's shares (Combined or GroupFailed)."""

    group: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """End the round without a model."""

    reason: str


Decision = PeersChosen | SurvivorsChosen | SignersChosen | GroupFailed
"""Effects that are events, too: what is decided must be durable before it is applied."""

Effect = FormGroups | Decision | CombineShares | GiveUp
