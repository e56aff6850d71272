"""The error of everything that reads or writes formats."""

from fedring.job_code import OwnError


class CodecError(OwnError, ValueError):
    """Bytes, or values to be encoded, are not valid.

    Args:
        reason: A stable label, as metrics and refusals have it.
        detail: The fault in words, for people.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail
