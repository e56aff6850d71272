"""The error of secure aggregation."""


class SecureError(Exception):
    """A side stops taking part in a round's secure aggregation.

    Args:
        reason: a stable word.
        text: one sentence for people.
    """

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason
