"""Keep `torch.compile` from looking inside the backend.

It breaks the graph at each call of the backend, and calls it as it is.

Gloo is written in C++, into which Dynamo cannot look. The methods of this backend are Python. Without this module,
Dynamo would compile each of them, from the lock of an operation to the socket.

`torch.compiler.disable` would do the same, but importing it takes a second and each call of it 0.5 us. What it tells
Dynamo about a function is told here without that: as `torch._dynamo.skip` does, but for all that the function calls.
The names for it are private to torch. In a version without them, the backend works, and only `torch.compile` fails.
"""

from types import FunctionType
from typing import TypeVar

from fedring.ring.torch.private_names import find

Class = TypeVar("Class")


def opaque(cls: type[Class]) -> type[Class]:
    """Have `torch.compile` run the methods of a class as they are.

    It breaks the graph where one of them is called.
    """
    if not (names := find("compile")):
        return cls
    set_strategy, skip, strategy = names
    for member in vars(cls).values():
        function = member.fget if isinstance(member, property) else member
        if isinstance(function, FunctionType):
            # The function, and what it calls.
            set_strategy(function.__code__, strategy(skip, skip))
            vars(function)["_torchdynamo_disable"] = True
    return cls
