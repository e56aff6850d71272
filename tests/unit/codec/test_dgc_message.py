"""Gradient messages: their bytes, their sizes, and what is refused."""

import struct

import numpy as np
import pytest

from fedring.codec import CodecError
from fedring.codec.gradient import Part, decode_gradient, encode_gradient, largest_message
from fedring.codec.precision import Precision, from_words, to_words, words_size
from fedring.codec.rice import bits_for, coded_size, pack_gaps, unpack_gaps

PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16", "sign")


def part(positions: list[int] | None, values: list[float], precision: Precision = "fp32") -> Part:
    where = None if positions is None else np.array(positions, np.int64)
    return Part(where, to_words(np.array(values, np.float32), precision))


def random_part(size: int, count: int, precision: Precision) -> Part:
    generator = np.random.default_rng(0)
    positions = np.sort(generator.choice(size, count, replace=False))
    return Part(positions, to_words(generator.laplace(size=count).astype(np.float32), precision))


def message(form: int = 2, precision: int = 0, bits: int = 0, count: int = 1, **other: object) -> bytes:
    """Return a message about one tensor of 8 entries, with one byte of positions, 0b1, and one float by default."""
    positions, words = other.get("positions", b"\1"), other.get("words", struct.pack("<f", 1))
    assert isinstance(positions, bytes)
    assert isinstance(words, bytes)
    layout = encode_gradient([part([0], [1])], sizes=[8])[8:12]
    row = struct.pack("<BBBBII", form, precision, bits, other.get("zero", 0), count, len(positions))
    return struct.pack("<2sBBI", b"GR", 0, 1, 1) + layout + row + positions + words


def reason(data: bytes, sizes: list[int] | None = None) -> str:
    """Return the reason for which `data` is refused."""
    with pytest.raises(CodecError) as refused:
        decode_gradient(data, sizes=sizes or [8])
    return refused.value.reason


def test_a_thousandth_of_a_gradient_costs_close_to_its_entropy() -> None:
    size, count = 2_000_000, 2000
    for precision in PRECISIONS:
        data = encode_gradient([random_part(size, count, precision)], sizes=[size])
        bits = 8 * (len(data) - words_size(precision, count)) / count
        assert bits < 11.7  # 32-bit positions cost 32, u16 gaps 16, the entropy is 11.4


def test_gaps_travel_as_u16_where_that_is_smaller() -> None:
    far = list(range(9, 1_000_000, 60_000))
    data = encode_gradient([part(far, [1.0] * len(far))], sizes=[1_000_000])
    assert (data[12], struct.unpack_from("<I", data, 20)[0]) == (1, 2 * len(far))
    (entries,) = decode_gradient(data, sizes=[1_000_000])
    assert entries.positions is not None
    assert entries.positions.tolist() == far


def test_gaps_above_u16_are_rice_coded() -> None:
    data = encode_gradient([part([70_000, 2_000_000_000], [1, 2])], sizes=[2_000_000_001])
    (entries,) = decode_gradient(data, sizes=[2_000_000_001])
    assert entries.positions is not None
    assert entries.positions.tolist() == [70_000, 2_000_000_000]


