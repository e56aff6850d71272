"""protos/vectors.json holds what fedring writes and reads, and what the documents say. FORMATS.md shows a part."""

import hashlib
import json
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from blake3 import blake3
from numpy.typing import NDArray
from tests.unit import plain_formats as plain

import vectors as script
from fedring.codec import (
    NAMES,
    CodecError,
    Encoding,
    Entry,
    Schema,
    Vectors,
    decode,
    encode,
    encode_buffers,
    parse_schema,
)
from fedring.codec.digest import name_of, update_name
from fedring.codec.gradient import decode_gradient
from fedring.rpc.contract import PROTOCOL
from fedring.server.aggregation.aggregate import AggregationPlan, aggregate, store_model
from fedring.server.aggregation.contributions import Contribution
from fedring.server.aggregation.modelfile import ModelReader
from fedring.server.state.blobs import FileBlobs
from fedring.server.state.rows import lay_out
from fedring.train.tensors.download import Download, HeldModel
from fedring.v1 import federation_pb2 as pb

VECTORS: dict[str, Any] = json.loads(script.TARGET.read_text(encoding="utf-8"))
PRECISIONS = ("fp32", "fp16", "sign")


def each(key: str) -> pytest.MarkDecorator:
    """Return a mark that runs a test with each example of a part of the file."""
    return pytest.mark.parametrize("example", VECTORS[key], ids=lambda example: example.get("shows"))


def floats(written: Any, dtype: type[np.floating[Any]] = np.float32) -> NDArray[Any]:
    """Return a vector of the file. Fails if the type cannot represent one of the numbers exactly."""
    values = plain.vector_of(written)
    vector = np.array(values, dtype)
    assert vector.tolist() == values
    return vector


def bits(values: NDArray[Any] | list[float]) -> bytes:
    """Return the bytes of the values as float64. They differ between 0.0 and -0.0."""
    return np.asarray(values, np.float64).tobytes()


def without_frames(file: dict[str, Any]) -> dict[str, Any]:
    """Return the file without the bytes that another version of the zstandard library may write differently."""

    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            name = value.get("encoding")
            name = name.get("name") if isinstance(name, dict) else name
            compressed = name in script.CHOICE and "reason" not in value
            return {key: strip(item) for key, item in value.items() if not (compressed and key == "encoded")}
        return [strip(item) for item in value] if isinstance(value, list) else value

    stripped: dict[str, Any] = strip(file)
    return stripped


def test_the_file_is_what_the_script_writes() -> None:
    written = json.loads(json.dumps(script.render()))
    assert without_frames(written) == without_frames(VECTORS), "run: python protos/vectors.py"
    assert script.TARGET.read_text(encoding="utf-8") == script.dump(VECTORS) + "\n"
    assert VECTORS["protocol"] == PROTOCOL


def test_the_examples_of_the_document_are_those_of_the_file() -> None:
    document = script.DOCUMENT.read_text(encoding="utf-8")
    assert document == script.with_examples(document, VECTORS), "run: python protos/vectors.py"
    assert {f"```example\n{name}\n" in document for name in (*NAMES, "fp64")} == {True}
    assert {f"```example\ngradient: {name}\n" in document for name in PRECISIONS} == {True}
    assert {f"```example\n{name}\n" in document for name in ("a schema", "a model")} == {True}


def test_digests_are_blake3() -> None:
    of_nothing = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"  # as BLAKE3's authors state
    assert blake3(b"").hexdigest() == of_nothing


@each("names")
def test_bytes_have_the_name_that_the_file_states(example: dict[str, Any]) -> None:
    data = bytes(i % 251 for i in range(example["size"]))
    assert example["name"] == plain.name_of(data) == name_of(data)


@pytest.mark.parametrize("example", VECTORS["schemas"])
def test_a_schema_is_canonical_and_has_the_stated_hash(example: dict[str, Any]) -> None:
    text = example["json"].encode("ascii")
    schema = parse_schema(text)
    assert example["hash"] == schema.hash.hex() == hashlib.sha256(text).hexdigest()
    assert (schema.num_parameters, schema.num_buffers) == (example["parameters"], example["buffers"])
    assert json.dumps(json.loads(text), separators=(",", ":")).encode() == text


@each("refused_schemas")
def test_another_spelling_of_a_schema_is_refused(example: dict[str, Any]) -> None:
    with pytest.raises(CodecError, match="bad_schema"):
        parse_schema(example["json"].encode())


@pytest.mark.parametrize("example", VECTORS["models"])
def test_the_digest_of_a_model_is_computed_from_its_values(example: dict[str, Any]) -> None:
    parameters, buffers = floats(example["parameters"]), floats(example["buffers"], np.float64)
    data = parameters.astype("<f4").tobytes() + buffers.astype("<f8").tobytes()
    assert Vectors(parameters, buffers).digest() == plain.name_of(data) == example["digest"]
    older = hashlib.sha256(data).hexdigest()
    assert Vectors(parameters, buffers).digest(like=older) == older == example["protocol_1_digest"]


