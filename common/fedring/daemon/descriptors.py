"""The limit of file descriptors, raised at a daemon's start.

Connections and files share the descriptors.
"""

import resource


def raise_limit(wanted: int) -> int:
    """Raise the limit of descriptors to `wanted`, or as far as allowed.

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
