"""How a client's work can end other than well."""

from fedring.daemon.exits import Exit


class RoundOver(Exception):
    """The round goes on, or has ended, without this client's update; `reason` is a stable word."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


class UpdateRefused(RoundOver):
    """The server will never take this update."""


class WrongModel(ValueError):
    """The model does not fit the one that is trained; the sentence names the first difference."""


class BadModel(Exception):
    """What the server sent is not the model that it named."""


class Refused(Exception):
    """The server will not have this client, now or later; `exit_code` is what a program should end with."""

    def __init__(self, sentence: str, exit_code: Exit) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code


class FederationClosed(RoundOver):
    """The federation was closed: nothing more will come, or go."""

    def __init__(self) -> None:
        super().__init__("closed")
