"""One decoder under fuzz."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from google.protobuf.message import Message


@dataclass(frozen=True)
class Target:
    """A decoder, with examples of its input.

    `run` must return, or raise one of `errors`. Anything else is found.
    """

    run: Callable[[bytes], object]
    examples: Sequence[bytes]
    errors: tuple[type[Exception], ...] = ()
    message: type[Message] | None = None  # if the input is such a message, its fields are mutated

    def survives(self, data: bytes) -> None:
        """Run the decoder; errors that it declares are fine."""
        with contextlib.suppress(*self.errors):
            self.run(data)
