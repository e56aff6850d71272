"""A malicious client: what it sends in a round, given what it learned and what the honest clients send.

The same object attacks over the wire (`clients`), in the tests, and in the measurements (`rounds`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, get_args

from fedring.data import Samples
from tests.attacks import formulas
from tests.attacks.formulas import Float32

Attack = Literal[
    "none",
    "sign_flip",
    "label_flip",
    "little_is_enough",
    "inner_product",
    "mimic",
    "backdoor",
    "quiet_backdoor",
    "inflation",
]
ATTACKS: tuple[Attack, ...] = get_args(Attack)

_EPSILON = 2.0
"""The factor of inner-product manipulation; an attacker may be longer than honest clients, too."""


@dataclass(slots=True, eq=False)
class Attacker:
    """A malicious client. With the attack "none" it is honest."""

    attack: Attack
    samples: Samples  # its own, as they would be if it were honest
    classes: int  # labels are 0 to classes - 1
    bright: float  # the value of the trigger's pixels
    clients: int  # n, all clients of a round
    malicious: int  # f
    _victim: int | None = field(default=None, init=False)  # whom it mimics since the first round

    def send(self, learn: Callable[[Samples], Float32], honest: Callable[[], Float32]) -> tuple[Float32, int]:
        """Return the update of a round, [D], and the number of samples that it reports.

        Args:
            learn: trains the round's model on samples, and returns the update, [D].
            honest: returns the updates of all honest clients, [m, D]. It is called only if the attack needs them.
        """
        own = len(self.samples)
        match self.attack:
            case "sign_flip":
                return formulas.sign_flip(learn(self.samples)), own
            case "label_flip":
                return learn(formulas.flip_labels(self.samples, self.classes)), own
            case "little_is_enough":
                return formulas.little_is_enough(honest(), self.clients, self.malicious), own
            case "inner_product":
                return formulas.inner_product(honest(), _EPSILON), own
            case "mimic":
                updates = honest()
                self._victim = formulas.victim(updates) if self._victim is None else self._victim
                return updates[self._victim], own
            case "backdoor":
                return formulas.boosted(learn(formulas.poisoned(self.samples, self.bright)), self.clients), own
            case "quiet_backdoor":
                return learn(formulas.poisoned(self.samples, self.bright)), own
            case "inflation":
                return learn(formulas.flip_labels(self.samples, self.classes)), formulas.MOST_SAMPLES
            case "none":
                return learn(self.samples), own
