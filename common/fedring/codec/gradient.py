"""Gradient messages of one worker about the tensors of one bucket.

    'G','R',0,1  tensors u32  layout u32    a row for each tensor    for each tensor its positions, then its values

    row   form u8  precision u8  bits u8  0  count u32  bytes of the positions u32

`layout` is the CRC-32 of the tensors' sizes as u64. Positions rise strictly, and travel as the gaps between them: not
at all (form 0, every entry is sent), as u16 (form 1), or Rice coded with `bits` low bits (form 2), whichever is
smallest. precision.py has the format of values. A decoder does not trust any byte, and allocates by the sizes that it
expects.
"""

import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedring.codec.errors import CodecError
from fedring.codec.precision import Precision, Words, from_words, words_size
from fedring.codec.rice import bits_for, coded_size, largest_size, pack_gaps, unpack_gaps
from fedring.codec.source import VERSION

_HEADER = struct.Struct("<2sBBII")
_ROW = struct.Struct("<BBBBII")
_MAGIC = b"GR"
_DENSE, _U16, _RICE = range(3)
_PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16", "sign")
_TOO_LARGE = 1 << 31


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One tensor in a message that is to be encoded."""

    positions: NDArray[np.int64] | None  # [count], strictly rising, below the tensor's size; None: every entry
    words: Words  # the [count] values


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """One tensor of a decoded message; unlisted entries are 0."""

    positions: NDArray[np.int64] | None  # [count], strictly rising, below the tensor's size; None: every entry
    values: NDArray[np.float32]  # [count], finite


def encode_gradient(parts: Sequence[Part], *, sizes: Sequence[int]) -> bytes:
    """Encode a message.

    Args:
        parts: The entries to send of each tensor.
        sizes: The number of entries of each tensor, below 2^31.

    Raises:
        CodecError: "bad_encoding" if a tensor is too large.
    """
    rows, bodies = [], []
    for part, size in zip(parts, sizes, strict=True):
        form, bits, positions = _pack_positions(part.positions, size)
        words = part.words
        count = size if part.positions is None else part.positions.size
        rows.append(_ROW.pack(form, _PRECISIONS.index(words.precision), bits, 0, count, len(positions)))
        bodies += [positions, words.data]
    return b"".join((_HEADER.pack(_MAGIC, 0, VERSION, len(sizes), _layout(sizes)), *rows, *bodies))


def decode_gradient(data: bytes | memoryview, *, sizes: Sequence[int]) -> list[Entries]:
    """Decode a message.

    Args:
        data: The bytes.
        sizes: The number of entries of each tensor, as the receiver expects it.

    Returns:
        The entries of each tensor.

    Raises:
        CodecError: For bytes that encode_gradient would not write for tensors of these sizes.
    """
    data = memoryview(data)
    rows = _read_table(data, sizes)
    # _read_table has compared the sum of these sizes with the message's length, so no slice falls short.
    end = _HEADER.size + _ROW.size * len(rows)
    entries = []
    for row, size in zip(rows, sizes, strict=True):
        middle = end + row.positions_size
        positions = _unpack_positions(row, data[end:middle], size)
        end = middle + words_size(row.precision, row.count)
        entries.append(Entries(positions, from_words(row.precision, data[middle:end], row.count)))
    return entries


def largest_message(tensors: Iterable[tuple[int, int | None]], precision: Precision) -> int:
    """Return an upper bound of the size of a message in bytes.

    Args:
        tensors: Of each tensor, its number of entries and how many of them are sent at most; None stands for all.
        precision: The precision of the values.
    """
    total = _HEADER.size
    for size, count in tensors:
        total += _ROW.size + words_size(precision, size if count is None else count)
        if count:
            total += largest_size(count, size, bits_for(count, size))
    return total


@dataclass(frozen=True, slots=True)
class _Row:
    form: int
    precision: Precision
    bits: int
    count: int
    positions_size: int


def _read_table(data: memoryview, sizes: Sequence[int]) -> list[_Row]:
    """Read the table of a message about tensors of `sizes`.

    Raises:
        CodecError: If the table does not fit `sizes`, or the message is not as long as the table says.
    """
    start = _HEADER.size
    if len(data) < start:
        raise CodecError("truncated", f"{len(data)} of {start} header bytes")
    magic, zero, version, tensors, layout = _HEADER.unpack_from(data)
    if (magic, zero, version) != (_MAGIC, 0, VERSION):
        raise CodecError("bad_header", f"expected {_MAGIC!r} 0 {VERSION}, got {magic!r} {zero} {version}")
    if tensors != len(sizes) or layout != _layout(sizes):
        raise CodecError("wrong_length", f"a message about {tensors} tensors is for another bucket than {len(sizes)}")
    total = start + _ROW.size * tensors
    if len(data) < total:
        raise CodecError("truncated", f"{len(data)} of {total} bytes of header and table")
    rows = [_read_row(_ROW.unpack_from(data, start + _ROW.size * i), size) for i, size in enumerate(sizes)]
    total += sum(row.positions_size + words_size(row.precision, row.count) for row in rows)
    if len(data) != total:
        raise CodecError("truncated" if len(data) < total else "wrong_size", f"{len(data)} of {total} bytes")
    return rows


def _read_row(fields: tuple[int, ...], size: int) -> _Row:
    form, precision, bits, zero, count, positions_size = fields
    if form > _RICE or precision >= len(_PRECISIONS) or zero or (bits and form != _RICE):
        raise CodecError("bad_header", f"form {form}, precision {precision}, bits {bits}")
    if count > size or (form == _DENSE and count != size):
        raise CodecError("bad_header", f"{count} of {size} entries in form {form}")
    if form != _RICE and positions_size != (2 * count if form == _U16 else 0):
        raise CodecError("bad_header", f"{positions_size} bytes of {count} positions in form {form}")
    return _Row(form, _PRECISIONS[precision], bits, count, positions_size)


def _pack_positions(positions: NDArray[np.int64] | None, size: int) -> tuple[int, int, bytes]:
    """Return the form, number of low bits, and bytes of positions."""
    if size >= _TOO_LARGE:
        raise CodecError("bad_encoding", f"a message holds tensors of fewer than 2^31 entries, not {size}")
    if positions is None:
        return _DENSE, 0, b""
    if not positions.size:
        return _U16, 0, b""
    gaps = np.diff(positions, prepend=-1) - 1
    likely = bits_for(gaps.size, size)
    bits = min(range(max(0, likely - 2), likely + 1), key=lambda bits: coded_size(gaps, bits))
    if 2 * gaps.size <= coded_size(gaps, bits) and gaps.max() < 1 << 16:
        return _U16, 0, gaps.astype("<u2").tobytes()
    return _RICE, bits, pack_gaps(gaps, bits)


def _unpack_positions(row: _Row, data: memoryview, size: int) -> NDArray[np.int64] | None:
    """Return the positions of a row; check that they stay below `size`."""
    if row.form == _DENSE:
        return None
    if row.form == _U16:
        gaps = np.frombuffer(data, "<u2").astype(np.int64)
    else:
        gaps = unpack_gaps(data, row.count, bits=row.bits, size=size)
    positions: NDArray[np.int64] = np.cumsum(gaps + 1) - 1
    if positions.size and positions[-1] >= size:
        raise CodecError("bad_indices", f"position {positions[-1]} of {size} entries")
    return positions


def _layout(sizes: Sequence[int]) -> int:
    return zlib.crc32(np.array(sizes, "<u8").tobytes())