def test_tensors_too_large_for_a_message_are_not_encoded() -> None:
    with pytest.raises(CodecError, match="fewer than 2\\^31"):
        encode_gradient([part([0], [1])], sizes=[1 << 31])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_no_message_is_larger_than_largest_message(precision: Precision) -> None:
    for size in (1, 2, 3, 7, 100, 1000, 70_000):
        for most in sorted({1, 2, 3, size // 1000 + 1, size // 3 + 1, size}):
            limit = largest_message([(size, min(most, size))], precision)
            for count in {0, 1, min(most, size) // 2, min(most, size)}:
                for positions in (range(count), range(size - count, size), range(0, size, size // max(1, count))):
                    sent = part(list(positions)[:count], [1.0] * count, precision)
                    assert len(encode_gradient([sent], sizes=[size])) <= limit


def test_a_message_for_tensors_of_other_sizes_is_refused() -> None:
    data = encode_gradient([part([1], [1]), part([2], [1])], sizes=[8, 9])
    for sizes in ([9, 8], [8, 10], [8], [8, 9, 1]):
        assert reason(data, sizes) == "wrong_length"


def test_every_truncation_and_every_extension_is_refused() -> None:
    data = encode_gradient([random_part(1000, 30, "fp16"), part(None, [1, 2, 3])], sizes=[1000, 3])
    for size in range(len(data)):
        assert reason(data[:size], [1000, 3]) == "truncated"
    assert reason(data + b"\0", [1000, 3]) == "wrong_size"


def test_a_wrong_header_is_refused() -> None:
    assert reason(b"XX" + message()[2:]) == "bad_header"
    assert reason(message(zero=1)) == "bad_header"
    assert reason(message(form=3)) == "bad_header"
    assert reason(message(precision=3)) == "bad_header"
    assert reason(message(bits=32)) == "bad_header"
    assert reason(message(form=1, bits=1, positions=b"\0\0")) == "bad_header"
    assert reason(message(form=1)) == "bad_header"
    assert reason(message(form=0, positions=b"")) == "bad_header"  # a whole tensor has 8 entries


def test_a_count_above_the_size_of_the_tensor_is_refused() -> None:
    assert reason(message(count=9)) == "bad_header"
    assert reason(message(count=2**32 - 1)) == "bad_header"


def test_invalid_positions_are_refused() -> None:
    assert reason(message(positions=b"\0")) == "bad_indices"  # no one
    assert reason(message(positions=b"\3")) == "bad_indices"  # two ones
    assert reason(message(positions=b"\1\0")) == "bad_indices"  # a byte too many
    assert reason(message(positions=b"\0\1")) == "bad_indices"  # position 8 of 8
    assert reason(message(form=1, positions=b"\x08\0")) == "bad_indices"
    assert reason(message(form=1, positions=b"\xff\xff")) == "bad_indices"


def test_positions_that_are_too_long_are_refused_before_they_are_unpacked() -> None:
    with pytest.raises(CodecError, match="bad_indices: 1001 bytes of 1 gaps"):
        decode_gradient(message(positions=bytes(1000) + b"\1"), sizes=[8])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_message_that_is_not_finite_is_refused_by_every_receiver(precision: Precision, bad: float) -> None:
    assert reason(encode_gradient([part([3, 4], [1.0, bad], precision)], sizes=[8])) == "non_finite"


def test_a_value_that_overflows_when_it_is_decoded_is_refused() -> None:
    words = struct.pack("<be", -128, 60_000)
    assert reason(message(precision=1, words=words)) == "non_finite"


def test_a_signalling_nan_is_refused_without_a_warning() -> None:
    assert reason(message(precision=1, words=struct.pack("<bH", 0, 0x7C01))) == "non_finite"


def test_a_negative_scale_is_refused() -> None:
    assert reason(message(precision=2, words=struct.pack("<HB", 0xBF80, 1))) == "bad_scale"


def test_values_of_a_wrong_size_are_refused() -> None:
    for precision in PRECISIONS:
        with pytest.raises(CodecError, match="wrong_size"):
            from_words(precision, memoryview(bytes(words_size(precision, 3) + 1)), 3)


def test_halves_keep_their_precision_at_any_magnitude() -> None:
    values = np.random.default_rng(0).uniform(1, 2, 100).astype(np.float32)
    for power in (-80, -30, 0, 30, 100):
        scaled = np.ldexp(values, power)
        assert np.abs(to_words(scaled, "fp16").values / scaled - 1).max() <= 2**-11


def test_signs_carry_the_mean_magnitude() -> None:
    assert to_words(np.array([1, -2, 3], np.float32), "sign").values.tolist() == [2, -2, 2]
    assert to_words(np.empty(0, np.float32), "sign").values.tolist() == []


def test_the_chosen_number_of_low_bits_is_near_the_best() -> None:
    generator = np.random.default_rng(0)
    for density in (0.5, 0.25, 0.06, 0.01, 0.001, 0.0001):
        gaps = generator.geometric(density, 5000) - 1
        size = int(gaps.sum()) + gaps.size
        sizes = [coded_size(gaps, bits) for bits in range(20)]
        assert sizes[bits_for(gaps.size, size)] <= 1.01 * min(sizes)


def test_no_gaps_take_no_bytes() -> None:
    assert pack_gaps(np.empty(0, np.int64), 5) == b""
    assert unpack_gaps(memoryview(b""), 0, bits=5, size=10).tolist() == []