OPTIONAL = {"control"}
"""Fields of an update's header that only some jobs have."""


@each("updates")
def test_an_update_is_named_by_its_header_and_its_payload(example: dict[str, Any]) -> None:
    header, payload = bytes.fromhex(example["header"]), bytes.fromhex(example["payload"])
    digest = plain.name_of(payload)
    assert (digest, name_of(payload)) == (example["payload_digest"],) * 2
    assert plain.name_of(header + digest.encode()) == update_name(header, digest) == example["name"]


@each("updates")
def test_a_header_has_the_fields_that_the_file_states(example: dict[str, Any]) -> None:
    data, says = bytes.fromhex(example["header"]), example["header_says"]
    header = pb.UpdateHeader.FromString(data)
    fields = {field.number: field.name for field in pb.UpdateHeader.DESCRIPTOR.fields if field.name not in OPTIONAL}
    assert {field.name for field, _ in header.ListFields()} == set(says) == set(fields.values())
    for key in set(says) - {"packets", "metrics", "schema_hash"}:
        assert getattr(header, key) == says[key], key
    assert (header.schema_hash.hex(), dict(header.metrics)) == (says["schema_hash"], says["metrics"])
    assert [{key: getattr(packet, key) for key in says["packets"][0]} for packet in header.packets] == says["packets"]
    numbers = [number for number, _ in plain.message(data)]
    assert sorted(set(numbers)) == sorted(fields)


def test_two_updates_have_the_same_fields_in_different_bytes() -> None:
    first, second = VECTORS["updates"]
    assert first["header_says"] == second["header_says"]
    assert first["payload"] == second["payload"]
    assert len({first["name"], second["name"]}) == 2


def test_every_encoding_has_examples() -> None:
    assert {example["encoding"]["name"] for example in VECTORS["encodings"]} == {*NAMES, "fp64"}
    assert {example["encoding"] for example in VECTORS["refused_payloads"]} >= {"fp32", "fp16", "int8", "packed"}


@each("encodings")
def test_a_payload_is_decoded_as_the_file_states(example: dict[str, Any]) -> None:
    name, data = example["encoding"]["name"], bytes.fromhex(example["encoded"])
    expected = floats(example["decoded"], np.float64 if name == "fp64" else np.float32)
    decoded = decode(data, name=name, length=expected.size)
    assert decoded.dtype == expected.dtype
    assert bits(decoded) == bits(expected)


@each("encodings")
def test_the_plain_implementation_decodes_a_payload_to_the_stated_values(example: dict[str, Any]) -> None:
    expected = plain.vector_of(example["decoded"])
    assert bits(plain.decode(bytes.fromhex(example["encoded"]), example["encoding"]["name"], len(expected))) == bits(
        expected
    )


@each("encodings")
def test_values_are_encoded_as_the_file_states(example: dict[str, Any]) -> None:
    if example["encoding"]["name"] == "fp64":
        data = encode_buffers(floats(example["values"], np.float64))
    else:
        data = encode(floats(example["values"]), Encoding(**example["encoding"]))
    if example["exact"]:
        assert data.hex() == example["encoded"]
    else:  # another version of zstandard may compress differently
        expected = plain.vector_of(example["decoded"])
        assert bits(decode(data, name=example["encoding"]["name"], length=len(expected))) == bits(expected)


def test_the_number_of_low_bits_is_chosen_as_the_document_says() -> None:
    found: dict[str, list[int]] = {}
    for example in VECTORS["encodings"]:
        if example["encoding"]["name"] == "packed" and "segments" not in example["shows"] and example["decoded"]:
            written = encode(floats(example["values"]), Encoding(**example["encoding"]))
            for data in (bytes.fromhex(example["encoded"]), written):
                found.setdefault(example["shows"].partition(": ")[2], []).append(data[24])
    assert found == {
        "": [0, 0],
        "the larger of two distances is the median": [3, 3],  # 64 is 7 bits long
        "a gap that is bridged": [0, 0],
        "12 low bits, the most": [12, 12],  # 65536 is 17 bits long
    }


@each("refused_payloads")
def test_an_invalid_payload_is_refused_for_the_stated_reason(example: dict[str, Any]) -> None:
    with pytest.raises(CodecError) as caught:
        decode(bytes.fromhex(example["encoded"]), name=example["encoding"], length=example["size"])
    assert caught.value.reason == example["reason"]


def result_of(example: dict[str, Any], vector: str) -> tuple[list[float], str]:
    """Return the values of a vector in the result of an example, and their bytes in hex."""
    return plain.vector_of(example["result"][vector]), example["result"][f"{vector}_bits"]


