"""Mutation of protobuf messages: the result is a message again, so that what lies behind the parser is reached."""

from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import DecodeError, Message

_NUMBERS = (0, 1, 2, 3, 7, 127, 128, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**64 - 1)
_REALS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 1e38, -1e300, float("inf"), float("-inf"), float("nan"))
_BITS = {
    Field.TYPE_INT32: (32, True), Field.TYPE_SINT32: (32, True), Field.TYPE_SFIXED32: (32, True),
    Field.TYPE_UINT32: (32, False), Field.TYPE_FIXED32: (32, False), Field.TYPE_INT64: (64, True),
    Field.TYPE_SINT64: (64, True), Field.TYPE_SFIXED64: (64, True), Field.TYPE_UINT64: (64, False),
    Field.TYPE_FIXED64: (64, False),
}  # fmt: skip


def mutate_bytes(data: bytes, random: Random) -> bytes:
    """Return bytes that differ in one place: flipped, cut, doubled, inserted or overwritten."""
    changed, at = bytearray(data), random.randrange(len(data) + 1)
    size = random.choice((1, 1, 2, 4, 8, random.randrange(64)))
    match random.randrange(5):
        case 0 if data:
            changed[at % len(data)] ^= 1 << random.randrange(8)
        case 1:
            del changed[at : at + size]
        case 2:
            changed[at:at] = changed[at : at + size]
        case 3:
            changed[at:at] = random.randbytes(size)
        case _:
            changed[at : at + size] = random.choice((b"\0", b"\xff", b"[", b'"')) * size
    return bytes(changed)


def mutate_message(message: Message, random: Random) -> None:
    """Change one field of a message, at any depth."""
    fields: Any = message.DESCRIPTOR.fields
    if not fields:
        return
    set_: list[Any] = [field for field, _ in message.ListFields()]
    chosen: Any = random.choice([*set_, random.choice(fields)])
    if chosen.message_type is not None and chosen.message_type.GetOptions().map_entry:
        message.ClearField(chosen.name)  # a map has no order in which to choose one
    elif chosen.is_repeated:
        _mutate_list(message, chosen, random)
    elif chosen.type == Field.TYPE_MESSAGE:
        part = getattr(message, chosen.name)
        if message.HasField(chosen.name) and random.random() < 0.1:
            message.ClearField(chosen.name)
        else:
            part.SetInParent()
            mutate_message(part, random)
    else:
        setattr(message, chosen.name, _changed(getattr(message, chosen.name), chosen, random))


def _mutate_list(message: Message, field: Any, random: Random) -> None:
    values: Any = getattr(message, field.name)
    at = random.randrange(len(values)) if values else 0
    choice = random.randrange(4) if values else 3
    if choice == 0:
        del values[at]
    elif field.type == Field.TYPE_MESSAGE:
        if choice == 1:
            values.add().CopyFrom(values[at])
        else:
            mutate_message(values[at] if choice == 2 else values.add(), random)
    elif choice == 1:
        values.append(values[at])
    elif choice == 2:
        values[at] = _changed(values[at], field, random)
    else:
        values.append(_changed(field.default_value if field.default_value != [] else _zero(field), field, random))


def _zero(field: Any) -> Any:
    return {Field.TYPE_STRING: "", Field.TYPE_BYTES: b"", Field.TYPE_BOOL: False}.get(field.type, 0)


def _changed(value: Any, field: Any, random: Random) -> Any:
    if field.type == Field.TYPE_BOOL:
        return not value
    if field.type == Field.TYPE_BYTES:
        return mutate_bytes(value, random)
    if field.type == Field.TYPE_STRING:
        return mutate_bytes(value.encode(), random).decode("utf-8", "ignore")
    if field.type in (Field.TYPE_FLOAT, Field.TYPE_DOUBLE):
        return random.choice((*_REALS, value * 2, -value))
    if field.type == Field.TYPE_ENUM:
        return random.choice((*(each.number for each in field.enum_type.values), 99))
    bits, signed = _BITS[field.type]
    number = random.choice((*_NUMBERS, value + 1, value - 1, -value, random.getrandbits(64)))
    number %= 2**bits
    return number - 2**bits if signed and number >= 2 ** (bits - 1) else number


def mutated(data: bytes, kind: type[Message] | None, random: Random) -> bytes:
    """Return an input that differs in one to four places; most often in fields, if it is a message of that kind."""
    for _ in range(random.choice((1, 1, 2, 4))):
        if kind is not None and random.random() < 0.8:
            message = kind()
            try:
                message.ParseFromString(data)
                mutate_message(message, random)
            except DecodeError:
                data = mutate_bytes(data, random)
            else:
                data = message.SerializeToString()
        else:
            data = mutate_bytes(data, random)
    return data
