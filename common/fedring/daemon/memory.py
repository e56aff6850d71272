"""The C library's allocator, set up for a daemon that moves megabytes."""

import ctypes
import sys

_M_ARENA_MAX = -8
_ARENAS = 2


def bound_arenas() -> None:
    """Let all threads share two heaps. With one heap each, glibc's default, what one thread frees no other thread gets.

    Before that, a server that took 100 MB updates from 8 clients peaked 300 MB higher than with 2. Does nothing where
    the C library is another one.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_M_ARENA_MAX, _ARENAS)
