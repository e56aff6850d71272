"""Every example of protos/FORMATS.md is what the code reads and writes."""

import hashlib
import re
import struct
from pathlib import Path

import numpy as np
import pytest
import zstandard
from numpy.typing import NDArray

from fedring.codec import NAMES, CodecError, Encoding, Vectors, decode, encode, encode_buffers, parse_schema

DOCUMENT = (Path(__file__).parents[2] / "protos/FORMATS.md").read_text(encoding="utf-8")
COMPRESSED = {"packed", "uniform"}


def blocks(kind: str) -> list[dict[str, str]]:
    """The fields of each fenced block of `kind`."""
    found = re.findall(rf"^```{kind}\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)
    return [dict(re.findall(r"^(\w+): (.*(?:\n +.*)*)", block, re.MULTILINE)) for block in found]


def numbers(text: str) -> NDArray[np.float64]:
    """The numbers in `text`."""
    return np.array([float(word) for word in text.split()])


def encoding_of(example: dict[str, str]) -> Encoding:
    """The encoding that an example states."""
    name, *fields = example["encoding"].split()
    values = dict(field.split("=") for field in fields)
    return Encoding(
        name, int(values.get("chunk", 8192)), float(values.get("keep_ratio", 0.1)), float(values.get("step", 1))
    )


def encoded(example: dict[str, str]) -> bytes:
    """What this library writes for an example's vector."""
    vector = numbers(example["vector"])
    if example["encoding"] == "fp64":
        return encode_buffers(vector)
    return encode(vector.astype(np.float32), encoding_of(example))


EXAMPLES = {example["encoding"].split()[0]: example for example in blocks("example")}


def test_every_format_has_an_example() -> None:
    assert set(EXAMPLES) == {*NAMES, "fp64"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_decodes_to_what_it_states(name: str) -> None:
    expected = numbers(EXAMPLES[name]["decoded"])
    decoded = decode(bytes.fromhex(EXAMPLES[name]["hex"]), name=name, length=expected.size)
    assert np.array_equal(decoded, expected.astype(decoded.dtype))


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_what_encode_writes(name: str) -> None:
    example, written = EXAMPLES[name], encoded(EXAMPLES[name])
    if name in COMPRESSED:  # another zstandard may compress otherwise
        expected = numbers(example["decoded"]).astype(np.float32)
        assert np.array_equal(decode(written, name=name, length=expected.size), expected)
    else:
        assert written.hex() == bytes.fromhex(example["hex"]).hex()


def stream(content: bytes) -> bytes:
    """A stream as the document has it."""
    frame = zstandard.ZstdCompressor().compress(content) if content else b""
    return struct.pack("<I", len(frame)) + frame


def test_packed_joins_high_parts_and_low_bits_as_the_document_says() -> None:
    gaps = [6, 0, 13]  # two low bits: 10, 00, 01
    segment = struct.pack("<IIf", 3, 2, 0.5) + stream(bytes([2, 4, 254])) + stream(bytes(gap >> 2 for gap in gaps))
    segment += bytes([0b100, 0b001])
    payload = struct.pack("<2sBBIQI", b"PK", 0, 1, 16, 30, len(segment)) + segment
    decoded = decode(payload, name="packed", length=30)
    assert {place: decoded[place] for place in np.flatnonzero(decoded).tolist()} == {6: 1, 7: 2, 21: -1}


def test_uniform_joins_small_and_large_magnitudes_as_the_document_says() -> None:
    levels = [-1, 2, -3, 4, 0, -1000, 65535]
    rest = [magnitude - 4 for magnitude in (4, 1000, 65535)]
    segment = struct.pack("<f", 0.5) + stream(bytes([0b1101111])) + stream(bytes([0b010101]))
    segment += stream(bytes([0b11100100, 0b1111]))
    segment += stream(bytes([value & 255 for value in rest] + [value >> 8 for value in rest]))
    payload = struct.pack("<2sBBIQI", b"UQ", 0, 1, 16, 7, len(segment)) + segment
    assert decode(payload, name="uniform", length=7).tolist() == [level / 2 for level in levels]


def test_the_schema_example_is_canonical_and_has_its_hash() -> None:
    (example,) = blocks("schema")
    schema = parse_schema(example["json"].encode("ascii"))
    assert schema.hash == bytes.fromhex(example["hash"])
    assert (schema.num_parameters, schema.num_buffers) == (10, 1)


def test_another_spelling_of_the_schema_is_refused() -> None:
    (example,) = blocks("schema")
    for spelling in (example["json"].replace(",", ", "), example["json"].replace("\\u00e9", "é")):
        with pytest.raises(CodecError):
            parse_schema(spelling.encode())


def test_the_digest_example_is_a_models_digest() -> None:
    (example,) = blocks("digest")
    parameters, buffers = numbers(example["parameters"]), numbers(example["buffers"])
    by_the_document = hashlib.sha256(parameters.astype("<f4").tobytes() + buffers.astype("<f8").tobytes())
    vectors = Vectors(parameters.astype(np.float32), buffers)
    assert vectors.digest(like=example["sha256"]) == example["sha256"]
    assert by_the_document.hexdigest() == example["sha256"]
