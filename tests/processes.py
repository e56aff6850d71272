"""Which processes run, as the kernel tells it."""

from pathlib import Path


def lives(pid: int) -> bool:
    """Return whether a process runs; one that has ended, and that nobody has waited for, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children_of(pid: int) -> list[int]:
    """Return the processes that the first thread of a running process has started.

    Raises:
        FileNotFoundError: It has ended.
    """
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def tree_of(pid: int) -> list[int]:
    """Return a process and all that any thread of it, or of these, has started."""
    found = [pid]
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [each for word in children.read_text().split() for each in tree_of(int(word))]
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found