@each("downloads")
def test_the_plain_implementation_adds_up_the_packets_of_a_model(example: dict[str, Any]) -> None:
    for vector, layout in (("parameters", "f"), ("buffers", "d")):
        expected, in_hex = result_of(example, vector)
        summed = plain.download(example["held"], example["packets"], vector, len(expected))
        assert struct.pack(f"<{len(summed)}{layout}", *summed).hex() == in_hex
        assert bits(summed) == bits(expected)


@each("downloads")
def test_a_client_adds_up_the_packets_of_a_model(example: dict[str, Any]) -> None:
    result, held = example["result"], example["held"]
    sizes = [len(result_of(example, vector)[0]) for vector in ("parameters", "buffers")]
    entries = (Entry("w", (sizes[0],), "float32", "parameter"), Entry("m", (sizes[1],), "float64", "buffer"))
    schema = Schema(entries)
    vectors = Vectors(floats(held["parameters"]), floats(held["buffers"], np.float64)) if held else None
    # The example does not state the digest of the model that the client holds, so any name will do.
    download = Download(result["digest"], schema, HeldModel("held", schema, vectors) if vectors else None)
    payload = b"".join(bytes.fromhex(packet["encoded"]) for packet in example["packets"])
    header = pb.ModelHeader(
        schema_hash=schema.hash,
        packets=[packet_of(packet) for packet in example["packets"]],
        total_bytes=len(payload),
        model_digest=result["digest"],
    )
    if held:
        header.base_digest = "held"
    download.begin(header)
    download.add(pb.Chunk(data=payload))
    made = download.finish().vectors  # `finish` checks the digest
    assert made.parameters.astype("<f4").tobytes().hex() == result["parameters_bits"]


def packet_of(packet: dict[str, str]) -> pb.Packet:
    return pb.Packet(
        vector=pb.VECTOR_PARAMETERS if packet["vector"] == "parameters" else pb.VECTOR_BUFFERS,
        kind=pb.KIND_DELTA if packet["kind"] == "delta" else pb.KIND_WEIGHTS,
        encoding=packet["encoding"],
        bytes=len(packet["encoded"]) // 2,
    )


@pytest.fixture
def blobs(tmp_path: Path) -> Iterator[FileBlobs]:
    blobs = FileBlobs(tmp_path)
    yield blobs
    blobs.close()


