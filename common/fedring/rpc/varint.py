"""Protobuf's variable-length integers.

A few messages are written and read without protobuf.
"""


def varint(value: int) -> bytes:
    """Encode `value`, which is at least 0, as protobuf does."""
    if value < 0x80:
        return bytes((value,))
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def read_varint(data: bytes | memoryview, at: int) -> tuple[int, int]:
    """Decode the integer that begins at offset `at`.

    Returns:
        The value and the offset after it; (-1, `at`) if no integer ends within 9 bytes or before the end of `data`.
    """
    if at < len(data) and data[at] < 0x80:  # most are short
        return data[at], at + 1
    value = 0
    for shift, byte in enumerate(data[at : at + 9]):
        value |= (byte & 0x7F) << 7 * shift
        if byte < 0x80:
            return value, at + shift + 1
    return -1, at
