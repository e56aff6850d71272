"""Records of operations for `torch.profiler`.

A record is named as in `fedring:all_reduce`, like Gloo's `gloo:all_reduce`.

A record lasts from the start of the operation to its end, which usually comes on another thread. torch ends the record
of one thread on another only by a future, and a record with a future has no place for shapes. So with `record_shapes`
the shapes are found in a record of its own, without duration: `fedring:all_reduce:tensors`.
"""

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.futures import Future

from fedring.ring.torch.private_names import find

_NAMES = {"allreduce": "all_reduce", "allgather": "all_gather"}  # elsewhere the names are the same as torch's


def is_recording() -> bool:
    """Return whether a profiler runs on this thread."""
    names = find("profiler")
    return bool(names) and names[0]()


def begin_record(what: str, tensors: Sequence[Tensor]) -> Callable[[], None] | None:
    """Begin to record an operation.

    Returns a function that ends the record, or None if no profiler runs on this thread.

    Args:
        what: The operation's description; its first word names the record.
        tensors: The tensors whose shapes are recorded.
    """
    if not (names := find("profiler")):
        return None
    is_enabled, record_now, begin, end_with = names
    if not is_enabled():
        return None
    word = what.partition(" ")[0]
    name = f"fedring:{_NAMES.get(word, word)}"
    record = begin(name, None)
    ended: Future[None] = Future()
    end_with(record, ended)
    with record_now(f"{name}:tensors", list(tensors)):
        pass
    return lambda: ended.set_result(None)
