"""A malicious client: what it sends in a round, given what it learned and what the honest clients send.

The same object attacks over the wire (`clients`), in the tests, and in the measurements (`rounds`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

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
    "tuned_little",
    "min_max",
    "min_sum",
    "trim",
    "capped_backdoor",
    "median_backdoor",
]
ATTACKS: tuple[Attack, ...] = get_args(Attack)
ADAPTIVE: tuple[Attack, ...] = ATTACKS[ATTACKS.index("tuned_little") :]
"""Attacks that are as strong as they can be without looking different, by what they know of the honest clients."""

_EPSILON = 2.0
"""The factor of inner-product manipulation; an attacker may be longer than honest clients, too."""
_LENGTHS = {"capped_backdoor": 2.9, "median_backdoor": 1.0}
"""Norms of backdoors, in median norms of the honest updates; `centered_clip` leaves out what is above 3."""


@dataclass(slots=True, eq=False)
class Attacker:
    """A malicious client. With the attack "none" it is honest."""

    attack: Attack
    samples: Samples  # its own, as they would be if it were honest
    classes: int  # labels are 0 to classes - 1
    bright: float  # the value of the trigger's pixels
    clients: int  # n, all clients of a round
    malicious: int  # f
    z: float = 1.0  # standard deviations of "tuned_little"
    seed: int = 0  # of what it draws; each malicious client has one of its own
    _victim: int | None = field(default=None, init=False)  # whom it mimics since the first round
    _drawn: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self._drawn = np.random.default_rng(self.seed)

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
            case "tuned_little":
                return formulas.little(honest(), self.z), own
            case "min_max":
                return formulas.min_max(honest()), own
            case "min_sum":
                return formulas.min_sum(honest()), own
            case "trim":
                return formulas.beyond_the_ends(honest(), self._drawn), own
            case "capped_backdoor" | "median_backdoor":
                norm = _LENGTHS[self.attack] * float(np.median(np.linalg.norm(honest(), axis=1)))
                return formulas.capped(learn(formulas.poisoned(self.samples, self.bright)), norm), own
            case "none":
                return learn(self.samples), own
