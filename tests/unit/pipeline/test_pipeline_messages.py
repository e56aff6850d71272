"""Messages between stages, which are checked and found by their keys; and the search for a number of micro-batches."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedring.pipeline.errors import PipelineError
from fedring.pipeline.messages import HEADER_BYTES, HEADER_WORDS, Key, StageMessage, header, parse
from fedring.pipeline.search import Curve, Point, search_micro_batches
from fedring.pipeline.transport import LocalTransport, Mailbox
from fedring.schedules.schedule import Kind

LIMIT = 1 << 20
KINDS = st.sampled_from([Kind.FORWARD, Kind.BACKWARD])
NUMBERS = st.integers(0, 1 << 40)


def message(micro_batch: int = 0) -> StageMessage:
    return StageMessage(Key(3, Kind.FORWARD, 1, micro_batch), 7, torch.full((2, micro_batch + 1), float(micro_batch)))


def words_of_a_header() -> NDArray[np.int64]:
    return np.frombuffer(header(message()), np.int64).copy()


@given(KINDS, st.tuples(NUMBERS, NUMBERS, NUMBERS, NUMBERS), st.lists(st.integers(0, 3), max_size=8))
def test_a_header_describes_its_message(kind: Kind, numbers: tuple[int, int, int, int], shape: list[int]) -> None:
    step, stage, micro_batch, version = numbers
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        sent = StageMessage(Key(step, kind, stage, micro_batch), version, torch.zeros(shape, dtype=dtype))
        found = parse(header(sent), max_bytes=LIMIT)
        assert (found.key, found.version) == (sent.key, version)
        assert (found.shape, found.dtype, found.nbytes) == (shape, dtype, sent.tensor.nbytes)


@given(st.integers(0, HEADER_WORDS - 1), st.integers(-(1 << 63), (1 << 63) - 1))
def test_a_wrong_header_is_refused_or_allocates_no_more_than_the_limit(place: int, value: int) -> None:
    words = words_of_a_header()
    words[place] = value
    try:
        found = parse(words.tobytes(), max_bytes=LIMIT)
    except PipelineError:
        return
    assert found.nbytes <= LIMIT


def test_a_huge_shape_without_elements_is_refused() -> None:
    words = words_of_a_header()
    words[7:] = [3, 1 << 40, 1 << 40, 0, 0, 0, 0, 0, 0]
    with pytest.raises(PipelineError, match="more than"):
        parse(words.tobytes(), max_bytes=LIMIT)


@pytest.mark.parametrize("length", [0, HEADER_BYTES - 1, HEADER_BYTES + 1])
def test_a_header_of_another_length_is_refused(length: int) -> None:
    with pytest.raises(PipelineError, match=f"sent {length} bytes"):
        parse(header(message()).ljust(HEADER_BYTES + 1, b"\0")[:length], max_bytes=LIMIT)


@pytest.mark.parametrize("magic", [0x46524E47, 0x46524E32])
def test_a_header_of_an_older_release_is_refused_as_such(magic: int) -> None:
    words = words_of_a_header()
    words[0] = magic
    with pytest.raises(PipelineError, match="runs an older release"):
        parse(words.tobytes(), max_bytes=LIMIT)


def test_tensors_that_a_header_cannot_describe_are_not_sent() -> None:
    with pytest.raises(PipelineError, match="cannot send"):
        header(StageMessage(message().key, 0, torch.zeros(1, dtype=torch.complex64)))


def test_messages_are_found_in_any_order_of_arrival() -> None:
    box = Mailbox()
    for micro_batch in (2, 0, 3, 1):
        box.put(message(micro_batch))
    for micro_batch in range(4):
        found = box.take(message(micro_batch).key)
        assert found is not None
        assert found.tensor.shape == (2, micro_batch + 1)


def test_a_message_that_arrives_twice_is_refused_even_after_it_was_taken() -> None:
    box = Mailbox()
    box.put(message())
    box.take(message().key)
    with pytest.raises(PipelineError, match="arrived twice"):
        box.put(message())


def test_within_one_process_a_message_that_was_not_sent_is_an_error() -> None:
    transport = LocalTransport()
    with pytest.raises(PipelineError, match="was not sent"):
        transport.receive(message().key)
    transport.send(message())
    with pytest.raises(PipelineError, match="arrived twice"):
        transport.send(message())


def test_in_the_search_candidates_take_turns_and_the_first_turn_does_not_count() -> None:
    calls: list[int] = []
    curve = search_micro_batches(calls.append, [2, 8], repeats=2)
    assert calls == [2, 8] * 3
    assert [point.micro_batches for point in curve.points] == [2, 8]


def test_the_best_number_is_the_smallest_of_the_fastest() -> None:
    assert Curve([Point(2, 0.3), Point(8, 0.1), Point(4, 0.1), Point(16, 0.2)]).best == 4


@pytest.mark.parametrize(("candidates", "repeats"), [([], 1), ([0], 1), ([2], 0)])
def test_a_search_needs_candidates_and_repeats(candidates: list[int], repeats: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        search_micro_batches(lambda count: None, candidates, repeats=repeats)
