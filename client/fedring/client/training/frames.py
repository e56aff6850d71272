"""Messages between fl-client and the process of a job's code.

A message is two lengths (u64, little-endian), a JSON object, and tensors as a safetensors file. The code of a job runs
in the process that writes to fl-client, so nothing here trusts what comes: lengths are checked before anything is
allocated, nothing is unpickled, and tensors must be exactly those that are expected.
"""

import json
import socket
import struct
from collections.abc import Callable, Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from fedring.train.errors import SeamError, TrainError
from fedring.train.tensors.state import dtype_of, tensors_of
from fedring.untrusted import parse_json

_LENGTHS = struct.Struct("<QQ")
_MOST_TEXT = 16 << 20  # bytes of the JSON object: that of a model with 100,000 tensors fits
_CHUNK = 1 << 20
LOOK_SECONDS = 0.2

OWN, CORRECTION = "own/", "correction/"
"""What the names of tensors begin with that are not of the round's model."""

Message = dict[str, Any]


class PipeClosed(Exception):
    """The other side has closed the connection."""


class BadPipeMessage(Exception):
    """The bytes are no message."""


class CodePipe:
    """One end of the connection.

    Args:
        end: A connected stream socket.
        look: Is called several times a second while this side waits; what it raises ends the wait.

    Attributes:
        sending: Whether a message is half sent, so that no other one may be.
    """

    def __init__(self, end: socket.socket, look: Callable[[], None] = lambda: None) -> None:
        self.look = look
        self.sending = False
        self._end = end
        end.settimeout(LOOK_SECONDS)

    def fileno(self) -> int:
        """Return the file descriptor."""
        return self._end.fileno()

    def send(self, message: Message, values: bytes = b"") -> None:
        """Send a message.

        Raises:
            PipeClosed: If nobody reads it any more.
        """
        text = json.dumps(message).encode()
        self.sending = True
        for data in (_LENGTHS.pack(len(text), len(values)), text, values):
            self._write(memoryview(data))
        self.sending = False

    def receive(self, most_values: int) -> tuple[Message, bytearray]:
        """Return the next message.

        Args:
            most_values: The most bytes of tensors that may come.

        Raises:
            PipeClosed: If the other side has ended.
            BadPipeMessage: If it is no message, or too long.
        """
        text_size, values_size = _LENGTHS.unpack(self._read(_LENGTHS.size))
        if text_size > _MOST_TEXT or values_size > most_values:
            raise BadPipeMessage(f"a message of {text_size} and {values_size} bytes")
        try:
            message = parse_json(self._read(text_size))
        except ValueError as error:
            raise BadPipeMessage(f"{error}") from error
        if not isinstance(message, dict):
            raise BadPipeMessage(f"a {type(message).__name__}")
        return message, self._read(values_size)

    def close(self) -> None:
        """Close this end."""
        self._end.close()

    def _write(self, data: memoryview) -> None:
        while data:
            try:
                data = data[self._end.send(data[:_CHUNK]) :]
            except TimeoutError:
                self.look()
            except OSError as error:
                raise PipeClosed from error

    def _read(self, size: int) -> bytearray:
        data = bytearray()  # which grows with what comes, whatever length was announced
        while len(data) < size:
            try:
                piece = self._end.recv(min(_CHUNK, size - len(data)))
            except TimeoutError:
                self.look()
                continue
            except OSError as error:
                raise PipeClosed from error
            if not piece:
                raise PipeClosed
            data += piece
            self.look()
        return data


class StandIn(nn.Module):
    """The tensors of a model that another process has, without its code.

    Args:
        described: As `describe` returns it.
        values: Those of the tensors, as `pack` returns them.

    Raises:
        TrainError: With the reason bad_result, if they do not go together.
    """

    def __init__(self, described: object, values: bytearray) -> None:
        super().__init__()
        self._named: dict[str, Tensor] = {}
        made: list[Tensor] = []
        loaded = _load(values)
        try:
            if not isinstance(described, list):
                raise TypeError(f"the description of a model is a {type(described).__name__}")
            for name, place, dtype, shape, parameter, grad in described:
                if place < len(made):
                    self._named[str(name)] = made[int(place)]
                    continue
                value = loaded.pop(name)
                if value.dtype != dtype_of(str(dtype)) or list(value.shape) != list(shape):
                    raise ValueError(f"{name} is another tensor")
                made.append(nn.Parameter(value, requires_grad=bool(grad)) if parameter else value)
                self._named[str(name)] = made[-1]
        except (TypeError, ValueError, KeyError, IndexError, RuntimeError, SeamError) as error:
            raise TrainError("bad_result", f"The process of the job's code has sent another model: {error}.") from error

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]  # of its tensors
        return dict(self._named)


def describe(model: nn.Module) -> list[list[object]]:
    """Return the tensors of a model's state dict, as JSON.

    Each is its name, its place among the tensors, its dtype and shape, whether it is a parameter, and whether that
    requires a gradient.
    """
    places: dict[int, int] = {}
    described: list[list[object]] = []
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            continue  # tensors_of() says what is wrong with it
        place = places.setdefault(id(tensor), len(places))
        dtype = str(tensor.dtype).removeprefix("torch.")
        parameter = isinstance(tensor, nn.Parameter)
        described.append([name, place, dtype, list(tensor.shape), parameter, parameter and tensor.requires_grad])
    return described


def pack(tensors: Mapping[str, Tensor]) -> bytes:
    """Return tensors as a safetensors file."""
    return save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()})


def values_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model by name, each once."""
    return dict(tensors_of(model))


@torch.no_grad()
def put(values: bytearray, targets: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Write values into tensors of the same names, and return the others.

    Raises:
        TrainError: With the reason bad_result, if a tensor is missing, or has another shape or dtype.
    """
    loaded = _load(values)
    for name, target in targets.items():
        value = loaded.pop(name, None)
        if value is None or value.shape != target.shape or value.dtype != target.dtype:
            found = "missing" if value is None else f"{value.dtype} {list(value.shape)}"
            raise TrainError("wrong_schema", f"The tensor {name} of the trained model is {found}.")
        target.copy_(value)
    return loaded


def size_of_values(tensors: Mapping[str, Tensor]) -> int:
    """Return the most bytes that `pack` makes of such tensors."""
    return sum(tensor.numel() * tensor.element_size() + 1024 + 4 * len(name) for name, tensor in tensors.items()) + 4096


def _load(values: bytearray) -> dict[str, Tensor]:
    try:
        return load(bytes(values)) if values else {}
    except (SafetensorError, ValueError, KeyError) as error:
        raise TrainError("bad_result", f"The process of the job's code has sent damaged tensors: {error}.") from error
