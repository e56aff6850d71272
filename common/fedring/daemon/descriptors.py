"""The descriptors that this process may open: raised when it starts, and divided between connections and files."""

import resource


def raise_limit(wanted: int) -> int:
    """Raise the limit of descriptors to `wanted`, or as far as the system lets this process.

    Returns:
        The limit that holds now. It is never lowered.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if most <= soft:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    except (OSError, ValueError):  # some systems have a lower limit than the one that they report
        return soft
    return most
