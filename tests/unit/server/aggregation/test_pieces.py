"""Pieces of a walk begin where decoders can begin to read."""

from fedring.secure.masks import GROUP
from fedring.server.aggregation.combining import UNIT


def test_pieces_begin_where_groups_of_masked_values_begin() -> None:
    assert UNIT % GROUP == 0
