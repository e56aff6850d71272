"""What goes wrong in secure aggregation."""


class SecureError(Exception):
    """A side does not go on with the secure aggregation of a round.

    Args:
        reason: a stable word.
        text: one sentence for people.
    """

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason
