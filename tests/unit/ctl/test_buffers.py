"""What flctl says of asynchronous rounds."""

from fedring.ctl.operate.round_kinds import buffer_sentence, histogram, shares
from fedring.v1 import control_pb2 as pb


def buffer(**staleness: int) -> pb.AsynchronousProgress:
    return pb.AsynchronousProgress(buffer=3, concurrency=10, at_work=7, staleness=staleness)


def test_a_buffer_is_described_with_the_ages_of_its_updates_and_who_is_at_work() -> None:
    text = buffer_sentence(buffer(a=0, b=2, c=0))
    assert text == "3 of 3 updates (2 of age 0, 1 of age 2, in versions); 7 of 10 clients at work"
    assert buffer_sentence(buffer()) == "0 of 3 updates; 7 of 10 clients at work"


def test_the_shares_are_those_of_the_newest_versions() -> None:
    made = [pb.Round(model_version=2, asynchronous=buffer(a=0, b=1)) for _ in range(10)]
    old = [pb.Round(model_version=1, asynchronous=buffer(c=0))]
    opened = [pb.Round(asynchronous=buffer(d=0))]
    assert shares([*opened, *made, *old]) == "shares of the last 10 buffers: a 50.00 %, b 50.00 %"
    assert shares([pb.Round(model_version=1)]) == ""
    equal = pb.Round(model_version=1, asynchronous=buffer(**dict.fromkeys("hgfedcba", 0)))
    assert shares([equal]) == f"shares of the last 1 buffer: {', '.join(f'{name} 12.50 %' for name in 'abcdefgh')}"


def test_the_ages_are_drawn_as_bars() -> None:
    made = [
        pb.Round(model_version=2, asynchronous=buffer(a=0, b=12)),
        pb.Round(model_version=1, asynchronous=buffer(a=0)),
    ]
    assert histogram([pb.Round(asynchronous=buffer(d=3)), *made]) == [
        "updates of the last 2 buffers by age, in versions:",
        f"   0 {30 * '█'} 2",
        f"  12 {15 * '█'}{15 * ' '} 1",
    ]
    assert histogram([pb.Round(model_version=1)]) == []
