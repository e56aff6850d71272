"""Integers: what a client sends of an update, and what it keeps."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedring.codec.errors import CodecError
from fedring.secure import SecureError
from fedring.secure.levels import bits_of, largest_of, open_blocks, shorten, to_integers, weight_of
from fedring.secure.masks import MaskedPacket, Width, masked_packet, packed_size, wrap
from fedring.v1 import secure_pb2 as wire


def a_round(count: int, block: int = 16, levels: int = 7, **fields: Any) -> wire.SecureRound:
    """Return a round with `count` steps of 0.5."""
    return wire.SecureRound(scales=np.full(count, 0.5, "<f4").tobytes(), block=block, levels=levels, **fields)


@given(st.integers(1, 500), st.integers(0, 2**32), st.sampled_from([16, 64]), st.floats(-30, 30))
def test_levels_and_what_is_left_are_the_values_exactly(length: int, seed: int, block: int, power: float) -> None:
    rng = np.random.default_rng(seed)
    total = -(-length // block)
    flags = rng.random(total) < 0.5
    flags[rng.integers(total)] = True
    scales = (rng.uniform(0.5, 2, flags.sum()) * 2.0**power).astype("<f4")
    bitmap = np.packbits(flags, bitorder="little").tobytes()
    secure = wire.SecureRound(scales=scales.tobytes(), blocks=bitmap, block=block, levels=1000)
    values = (rng.standard_normal(length) * 10 * 2.0**power).astype(np.float32)
    before = values.astype(np.float64)
    levels = to_integers(values, secure, 1).integers
    told = np.zeros(length)
    sent = np.repeat(flags, block)[:length]
    told[sent] = levels * np.repeat(scales.astype(np.float64), block)[: len(levels)]
    np.testing.assert_array_equal(told + values, before)
    assert np.abs(values[sent]).max(initial=0) <= 0.5001 * scales.max()


def test_values_are_rounded_to_the_nearest_level_and_cut_to_the_largest() -> None:
    values = np.array([0.24, 0.25, 0.26, 0.75, -0.26, 3.5, 3.9, -100, 1e38], np.float32)
    rounded = to_integers(values, a_round(1), 1)
    assert rounded.integers.tolist() == [0, 0, 1, 2, -1, 7, 7, -7, 7]
    assert values[7] == -96.5
    assert rounded.clipped_share == 3 / 9


@pytest.mark.parametrize("weight", [1, 3, 379, 871, 1000])
@pytest.mark.parametrize("power", [-90, 0, 60])
def test_whatever_a_weight_is_integers_and_what_is_left_are_the_values(weight: int, power: int) -> None:
    rng = np.random.default_rng(weight)
    secure = a_round(4, block=64, max_weight=1000)
    secure.scales = (rng.uniform(0.5, 2, 4) * 2.0**power).astype("<f4").tobytes()
    values = (rng.standard_normal(250) * 2.0**power).astype(np.float32)
    before = values.astype(np.float64)
    rounded = to_integers(values, secure, weight)
    assert rounded.clipped_share == 0
    assert rounded.integers[-1] == weight
    steps = np.repeat(np.frombuffer(secure.scales, "<f4").astype(np.float64), 64)[:250] / weight
    lost = rounded.integers[:-1] * steps + values - before
    assert np.all(np.abs(lost) <= 2.0**-24 * np.abs(values) + 2.0**-50 * np.abs(before))
    assert np.all(np.abs(values) <= 0.51 * steps)


@pytest.mark.parametrize("weight", [1, 379, 1000, 5000])
def test_the_range_of_the_integers_says_nothing_of_the_weight(weight: int) -> None:
    values = np.array([1e9, -1e9, 1e38, 0], np.float32)
    rounded = to_integers(values, a_round(1, max_weight=1000), weight)
    assert rounded.integers[:-1].tolist() == [7000, -7000, 7000, 0]
    assert rounded.integers[-1] == min(weight, 1000)
    assert values[0] == pytest.approx(1e9 - 3500 / min(weight, 1000))


def test_a_range_that_float32_does_not_hold_is_not_left() -> None:
    secure = a_round(1, levels=3, max_weight=5_596_701)
    assert largest_of(secure) == 16_790_103 < int(np.float32(largest_of(secure)))
    assert to_integers(np.array([1e9, -1e9], np.float32), secure, 5).integers.tolist() == [16_790_102, -16_790_102, 5]


def test_an_update_of_which_too_much_would_be_cut_stays_and_zeros_go_out() -> None:
    values = np.array([100, -100, 100, 0.5, 0, 0, 0, 0], np.float32)  # 3 of the 4 values that are not 0
    before = values.copy()
    rounded = to_integers(values, a_round(1, max_weight=10), 10, max_clipped_share=0.74)
    assert (rounded.clipped_share, rounded.zeroed) == (0.75, True)
    assert rounded.integers.tolist() == [0] * 8 + [10]
    np.testing.assert_array_equal(values, before)
    rounded = to_integers(values, a_round(1, max_weight=10), 10, max_clipped_share=0.75)
    assert (rounded.clipped_share, rounded.zeroed) == (0.75, False)
    assert rounded.integers.tolist() == [70, -70, 70, 10, 0, 0, 0, 0, 10]


@pytest.mark.parametrize("length", [100, 4 * 65_536 + 40])
def test_only_values_that_are_sent_count_as_cut(length: int) -> None:
    total = -(-length // 32)
    flags = np.arange(total) % 2 == 1
    values = np.where(np.repeat(flags, 32)[:length], 1.0, 100.0).astype(np.float32)
    values[32] = 50.0
    bitmap = np.packbits(flags, bitorder="little").tobytes()
    secure = a_round(int(flags.sum()), block=32, blocks=bitmap)
    sent = int(np.repeat(flags, 32)[:length].sum())
    assert to_integers(values, secure, 1).clipped_share == 1 / sent


KEY = bytes(range(32))


def test_a_dither_is_repeated_with_its_key_only_and_moves_no_whole_number() -> None:
    length = 3 * 2**16 + 5  # several pieces and a block that is cut
    scales = np.ones(-(-length // 16), "<f4").tobytes()
    secure = wire.SecureRound(scales=scales, block=16, levels=7, max_weight=10)
    values = np.random.default_rng(0).normal(0, 2, length).astype(np.float32)
    first, again, other, none = (
        to_integers(values.copy(), secure, 10, dither=key).integers for key in (KEY, KEY, KEY[::-1], b"")
    )
    assert first.tolist() == again.tolist()
    for integers in (other, none):
        assert 0.1 < np.mean(first != integers) < 0.9
    assert np.abs(first - none).max() == 1
    whole = np.rint(values)
    assert to_integers(whole.copy(), secure, 1, dither=KEY).integers[:-1].tolist() == np.clip(whole, -70, 70).tolist()


def test_a_dithered_value_is_right_in_the_mean_and_what_it_leaves_out_stays() -> None:
    secure = wire.SecureRound(scales=np.ones(4096, "<f4").tobytes(), block=16, levels=7)
    for value in (0.25, -3.6):
        values = np.full(65536, value, np.float32)
        integers = to_integers(values, secure, 1, dither=KEY).integers
        assert set(integers.tolist()) == {int(np.floor(value)), int(np.ceil(value))}
        assert integers.mean() == pytest.approx(value, abs=0.01)
        np.testing.assert_allclose(values + integers, value, rtol=1e-6)


def test_a_dither_is_the_same_whichever_blocks_are_whole() -> None:
    values = np.random.default_rng(1).normal(0, 2, 40).astype(np.float32)
    dense = to_integers(values.copy(), a_round(3), 1, dither=KEY).integers
    sparse = to_integers(values.copy(), a_round(2, blocks=b"\5"), 1, dither=KEY).integers
    assert sparse[:16].tolist() == dense[:16].tolist()
    assert len(sparse) == 24


def test_an_update_of_zeros_is_not_cut() -> None:
    assert to_integers(np.zeros(40, np.float32), a_round(3), 1, max_clipped_share=0.0).clipped_share == 0


def test_an_update_without_samples_has_no_weight() -> None:
    assert weight_of(a_round(3), 5) == 1
    assert weight_of(a_round(3, max_weight=4), 5) == 4
    with pytest.raises(ValueError, match="0 samples"):
        to_integers(np.zeros(40, np.float32), a_round(3), 0)


def test_values_that_are_not_finite_are_refused_and_nothing_is_changed() -> None:
    values = np.ones(40, np.float32)
    values[39] = np.inf
    with pytest.raises(CodecError, match="non_finite"):
        to_integers(values, a_round(3), 1)
    assert values[:39].tolist() == [1.0] * 39
    values[39], values[0] = 1.0, np.nan
    with pytest.raises(CodecError, match="non_finite"):  # in a block that is not sent
        to_integers(values, a_round(1, blocks=b"\2"), 1)


@pytest.mark.parametrize(
    "secure",
    [
        a_round(2),
        a_round(4),
        a_round(3, block=24),
        a_round(3, block=8),
        a_round(1, block=16384),
        a_round(3, levels=0),
        a_round(3, levels=40000),
        a_round(3, levels=2048, max_weight=1 << 20),
        a_round(2, blocks=b"\7"),
        a_round(4, blocks=b"\x0f"),
        a_round(3, blocks=b"\7\0"),
        a_round(0, blocks=b"\0"),
        wire.SecureRound(scales=b"\0" * 11, block=16, levels=7),
        wire.SecureRound(scales=np.array([1, np.nan, 1], "<f4").tobytes(), block=16, levels=7),
        wire.SecureRound(scales=np.array([1, 0, 1], "<f4").tobytes(), block=16, levels=7),
        wire.SecureRound(scales=np.array([1, -1, 1], "<f4").tobytes(), block=16, levels=7),
    ],
    ids=str,
)
def test_a_round_that_does_not_fit_the_model_is_refused(secure: wire.SecureRound) -> None:
    with pytest.raises(SecureError) as caught:
        open_blocks(secure, 40)
    assert caught.value.reason == "bad_blocks"


def test_an_update_is_shortened_to_its_bound_and_never_made_longer() -> None:
    values = np.array([3, 4], np.float32)
    shorten(values, 10)
    shorten(values, 0)
    assert values.tolist() == [3, 4]
    shorten(values, 2.5)
    assert values.tolist() == [1.5, 2]


@pytest.mark.parametrize(("sent", "most"), [(1.0, 0.24), (0.1, 0.025)], ids=["dense", "blocks"])
def test_eight_clients_send_few_bytes(sent: float, most: float) -> None:
    length, block = 1_200_000, 256
    total = -(-length // block)
    flags = np.arange(total) < int(np.ceil(sent * total))
    scales = np.ones(flags.sum(), "<f4").tobytes()
    secure = wire.SecureRound(
        scales=scales, blocks=np.packbits(flags, bitorder="little").tobytes(), block=block, levels=7
    )
    levels = to_integers(np.ones(length, np.float32), secure, 1).integers
    bits = bits_of(secure, 8)
    assert bits == 7
    payload = b"".join(masked_packet(wrap(levels, bits), bits))
    assert len(payload) <= most * 4 * length


@pytest.mark.parametrize(
    "width",
    [Width(9, 7), Width(11, 7), Width(17, 7), Width(10, 6), Width(10, 8), Width(1 << 60, 7)],
    ids=lambda width: f"{width.count}-{width.bits}",
)
def test_a_packet_of_another_width_is_refused(width: Width) -> None:
    data = b"".join(masked_packet(np.zeros(10, np.uint8), 7))
    with pytest.raises(CodecError) as caught:
        MaskedPacket(lambda offset, size: data[offset : offset + size], len(data), width)
    assert caught.value.reason == "wrong_width"


def test_a_packet_of_another_length_than_its_header_says_is_refused() -> None:
    data = b"".join(masked_packet(np.zeros(10, np.uint8), 7))
    for size, reason in ((len(data) - 1, "wrong_width"), (len(data) + 1, "wrong_width"), (15, "truncated")):
        with pytest.raises(CodecError) as caught:
            MaskedPacket(lambda offset, size: (data + b"\0")[offset : offset + size], size, Width(10, 7))
        assert caught.value.reason == reason
    assert len(data) == 16 + packed_size(10, 7)
