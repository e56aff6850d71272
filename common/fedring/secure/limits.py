"""The numbers of clients and of bits that secure aggregation works with."""

MIN_GROUP, MAX_GROUP = 3, 100
"""The fewest and the most clients of a group."""


def threshold(clients: int) -> int:
    """Return how many clients of a group must answer to the end: more than two thirds.

    With fewer than a third of dishonest clients, no two sets of survivors can both reach it (Bonawitz et al. 2017,
    section 6.2).
    """
    return 2 * clients // 3 + 1


def bits_of_sum(clients: int, levels: int, max_weight: int = 1) -> int:
    """Return the bits that hold the sum of `clients` values between -max_weight * levels and max_weight * levels."""
    return (2 * clients * max_weight * levels).bit_length()
