"""The declarations of the .proto files as a value, and their changes.

All clients and servers with one protocol number must understand each other, whatever their versions. So within one
number, calls, messages, fields and values may be added, because an older side ignores them, but nothing may be removed
or changed. protocol.json lists the present declarations. It is compared with the .proto files, and grows with them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)

Wire: TypeAlias = dict[str, Any]
"""The content of protocol.json: the services, messages and enums by their full names, in types of JSON."""

CONTRACT = "common/fedring/rpc/contract.py"
FILE = "protos/protocol.json"
COMMAND = "python protos/generate.py --freeze"

_LABELS = {FieldDescriptorProto.LABEL_REQUIRED: "required ", FieldDescriptorProto.LABEL_REPEATED: "repeated "}
_RESERVED = "reserved"


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes of a wire, one sentence each.

    Things that were removed or changed break it; the others were added.
    """

    broken: list[str]
    added: list[str]


class Refused(Exception):
    """The protocol cannot be frozen.

    The text says why, and what to do.
    """


def describe(files: Iterable[FileDescriptorProto]) -> Wire:
    """Return the declarations of the files.

    Args:
        files: the descriptors of all .proto files, in any order. Comments and options are ignored.

    Returns:
        Methods as "Input -> Output", fields by their numbers as they are declared, values of enums with their numbers.
    """
    services: Wire = {}
    messages: Wire = {}
    enums: Wire = {}
    # Methods, messages and enums are sorted, so that moving a declaration changes nothing.
    for file in files:
        for service in file.service:
            services[f"{file.package}.{service.name}"] = {
                method.name: f"{_streamed(method.client_streaming)}{method.input_type[1:]} -> "
                f"{_streamed(method.server_streaming)}{method.output_type[1:]}"
                for method in sorted(service.method, key=lambda method: method.name)
            }
        for enum in file.enum_type:
            enums[f"{file.package}.{enum.name}"] = _enum(enum)
        for message in file.message_type:
            _describe_message(f"{file.package}.{message.name}", message, messages, enums)
    parts = {"services": services, "messages": messages, "enums": enums}
    return {part: dict(sorted(found.items())) for part, found in parts.items()}


def compare(before: Wire, now: Wire) -> Changes:
    """Return the differences between two wires.

    Args:
        before: the earlier wire, from `describe` or from the file.
        now: the later wire.
    """
    broken: list[str] = []
    added: list[str] = []
    for part, kind in (("services", "service"), ("messages", "message"), ("enums", "enum")):
        for name in sorted({*before[part], *now[part]}):
            if name not in now[part]:
                broken.append(f"the {kind} {name} is gone")
            elif name not in before[part]:
                added.append(f"the {kind} {name} is new")
            else:
                _compare_entries(name, before[part][name], now[part][name], broken, added)
    return Changes(broken, added)


def freeze(before: Wire | None, now: Wire, protocol: int) -> Wire:
    """Return the new content of protocol.json.

    Args:
        before: its present content; None = the file does not exist.
        now: the declarations of the .proto files.
        protocol: the number in the contract.

    Raises:
        Refused: if something was removed or changed, and the number was not raised.
    """
    if before is not None:
        if protocol < before["protocol"]:
            raise Refused(
                f"{FILE} is of protocol {before['protocol']}, and PROTOCOL in {CONTRACT} is {protocol}: raise it"
            )
        if protocol == before["protocol"] and (broken := compare(before, now).broken):
            raise Refused(_text(broken, _advice(protocol)))
    return {"protocol": protocol, **now}


def complaint(before: Wire, now: Wire, protocol: int) -> str:
    """Return how the .proto files contradict protocol.json, or "".

    The text also says what to do.

    Args: the same as for `freeze`.
    """
    if protocol != before["protocol"]:
        return (
            f"PROTOCOL in {CONTRACT} is {protocol}, and {FILE} is of protocol {before['protocol']}: run `{COMMAND}`, "
            f"and name protocol {protocol} in CHANGELOG.md"
        )
    changes = compare(before, now)
    if changes.broken:
        return _text(changes.broken, _advice(protocol))
    return _text(changes.added, f"To add is allowed. Run `{COMMAND}`, which writes it down.") if changes.added else ""


def _advice(protocol: int) -> str:
    return (
        f"Clients of protocol {protocol} would misunderstand it. Leave it as it was; or raise PROTOCOL in {CONTRACT}, "
        f"run `{COMMAND}`, and name protocol {protocol + 1} in CHANGELOG.md. If nobody uses protocol {protocol} yet, "
        f"get {FILE} as it was before (git checkout COMMIT {FILE}), and run the command then."
    )


def _text(sentences: list[str], advice: str) -> str:
    return "\n".join([f"The .proto files are not what {FILE} says:", *(f"  {text}" for text in sentences), advice])