@each("aggregations")
def test_a_server_makes_the_stated_model_from_the_updates(blobs: FileBlobs, example: dict[str, Any]) -> None:
    base = Vectors(floats(example["base"]["parameters"]), floats(example["base"]["buffers"], np.float64))
    contributions = []
    for update in example["updates"]:
        data = b"".join(bytes.fromhex(packet["encoded"]) for packet in update["packets"])
        packets: Any = [(p["vector"], p["kind"], p["encoding"], len(p["encoded"]) // 2) for p in update["packets"]]
        read = memoryview(data)
        contributions.append(
            Contribution(
                update["client_id"],
                update["num_samples"],
                lay_out(packets),
                lambda offset, size, read=read: read[offset : offset + size],  # type: ignore[misc]  # bound here
            )
        )
    first = store_model(parse_schema(example["schema"].encode()), base, blobs, {})
    with ThreadPoolExecutor(2) as executor, blobs.reader(first.blob) as blob:
        new = aggregate(ModelReader(blob), contributions, blobs, executor, AggregationPlan())
    with blobs.reader(new.blob) as blob:
        made = ModelReader(blob).vectors()
    result = example["result"]
    assert made.parameters.astype("<f4").tobytes().hex() == result["parameters_bits"]
    assert made.buffers.astype("<f8").tobytes().hex() == result["buffers_bits"]
    assert new.digest == result["digest"]


@each("aggregations")
def test_the_plain_implementation_makes_the_stated_model_from_the_updates(example: dict[str, Any]) -> None:
    made = b""
    for vector, layout in (("parameters", "f"), ("buffers", "d")):
        expected, in_hex = result_of(example, vector)
        values = plain.aggregate(example, vector)
        assert bits(values) == bits(expected)
        data = struct.pack(f"<{len(values)}{layout}", *values)
        assert data.hex() == in_hex
        made += data
    assert plain.name_of(made) == example["result"]["digest"]


@each("aggregations")
def test_the_order_of_addition_changes_the_result_of_the_example(example: dict[str, Any]) -> None:
    renamed = [{**update, "client_id": name} for update, name in zip(example["updates"], "abc", strict=True)]
    values = plain.aggregate({**example, "updates": renamed}, "parameters")
    assert bits(values) != bits(plain.vector_of(example["result"]["parameters"]))


@each("gradients")
def test_a_gradient_message_is_decoded_as_the_file_states(example: dict[str, Any]) -> None:
    sizes = [tensor["size"] for tensor in example["tensors"]]
    entries = decode_gradient(bytes.fromhex(example["encoded"]), sizes=sizes)
    by_the_plain_implementation = plain.decode_gradient(bytes.fromhex(example["encoded"]), sizes)
    for tensor, read, (positions, values) in zip(example["tensors"], entries, by_the_plain_implementation, strict=True):
        assert (
            (read.positions if read.positions is None else read.positions.tolist()) == tensor["positions"] == positions
        )
        assert bits(read.values) == bits(values) == bits(tensor["decoded"])


def stream(content: bytes) -> bytes:
    """Return a stream of a compressed segment, as the document describes it."""
    frame = zstandard.ZstdCompressor().compress(content) if content else b""
    return struct.pack("<I", len(frame)) + frame


def test_packed_combines_high_parts_and_low_bits_as_the_document_says() -> None:
    gaps = [6, 0, 13]  # two low bits: 10, 00, 01
    segment = struct.pack("<IIf", 3, 2, 0.5) + stream(bytes([2, 4, 254])) + stream(bytes(gap >> 2 for gap in gaps))
    segment += bytes([0b100, 0b001])
    payload = struct.pack("<2sBBIQI", b"PK", 0, 1, 16, 30, len(segment)) + segment
    decoded = decode(payload, name="packed", length=30)
    assert {place: decoded[place] for place in np.flatnonzero(decoded).tolist()} == {6: 1, 7: 2, 21: -1}
    assert plain.decode(payload, "packed", 30) == decoded.tolist()


def test_uniform_combines_small_and_large_magnitudes_as_the_document_says() -> None:
    levels = [-1, 2, -3, 4, 0, -1000, 65535]
    rest = [magnitude - 4 for magnitude in (4, 1000, 65535)]
    segment = struct.pack("<f", 0.5) + stream(bytes([0b1101111])) + stream(bytes([0b010101]))
    segment += stream(bytes([0b11100100, 0b1111]))
    segment += stream(bytes([value & 255 for value in rest] + [value >> 8 for value in rest]))
    payload = struct.pack("<2sBBIQI", b"UQ", 0, 1, 16, 7, len(segment)) + segment
    assert decode(payload, name="uniform", length=7).tolist() == [level / 2 for level in levels]
    assert plain.decode(payload, "uniform", 7) == [level / 2 for level in levels]


@pytest.mark.parametrize("name", NAMES)
def test_the_plain_implementation_reads_what_fedring_writes(name: str) -> None:
    rng = np.random.default_rng(0)
    vector = (rng.standard_normal(3000) ** 5).astype(np.float32)
    data = encode(vector, Encoding(name, chunk=70, keep_ratio=0.02, step=0.01))
    assert bits(plain.decode(data, name, vector.size)) == bits(decode(data, name=name, length=vector.size))


def frame(content: bytes) -> bytes:
    """Return a zstandard frame with one block that is not compressed."""
    head = struct.pack("<IBI", 0xFD2FB528, 0xA0, len(content))
    return head + (len(content) << 3 | 1).to_bytes(3, "little") + content


def read_with(nonzero: bytes) -> list[float]:
    """Decode a payload of `uniform` for three entries, whose first frame is given."""
    streams = struct.pack("<I", len(nonzero)) + nonzero + stream(b"\0") + stream(b"\0") + stream(b"")
    segment = struct.pack("<f", 2) + streams
    payload = struct.pack("<2sBBIQI", b"UQ", 0, 1, 4, 3, len(segment)) + segment
    values: list[float] = decode(payload, name="uniform", length=3).tolist()
    return values


def test_a_frame_need_not_be_compressed() -> None:
    assert read_with(frame(bytes([0b101]))) == [2, 0, 2]


def test_a_stream_is_exactly_one_frame_that_states_its_size() -> None:
    for other in (frame(bytes([0b101])) * 2, frame(bytes([0b101])) + b"\0"):
        with pytest.raises(CodecError, match="bad_compression"):
            read_with(other)
    unstated = struct.pack("<IBB", 0xFD2FB528, 0, 0) + (1 << 3 | 1).to_bytes(3, "little") + bytes([0b101])
    with pytest.raises(CodecError):
        read_with(unstated)


def test_an_empty_stream_may_have_an_empty_frame_or_none() -> None:
    for empty in (stream(b""), struct.pack("<I", len(frame(b""))) + frame(b"")):
        segment = struct.pack("<f", 2) + stream(b"\0") + empty * 3
        payload = struct.pack("<2sBBIQI", b"UQ", 0, 1, 4, 3, len(segment)) + segment
        assert decode(payload, name="uniform", length=3).tolist() == [0, 0, 0]
