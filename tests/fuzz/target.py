"""One decoder under fuzz."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from google.protobuf.message import Message

from tests.fuzz.mutation import mutated


@dataclass(frozen=True)
class Target:
    """A decoder, with examples of its input.

    `run` must return, or raise one of `errors`. Anything else is found.
    """

    run: Callable[[bytes], object]
    examples: Sequence[bytes]
    errors: tuple[type[Exception], ...] = ()
    message: type[Message] | None = None  # if the input is such a message, its fields are mutated
    mutator: Callable[[bytes, Random], bytes] | None = None  # of inputs that are more than one message

    def mutate(self, data: bytes, random: Random) -> bytes:
        """Return an input that differs in a few places."""
        return self.mutator(data, random) if self.mutator else mutated(data, self.message, random)

    def survives(self, data: bytes) -> None:
        """Run the decoder; errors that it declares are fine."""
        with contextlib.suppress(*self.errors):
            self.run(data)
