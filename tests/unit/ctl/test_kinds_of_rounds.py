"""The progress of rounds that only some kinds have, as flctl writes it."""

from fedring.ctl.operate.round_kinds import outcome_of, progress_of
from fedring.v1 import control_pb2 as pb


def test_an_open_round_shows_the_progress_of_its_kind() -> None:
    masked = pb.Round(secure=pb.SecureProgress(step="keys", groups=2, asked=6, answered=4, lost={"keys": 0}))
    assert progress_of(masked) == {"secure": "2 groups, keys: 4 of 6 clients have answered, no client lost"}
    buffered = pb.Round(asynchronous=pb.AsynchronousProgress(buffer=3, concurrency=10, at_work=7))
    assert progress_of(buffered) == {"buffer": "0 of 3 updates; 7 of 10 clients at work"}
    assert progress_of(pb.Round()) == {}


def test_a_round_that_is_over_tells_what_its_steps_took_and_whom_they_lost() -> None:
    steps = pb.SecureProgress(step="done", groups=1, lost={"updates": 1}, seconds={"keys": 2.0})
    assert outcome_of(pb.Round(secure=steps)) == [
        "secure aggregation: 1 group, lost 1 in updates",
        "time of its steps: keys 2.00 s",
    ]
    assert outcome_of(pb.Round()) == []
