"""Formats of payloads, gradient messages, schemas and digests.

Here live encoders and decoders, which turn values into bytes and back. `encode` turns a flat vector into one of the
payload formats of protos/FORMATS.md, `open_payload` reads a payload range by range, and `decode` reads a whole one. A
new format enters as one module, and by its name in `encoding` and `payload`. I/O, clocks, torch and gRPC must not
enter. A decoder does not trust any byte: it raises CodecError and nothing else, and it allocates by what the receiver
expects, never by what the bytes claim. The package may import no other package of fedring.
"""

from fedring.codec.decoder import Decoder
from fedring.codec.encoding import BUFFERS, DELTA_ONLY, NAMES, STATELESS, TILE, Encoding
from fedring.codec.errors import CodecError
from fedring.codec.payload import decode, encode, encode_buffers, open_payload
from fedring.codec.schema import Entry, Schema, Vectors, parse_schema
from fedring.codec.source import Reader

__all__ = [
    "BUFFERS",
    "DELTA_ONLY",
    "NAMES",
    "STATELESS",
    "TILE",
    "CodecError",
    "Decoder",
    "Encoding",
    "Entry",
    "Reader",
    "Schema",
    "Vectors",
    "decode",
    "encode",
    "encode_buffers",
    "open_payload",
    "parse_schema",
]
