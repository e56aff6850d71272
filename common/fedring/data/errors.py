"""The one error of everything that has to do with samples."""


class DataError(Exception):
    """The samples cannot be had; `reason` is a stable word, the text one sentence that says what to do."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
