"""The C library's allocator, set up for a daemon that moves megabytes."""

import ctypes
import sys

_M_ARENA_MAX = -8
_ARENAS = 2
_M_MMAP_THRESHOLD = -3
_LARGE = 1 << 20  # bytes


def bound_arenas() -> None:
    """Let all threads share two heaps.

    With one heap each, glibc's default, no other thread gets the memory that one thread frees: a server that took 100
    MB updates from 8 clients peaked 300 MB higher than with two heaps. Does nothing where the C library is another one.
    """
    _set(_M_ARENA_MAX, _ARENAS)


def return_large_blocks() -> None:
    """Let the C library return freed blocks of at least 1 MiB.

    They go back to the system at once. By default, glibc keeps blocks of up to 32 MiB once one of
    that size was freed. Gradients come and go with every step, and the gaps between them took as much memory as the
    gradients. Does nothing where the C library is another.
    """
    _set(_M_MMAP_THRESHOLD, _LARGE)


def trim() -> None:
    """Return free pages between used blocks to the system.

    Does nothing without glibc.
    """
    if sys.platform == "linux":
        malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if malloc_trim is not None:
            malloc_trim(0)


def _set(parameter: int, value: int) -> None:
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(parameter, value)
