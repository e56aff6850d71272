"""How the clients of a round are put into groups."""

from collections.abc import Iterable
from random import Random

from fedring.secure.limits import group_count


def form_groups(clients: Iterable[str], size: int, draw: Random) -> tuple[tuple[str, ...], ...]:
    """Return random groups of nearly equal size.

    Each is in rising order of client id.

    Args:
        clients: the clients, at least MIN_GROUP.
        size: how many clients a group should have, to which its remainder is added; 0 = as few groups as possible. A
            group never has more than MAX_GROUP.
        draw: the source of randomness.
    """
    names = sorted(clients)
    draw.shuffle(names)
    count = group_count(len(names), size)
    return tuple(sorted(tuple(sorted(names[place::count])) for place in range(count)))
