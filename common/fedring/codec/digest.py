"""Names of payloads, updates, blobs and models: their digests.

A name is a digest of the bytes, so that anybody can check them. A name is text that says how it was computed: `blake3-`
and 64 hex digits for BLAKE3. 64 hex digits alone are SHA-256, as fedring named everything before protocol 2; such names
are still read, but not given any more.
"""

import hashlib
import re
from typing import Any

from blake3 import blake3

_PREFIX = "blake3-"
_NAME = re.compile(rf"({_PREFIX})?[0-9a-f]{{64}}")


class Digest:
    """Computes the digest of bytes as they arrive.

    Args:
        like: A name, whose algorithm is used. Without it, BLAKE3 is used.
    """

    def __init__(self, like: str = _PREFIX) -> None:
        self._prefix = _PREFIX if like.startswith(_PREFIX) else ""
        self._hash: Any = blake3() if self._prefix else hashlib.sha256()

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Add bytes: any contiguous buffer, such as an array's `data`."""
        if (view := memoryview(data)).nbytes:  # an empty view cannot be cast
            self._hash.update(view.cast("B"))

    @property
    def name(self) -> str:
        """The name of all bytes so far."""
        return f"{self._prefix}{self._hash.hexdigest()}"


def name_of(*parts: bytes | bytearray | memoryview) -> str:
    """Return the name of the concatenated parts."""
    digest = Digest()
    for part in parts:
        digest.update(part)
    return digest.name


def is_called(data: bytes | bytearray | memoryview, name: str) -> bool:
    """Return whether `name` is the name of `data`."""
    digest = Digest(like=name)
    digest.update(data)
    return digest.name == name


def is_name(text: str) -> bool:
    """Return whether `text` can be a name."""
    return _NAME.fullmatch(text) is not None


def is_blake3(text: str) -> bool:
    """Return whether `text` can be a BLAKE3 name, the current kind."""
    return is_name(text) and text.startswith(_PREFIX)


def update_name(header: bytes, payload_digest: str) -> str:
    """Return the name of an update (FORMATS.md, "Names").

    Args:
        header: The bytes of its header, as they travel.
        payload_digest: The name of its payload.
    """
    return name_of(header, payload_digest.encode())
