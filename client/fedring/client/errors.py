"""The errors of a client."""

from fedring.daemon.exits import Exit
from fedring.job_code import OwnError


class RoundOver(OwnError):
    """The round has ended, or needs nothing more from this client.

    `reason` is a stable word.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


class UpdateRefused(RoundOver):
    """The server has refused this update for good."""


class WrongModel(RoundOver, ValueError):
    """The model is not the one that the job trains.

    It has another schema, or other values of frozen tensors, as `detail` says. It concerns one round only, like every
    RoundOver: the next job may train another model.
    """

    def __init__(self, detail: str, reason: str = "wrong_schema") -> None:
        super().__init__(reason, detail)

    def __str__(self) -> str:
        return self.detail


class Refused(Exception):
    """The server has refused this client for good.

    A program should exit with `exit_code`.
    """

    def __init__(self, sentence: str, exit_code: Exit) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code


class FederationClosed(RoundOver):
    """The federation was closed: nothing more is received or sent."""

    def __init__(self) -> None:
        super().__init__("closed")
