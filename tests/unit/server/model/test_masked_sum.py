"""Sums of masked updates: exact for every number of clients, whoever is lost, and however the walk is cut."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.masked_groups import Bytes, masked, sent

from fedring.secure.levels import bits_of, open_blocks, to_integers
from fedring.secure.masks import masked_packet, wrap
from fedring.server.aggregation.contributions import Contribution
from fedring.server.model.masked_sum import BadSum, GroupMasks, open_groups, width_of
from fedring.v1 import secure_pb2 as wire


def a_round(
    length: int, *, levels: int = 7, block: int = 16, sent: Sequence[int] = (), most: int = 0
) -> wire.SecureRound:
    total = -(-length // block)
    flags = np.zeros(total, np.bool_)
    flags[list(sent)] = True
    scales = np.random.default_rng(length).uniform(0.01, 2, len(sent) or total).astype("<f4")
    bitmap = np.packbits(flags, bitorder="little").tobytes() if sent else b""
    return wire.SecureRound(scales=scales.tobytes(), blocks=bitmap, block=block, levels=levels, max_weight=most)


def read_in_pieces(contribution: Contribution, length: int, cuts: Sequence[int]) -> NDArray[np.float64]:
    """Return the sum of the group, [length]."""
    assert contribution.values is not None
    total = np.zeros(length)
    for start, stop in zip([0, *cuts], [*cuts, length], strict=True):
        contribution.values.add(start, stop, total[start:stop], contribution.weight)
    return total


def expected(
    integers: Mapping[str, NDArray[np.int32]], who: Sequence[str], secure: wire.SecureRound, length: int
) -> NDArray[np.float64]:
    """Return the sum of the plain integers times their steps, [length]."""
    blocks = open_blocks(secure, length)
    total = np.zeros(blocks.count, np.int64)
    for client in who:
        total += integers[client][: blocks.count]
    places = (blocks.indices[:, None] * blocks.block + np.arange(blocks.block)).reshape(-1)
    places = places[places < length]
    values = np.zeros(length)
    values[places] = total * np.repeat(blocks.scales.astype(np.float64), blocks.block)[: len(total)]
    return values


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_sum_is_exact_for_any_clients_blocks_weights_losses_and_cuts(data: st.DataObject) -> None:
    count = data.draw(st.integers(3, 33))
    length = data.draw(st.integers(1, 700))
    block = data.draw(st.sampled_from([16, 32, 64]))
    sent = sorted(data.draw(st.sets(st.integers(0, -(-length // block) - 1))))
    most = data.draw(st.sampled_from([0, 1, 1000]))
    levels = data.draw(st.sampled_from([1, 7, 300]))
    check_sum(
        count,
        data.draw(st.integers(0, count // 3)),
        a_round(length, levels=levels, block=block, sent=sent, most=most),
        length,
        sorted(data.draw(st.sets(st.integers(0, length), max_size=6))),
        data.draw(st.integers(0, 2**32)),
    )


@pytest.mark.parametrize("sent", [(), (0, 3, 7)], ids=["dense", "blocks"])
def test_the_sum_of_a_hundred_clients_is_exact(sent: Sequence[int]) -> None:
    check_sum(100, 33, a_round(120, sent=sent, most=1000), 120, [17, 64], 0)


def check_sum(count: int, losses: int, secure: wire.SecureRound, length: int, cuts: Sequence[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    clients = [f"client-{number}" for number in rng.permutation(count)]
    weights = {client: int(rng.integers(1, (secure.max_weight or 1) + 1)) for client in clients}
    updates = {client: rng.standard_normal(length).astype(np.float32) * 5 for client in clients}
    integers = {client: to_integers(updates[client], secure, weights[client]).integers for client in clients}
    bits = bits_of(secure, count)
    group, payloads = masked(integers, bits, lost=clients[:losses])
    assert all(payload.size == width_of(secure, length, bits).bytes for payload in payloads.values())
    (contribution,) = open_groups([group], secure, sent(payloads), length)
    assert contribution.weight == sum(weights[client] for client in group.clients)
    wanted = expected(integers, group.clients, secure, length)
    np.testing.assert_array_equal(read_in_pieces(contribution, length, cuts), wanted)


def plain_group(values: Sequence[Sequence[int]], bits: int = 8) -> tuple[GroupMasks, dict[str, Bytes]]:
    """Return a group whose updates have no masks."""
    payloads = {
        f"c{number}": Bytes(b"".join(masked_packet(wrap(np.array(each, np.int32), bits), bits)))
        for number, each in enumerate(values)
    }
    return GroupMasks("c0", tuple(payloads), bits, ()), payloads


def test_a_sum_beyond_what_the_clients_may_send_is_refused_with_the_group() -> None:
    group, payloads = plain_group([[7] * 16, [7] * 16, [8] + [7] * 15])
    (contribution,) = open_groups([group], a_round(16), sent(payloads), 16)
    with pytest.raises(BadSum, match="the group of c0 has a value beyond 21") as caught:
        read_in_pieces(contribution, 16, [])
    assert (caught.value.reason, caught.value.group) == ("bad_sum", "c0")


def test_clients_of_small_weights_may_fill_the_range_of_the_largest() -> None:
    group, payloads = plain_group([[35] * 16 + [1]] * 3)
    (contribution,) = open_groups([group], a_round(16, most=5), sent(payloads), 16)
    assert contribution.weight == 3
    step = float(open_blocks(a_round(16), 16).scales[0])
    np.testing.assert_array_equal(read_in_pieces(contribution, 16, []), 105 * step)
    group, payloads = plain_group([[35] * 16 + [1], [35] * 16 + [1], [36] * 16 + [1]])
    (contribution,) = open_groups([group], a_round(16, most=5), sent(payloads), 16)
    with pytest.raises(BadSum, match="beyond 105"):
        read_in_pieces(contribution, 16, [])


def test_one_client_may_fill_the_range_of_all() -> None:
    group, payloads = plain_group([[105] * 16 + [13], [0] * 16 + [1], [0] * 16 + [1]])  # as docs/privacy.md says
    (contribution,) = open_groups([group], a_round(16, most=5), sent(payloads), 16)
    assert contribution.weight == 15
    step = float(open_blocks(a_round(16), 16).scales[0])
    np.testing.assert_array_equal(read_in_pieces(contribution, 16, []), 105 * step)


@pytest.mark.parametrize("weights", [(0, 0, 0), (5, 5, 6), (-1, 1, -1)], ids=["none", "too-large", "negative"])
def test_a_sum_of_weights_that_the_clients_cannot_have_is_refused(weights: Sequence[int]) -> None:
    group, payloads = plain_group([[0] * 16 + [weight] for weight in weights])
    with pytest.raises(BadSum, match="has the weight"):
        open_groups([group], a_round(16, most=5), sent(payloads), 16)


def test_bytes_are_read_once_and_in_order_however_many_tiles_there_are() -> None:
    length = 5 * 8192
    rng = np.random.default_rng(1)
    group, payloads = plain_group([rng.integers(-7, 8, length).tolist() for _ in range(3)], 7)
    places: dict[str, list[tuple[int, int]]] = {client: [] for client in payloads}

    @dataclass(frozen=True)
    class Watched(Bytes):
        client: str

        def read(self, offset: int, size: int) -> bytes:
            places[self.client].append((offset, size))
            return super().read(offset, size)

    watched = {client: Watched(payload.data, client) for client, payload in payloads.items()}
    (contribution,) = open_groups([group], a_round(length), sent(watched), length)
    read_in_pieces(contribution, length, [8192, 3 * 8192])
    for client, found in places.items():
        assert found[0] == (0, 16)
        ends = [offset + size for offset, size in found]
        assert [offset for offset, _ in found[1:]] == ends[:-1]
        assert ends[-1] == payloads[client].size
