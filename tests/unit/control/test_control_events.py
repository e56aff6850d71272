"""Events that come together are read one by one."""

import pytest

from fedring.control.calls import Events
from fedring.v1 import control_pb2 as pb


def event(number: int, *later: int) -> pb.Event:
    return pb.Event(id=number, later=[pb.Event(id=each) for each in later])


def test_events_that_came_together_stay_for_the_next_iteration() -> None:
    events = Events(iter([event(1, 2, 3), event(4)]), "a server", after=0)
    assert next(iter(events)).id == 1
    assert events.last == 1
    assert next(each.id for each in events if each.id > 1) == 2
    assert [(each.id, len(each.later)) for each in events] == [(3, 0), (4, 0)]
    assert events.last == 4
    with pytest.raises(StopIteration):
        next(iter(events))
