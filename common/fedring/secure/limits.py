"""The numbers of clients, values and bits that secure aggregation works with."""

MIN_GROUP, MAX_GROUP = 3, 100
"""The fewest and the most clients of a group."""

MIN_BLOCK, MAX_BLOCK = 16, 8192
"""The fewest and the most values that share a step."""

MAX_LEVELS = 32767
"""The most levels on each side of zero."""


def threshold(clients: int) -> int:
    """Return the number of clients of a group that must answer.

    It is more than two thirds of them, and they must answer to the end. With fewer than a third of dishonest clients,
    no two sets of survivors can both reach it (Bonawitz et al. 2017, section 6.2).
    """
    return 2 * clients // 3 + 1


def fewest_survivors(clients: int, needed: int) -> int:
    """Return the fewest clients in a sum.

    Args:
        clients: of the group.
        needed: results that a round needs, if the clients add noise; else 0. If a group can have so many, its clients
            see to it that their sum has.
    """
    return max(threshold(clients), needed if needed <= clients else 0)


def honest_survivors(clients: int, needed: int, *, trusted: bool) -> int:
    """Return the fewest honest clients in a sum with noise.

    An honest client has added noise that nobody else knows. Without trust, fewer than a third of the group may add no
    noise, or tell the server theirs. One client is left out in any case: each knows its own noise, which hides nothing
    from it.

    Args:
        clients: of the group.
        needed: results that a round needs.
        trusted: whether all clients add their noise and keep it to themselves.
    """
    dishonest = 1 if trusted else max(1, (clients - 1) // 3)
    return fewest_survivors(clients, needed) - dishonest


def group_count(clients: int, size: int) -> int:
    """Return the number of groups into which clients are divided.

    The groups are of nearly equal size.

    Args:
        clients: their number.
        size: how many clients a group should have, to which its remainder is added; 0 = as few groups as possible. A
            group never has more than MAX_GROUP.
    """
    return max(clients // size if size else 1, -(-clients // MAX_GROUP), 1)


def bits_of_sum(clients: int, levels: int, max_weight: int = 1) -> int:
    """Return the bits that hold a sum over clients.

    Each of the `clients` values is between -max_weight * levels and max_weight * levels.
    """
    return (2 * clients * max_weight * levels).bit_length()
