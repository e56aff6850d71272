"""The one error of everything that reads bytes."""


class CodecError(ValueError):
    """The bytes, or what they claim, are not valid; `reason` is a stable metric label."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail
