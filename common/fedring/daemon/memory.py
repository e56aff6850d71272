"""The C library's allocator, as a daemon that moves megabytes wants it."""

import ctypes
import sys

_M_ARENA_MAX = -8
_ARENAS = 2


def bound_arenas() -> None:
    """Threads share two heaps: with one each, as glibc has it, what one thread frees no other thread ever gets.

    Before that, a server that took 100 MB updates from 8 clients peaked 300 MB higher than with 2. Does nothing where
    the C library is another one.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_M_ARENA_MAX, _ARENAS)