def _compare_entries(
    owner: str, before: Mapping[str, Any], now: Mapping[str, Any], broken: list[str], added: list[str]
) -> None:
    """Compare methods by name, fields by number, or values by name."""
    was_reserved, is_reserved = before.get(_RESERVED, []), now.get(_RESERVED, [])
    entries = {key: text for key, text in before.items() if key != _RESERVED}
    new = {key: text for key, text in now.items() if key not in before and key != _RESERVED}
    for key, was in entries.items():
        # The same field under a new number is one change, not a loss and a gain.
        moved = next((other for other, text in new.items() if text == was), "")
        if key in now and now[key] != was:
            broken.append(f"{owner}: {_entry(key, was)} has become {_entry(key, now[key])}")
        elif key not in now:
            broken.append(
                f"{owner}: {_entry(key, was)} " + (f"has become {_entry(moved, was)}" if moved else "is gone")
            )
    for key, text in new.items():
        if any(_covers(entry, key, text) for entry in was_reserved):
            broken.append(f"{owner}: {_entry(key, text)} takes what was reserved")
        else:
            added.append(f"{owner}: {_entry(key, text)} is new")
    broken += [f"{owner}: {entry} is no longer reserved" for entry in was_reserved if not _within(entry, is_reserved)]
    added += [f"{owner}: {entry} is reserved now" for entry in is_reserved if not _within(entry, was_reserved)]


def _entry(key: str, text: str | int) -> str:
    """Return a declaration as text.

    A field is "string name = 1", a method "Name (Input -> Output)", a value "NAME = 1".
    """
    if isinstance(text, int):
        return f"{key} = {text}"
    return f"{text} = {key}" if key.isdecimal() else f"{key} ({text})"


def _covers(entry: str, key: str, text: str | int) -> bool:
    """Return whether a reserved entry forbids this field or value.

    The entry is a number, a range or a name.
    """
    number, name = (text, key) if isinstance(text, int) else (int(key), text.rpartition(" ")[2])
    return _within(name, [entry]) or _within(str(number), [entry])


def _within(entry: str, entries: Iterable[str]) -> bool:
    """Return whether a reserved entry lies within one of these.

    The entry is a number, a range or a name.
    """
    if (wanted := _numbers(entry)) is None:
        return entry in entries
    return any(found[0] <= wanted[0] and wanted[1] <= found[1] for found in map(_numbers, entries) if found)


def _numbers(entry: str) -> tuple[int, int] | None:
    """Return the first and last number of a reserved range.

    It is None for a name.
    """
    first, _, last = entry.partition(" to ")
    return (int(first), int(last or first)) if first.lstrip("-").isdecimal() else None


def _describe_message(name: str, message: DescriptorProto, messages: Wire, enums: Wire) -> None:
    maps = {f".{name}.{nested.name}": nested for nested in message.nested_type if nested.options.map_entry}
    found: dict[str, Any] = {
        str(field.number): _field(message, field, maps)
        for field in sorted(message.field, key=lambda field: field.number)
    }
    ranges = [(span.start, span.end - 1) for span in message.reserved_range]
    if reserved := [*_spans(ranges), *sorted(message.reserved_name)]:
        found[_RESERVED] = reserved
    messages[name] = found
    for enum in message.enum_type:
        enums[f"{name}.{enum.name}"] = _enum(enum)
    for nested in message.nested_type:
        if not nested.options.map_entry:
            _describe_message(f"{name}.{nested.name}", nested, messages, enums)


def _field(message: DescriptorProto, field: FieldDescriptorProto, maps: Mapping[str, DescriptorProto]) -> str:
    if entry := maps.get(field.type_name):
        key, value = (_type(part) for part in entry.field)
        return f"map<{key}, {value}> {field.name}"
    label = "optional " if field.proto3_optional else _LABELS.get(field.label, "")
    if field.HasField("oneof_index") and not field.proto3_optional:
        label = f"oneof {message.oneof_decl[field.oneof_index].name}: "
    return f"{label}{_type(field)} {field.name}"


def _type(field: FieldDescriptorProto) -> str:
    return field.type_name[1:] or FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()


def _enum(enum: EnumDescriptorProto) -> Wire:
    values = sorted(enum.value, key=lambda value: (value.number, value.name))
    found: Wire = {value.name: value.number for value in values}
    ranges = [(span.start, span.end) for span in enum.reserved_range]
    if reserved := [*_spans(ranges), *sorted(enum.reserved_name)]:
        found[_RESERVED] = reserved
    return found


def _spans(ranges: Iterable[tuple[int, int]]) -> list[str]:
    """Return each run of reserved numbers, with adjacent runs joined.

    A run includes its last number.
    """
    runs: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if runs and first == runs[-1][1] + 1:
            first = runs.pop()[0]
        runs.append((first, last))
    return [str(first) if first == last else f"{first} to {last}" for first, last in runs]


def _streamed(streaming: bool) -> str:
    return "stream " if streaming else ""
