"""Protobuf's variable-length integers, for the few messages that are written and read by hand."""


def varint(value: int) -> bytes:
    """`value`, >= 0, as protobuf writes it."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def read_varint(data: bytes | memoryview, at: int) -> tuple[int, int]:
    """The value at `at`, and where it ends; a value that does not end within 9 bytes is no length: -1."""
    value = 0
    for shift, byte in enumerate(data[at : at + 9]):
        value |= (byte & 0x7F) << 7 * shift
        if byte < 0x80:
            return value, at + shift + 1
    return -1, at
