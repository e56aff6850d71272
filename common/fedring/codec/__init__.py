"""Bytes to values and back: no I/O, no clock, no gRPC.

`encode` turns a flat vector into one of the payload formats of protos/FORMATS.md,
`open_payload` reads one range by range, `decode` reads one whole. Readers trust
no byte: they raise CodecError and nothing else, and allocate by what the receiver
expects, never by what the bytes claim.
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
