"""The exit codes of all programs.

They are those of sysexits.h where it has a fitting one.
"""

from enum import IntEnum


class Exit(IntEnum):
    """The reason why a program ended."""

    OK = 0
    FAILED = 1  # the operation failed
    USAGE = 2  # the command line is wrong
    UNAVAILABLE = 69  # the server cannot be reached
    TRY_AGAIN = 75  # it may work later
    NOT_ALLOWED = 77  # the caller may not do this
    CONFIG = 78  # the configuration, or what it names, is wrong
    INTERRUPTED = 130  # by Ctrl-C, as shells have it
