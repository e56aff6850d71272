"""Write vectors.json and the examples of FORMATS.md.

Every implementation must agree on vectors.json. Run `python protos/vectors.py` after a change. fedring's codecs make
the encodings. Digests and the bytes of headers are computed here, from what the documents say.
tests/unit/project/test_vectors.py checks everything again without this code.
"""

import hashlib
import json
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

import secure_vectors
from fedring.codec import BUFFERS, Encoding, Schema, decode, encode, encode_buffers, parse_schema
from fedring.codec.gradient import Part, encode_gradient
from fedring.codec.precision import Precision, to_words
from fedring.server.aggregation.aggregate import next_buffers, next_parameters, whole_numbers
from fedring.server.aggregation.contributions import ClientVector, Contribution, open_vectors
from fedring.server.aggregation.mean import weighted_mean
from fedring.server.state.rows import lay_out
from vector_cases import (
    ABOUT,
    AGGREGATED,
    AGGREGATED_BASE,
    AGGREGATED_SCHEMA,
    CASES,
    DOWNLOADS,
    MODELS,
    OTHER_SPELLINGS,
    SCHEMAS,
    Case,
    Packets,
    refused,
)

ROOT = Path(__file__).parent
TARGET, DOCUMENT = ROOT / "vectors.json", ROOT / "FORMATS.md"
CHOICE = ("packed", "uniform")  # the compressed encodings, for which a writer has a choice
TAKES = {
    "int8": ("chunk",),
    "fp32_sparse": ("keep_ratio",),
    "sq8": ("keep_ratio", "chunk"),
    "packed": ("keep_ratio", "chunk"),
    "uniform": ("chunk", "step"),
}
"""The parameters of each encoding that has parameters."""

_LIST, _LINE = 64, 100  # the longest vector that is written as a list, the longest text that is put on one line
_BLOCK = re.compile(r"^```example\n(.*)\n(?:.*\n)*?```$", re.MULTILINE)

Json = dict[str, Any]


def render() -> Json:
    """Return the content of vectors.json."""
    return {
        "about": ABOUT,
        "protocol": 3,
        "names": [_named(size) for size in (0, 1, 1024, 1025, 102400)],
        "schemas": [_schema(text) for text in SCHEMAS],
        "refused_schemas": [{"shows": shows, "json": text} for shows, text in OTHER_SPELLINGS.items()],
        "models": [_model(*vectors) for vectors in MODELS],
        "updates": list(_updates()),
        "encodings": [_encoding(case) for case in CASES],
        "refused_payloads": [
            {"shows": shows, "encoding": name, "size": 2, "encoded": data.hex(), "reason": reason}
            for shows, name, data, reason in refused()
        ],
        "downloads": [_download(shows, *example) for shows, example in DOWNLOADS.items()],
        "aggregations": [_aggregation()],
        "gradients": [_gradient("fp32"), _gradient("fp16"), _gradient("sign"), _sparse_gradient()],
        "secure": secure_vectors.render(),
    }


def name_of(*parts: bytes) -> str:
    """Return the name of the concatenated parts (FORMATS.md, "Names")."""
    return f"blake3-{blake3(b''.join(parts)).hexdigest()}"


def message(fields: Sequence[tuple[int, int | float | str | bytes]]) -> bytes:
    """Return a protobuf message of (number, value) fields.

    An int is a varint, a float a double, others are bytes.
    """
    out = b""
    for number, value in fields:
        if isinstance(value, int):
            out += _varint(number << 3) + _varint(value)
        elif isinstance(value, float):
            out += _varint(number << 3 | 1) + struct.pack("<d", value)
        else:
            data = value.encode() if isinstance(value, str) else value
            out += _varint(number << 3 | 2) + _varint(len(data)) + data
    return out


def _varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + _varint(value >> 7)


def _named(size: int) -> Json:
    data = bytes(i % 251 for i in range(size))
    return {"shows": f"{size} bytes that count from 0 to 250 repeatedly", "size": size, "name": name_of(data)}


def _schema(text: str) -> Json:
    schema = parse_schema(text.encode())
    return {"json": text, "hash": schema.hash.hex(), "parameters": schema.num_parameters, "buffers": schema.num_buffers}


def _model(parameters: Sequence[float], buffers: Sequence[float]) -> Json:
    data = struct.pack(f"<{len(parameters)}f{len(buffers)}d", *parameters, *buffers)
    return {
        "parameters": list(map(float, parameters)),
        "buffers": list(map(float, buffers)),
        "digest": name_of(data),
        "protocol_1_digest": hashlib.sha256(data).hexdigest(),
    }


def _updates() -> Iterator[Json]:
    """Yield one update, and another with an equivalent header.

    The two headers say the same in different bytes.
    """
    schema = parse_schema(SCHEMAS[0].encode())
    parts = [
        encode(_f32([0.5, -1, 0, 0, 2, 0, 0, 0, 0, 0.25]), Encoding("fp16")),
        encode_buffers(np.array([7], np.float64)),
    ]
    payload, base = b"".join(parts), str(_model([0] * 10, [0])["digest"])
    first = message([(1, 1), (2, 2), (3, "fp16"), (4, len(parts[0])), (5, 40)])
    second = message([(1, 2), (2, 1), (3, BUFFERS), (4, len(parts[1])), (5, 40)])
    metrics = message([(1, "loss"), (2, 0.25)])
    before: list[Any] = [(1, "run-1"), (2, 300), (3, "ward-7"), (5, schema.hash), (6, first), (6, second)]
    after: list[Any] = [(7, len(payload)), (9, 1.5), (10, metrics), (11, base), (12, 2)]
    says = {
        "run_id": "run-1",
        "epoch": 2,
        "round": 300,
        "client_id": "ward-7",
        "base_digest": base,
        "schema_hash": schema.hash.hex(),
        "packets": [
            {"vector": 1, "kind": 2, "encoding": "fp16", "bytes": len(parts[0]), "num_samples": 40},
            {"vector": 2, "kind": 1, "encoding": BUFFERS, "bytes": len(parts[1]), "num_samples": 40},
        ],
        "total_bytes": len(payload),
        "train_seconds": 1.5,
        "metrics": {"loss": 0.25},
    }
    for shows, fields in (
        ("an update", before + after),
        ("the same header in different bytes, which is a different update", after + before),
    ):
        # An update is named by its header's bytes: readers must not serialise it anew.
        header, payload_digest = message(fields), name_of(payload)
        yield {
            "shows": shows,
            "header": header.hex(),
            "header_says": says,
            "payload": payload.hex(),
            "payload_digest": payload_digest,
            "name": name_of(header, payload_digest.encode("ascii")),
        }


def _encoding(case: Case) -> Json:
    vector = _dense(case.values, case.size, np.float64 if case.name == BUFFERS else np.float32)
    chosen = None if case.name == BUFFERS else Encoding(case.name, **case.parameters)
    data = encode_buffers(vector) if chosen is None else encode(vector, chosen)
    return {
        "shows": case.shows,
        "encoding": {"name": case.name, **{key: getattr(chosen, key) for key in TAKES.get(case.name, ())}},
        "values": _stated(vector),
        "exact": case.name not in CHOICE,
        "encoded": data.hex(),
        "decoded": _stated(decode(data, name=case.name, length=vector.size)),
    }


def _dense(values: Sequence[float] | Mapping[int, float], size: int, dtype: type[np.floating[Any]]) -> NDArray[Any]:
    if not isinstance(values, Mapping):
        return np.array(values, dtype)
    vector = np.zeros(size, dtype)
    vector[list(values)] = list(values.values())
    return vector


def _f32(values: Sequence[float]) -> NDArray[np.float32]:
    return np.array(values, np.float32)


def _stated(vector: NDArray[Any]) -> Any:
    """Return the vector as the file writes it."""
    if vector.size <= _LIST:
        return [float(value) for value in vector]
    places = np.flatnonzero(vector).tolist()
    return {"size": vector.size, "entries": [[place, float(vector[place])] for place in places]}


def _written(packets: Packets) -> tuple[list[Json], list[NDArray[Any]]]:
    """Return the packets as the file writes them, and their decoded values."""
    told, values = [], []
    for vector, kind, encoding, given in packets:
        name = encoding.name if encoding else BUFFERS
        data = encode(_f32(given), encoding) if encoding else encode_buffers(np.array(given, np.float64))
        told.append({"vector": vector, "kind": kind, "encoding": name, "encoded": data.hex()})
        values.append(decode(data, name=name, length=len(given)))
    return told, values


def _download(shows: str, parameters: list[float], buffers: list[float], packets: Packets) -> Json:
    told, vectors = _written(packets)
    whole = all(packet["kind"] == "weights" for packet in told)
    base: dict[str, NDArray[Any]] = {"parameters": _f32(parameters), "buffers": np.array(buffers, np.float64)}
    sums: dict[str, NDArray[Any]] = {} if whole else dict(base)
    for packet, values in zip(told, vectors, strict=True):
        vector = packet["vector"]
        sums[vector] = sums[vector] + values if vector in sums else values
    held = None if whole else {vector: _stated(values) for vector, values in base.items()}
    return {"shows": shows, "held": held, "packets": told, "result": _result(sums["parameters"], sums["buffers"])}


def _result(parameters: NDArray[np.float32], buffers: NDArray[np.float64]) -> Json:
    first, second = parameters.astype("<f4").tobytes(), buffers.astype("<f8").tobytes()
    return {
        "parameters": _stated(parameters),
        "parameters_bits": first.hex(),
        "buffers": _stated(buffers),
        "buffers_bits": second.hex(),
        "digest": name_of(first, second),
    }


def _aggregation() -> Json:
    schema = parse_schema(AGGREGATED_SCHEMA)
    base = _f32(AGGREGATED_BASE[0]), np.array(AGGREGATED_BASE[1], np.float64)
    contributions, told = [], []
    for client, (samples, packets) in AGGREGATED.items():
        stated, _ = _written(packets)
        data = b"".join(bytes.fromhex(packet["encoded"]) for packet in stated)
        sizes: list[Any] = [(p["vector"], p["kind"], p["encoding"], len(p["encoded"]) // 2) for p in stated]
        contributions.append(Contribution(client, samples, lay_out(sizes), _reader(data)))
        told.append({"client_id": client, "num_samples": samples, "packets": stated})
    return {
        "shows": "weights, two packets that add up, and a lossy delta; updates are not listed in the order of addition",
        "schema": schema.json.decode(),
        "base": {"parameters": _stated(base[0]), "buffers": _stated(base[1])},
        "updates": told,
        "result": _result(*_mean(schema, contributions, *base)),
    }


def _reader(data: bytes) -> Callable[[int, int], bytes]:
    return lambda offset, size: data[offset : offset + size]


def _mean(
    schema: Schema,
    updates: Sequence[Contribution],
    parameters: NDArray[np.float32],
    buffers: NDArray[np.float64],
) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    first, second = len(parameters), len(buffers)
    delta = _delta(parameters, open_vectors(updates, "parameters", first))
    change = _delta(buffers, open_vectors(updates, "buffers", second))
    whole = whole_numbers(schema, 0, second)
    return next_parameters(parameters, delta), next_buffers(buffers, change, whole)


def _delta(base: NDArray[Any], clients: Sequence[ClientVector]) -> NDArray[np.float64]:
    weights = [client.weight for client in clients]
    return weighted_mean(base, clients, weights, sum(weights), 0)


def _gradient(precision: Precision) -> Json:
    sent, whole = _f32([0, 1, -3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0.25, 0]), _f32([0.5, -0.125])
    places = np.flatnonzero(sent)
    return _gradients(precision, [(sent.size, places, sent[places], precision), (whole.size, None, whole, "fp16")])


def _sparse_gradient() -> Json:
    tensors: list[_Tensor] = [
        (400_000, np.array([9, 60_009, 120_009, 399_999]), _f32([1, -1, 2, 3]), "fp32"),
        (1_000_000, np.arange(6, 1_000_000, 150_001), _f32([1, -2, 3, -4, 5, -6, 7]), "sign"),
        (5, np.empty(0, np.int64), _f32([]), "fp16"),
    ]
    return _gradients("wide gaps, and nothing", tensors)


_Tensor = tuple[int, NDArray[np.int64] | None, NDArray[np.float32], Precision]


def _gradients(shows: str, tensors: Sequence[_Tensor]) -> Json:
    words = [to_words(values, precision) for _, _, values, precision in tensors]
    parts = [Part(places, each) for (_, places, _, _), each in zip(tensors, words, strict=True)]
    return {
        "shows": shows,
        "tensors": [
            {
                "size": size,
                "positions": None if places is None else places.tolist(),
                "precision": precision,
                "values": _stated(values),
                "decoded": _stated(each.values),
            }
            for (size, places, values, precision), each in zip(tensors, words, strict=True)
        ],
        "exact": False,
        "encoded": encode_gradient(parts, sizes=[size for size, _, _, _ in tensors]).hex(),
    }


def dump(value: Any, margin: str = "") -> str:
    """Return JSON for people.

    Short values and lists of numbers are on one line.
    """
    text, inner = json.dumps(value), margin + "  "
    if len(text) <= _LINE or not isinstance(value, dict | list):
        return text
    if isinstance(value, dict):
        rows = [f"{inner}{json.dumps(key)}: {dump(each, inner)}" for key, each in value.items()]
        return "{\n" + ",\n".join(rows) + f"\n{margin}}}"
    if not isinstance(value[0], dict | str):
        return text
    return "[\n" + ",\n".join(inner + dump(each, inner) for each in value) + f"\n{margin}]"


def blocks(vectors: Json) -> dict[str, str]:
    """Return the examples for FORMATS.md by their first line.

    They are as they appear between the fences.
    """
    found = {each["shows"]: _lines(each) for each in vectors["encodings"]}
    for each in vectors["gradients"]:
        found[f"gradient: {each['shows']}"] = f"hex: {_spaced(each['encoded'])}\n"
    schema, model = vectors["schemas"][0], vectors["models"][0]
    found["a schema"] = f"json: {schema['json']}\nhash: {schema['hash']}\n"
    found["a model"] = "".join(f"{key}: {_numbers(value)}\n" for key, value in model.items())
    return found


def _lines(example: Json) -> str:
    name, *parameters = example["encoding"].items()
    lines = [" ".join(["encoding:", name[1], *(f"{key}={value}" for key, value in parameters)])] if parameters else []
    for key in ("values", "decoded"):
        if isinstance(example[key], list):
            lines.append(f"{key}: {_numbers(example[key])}")
    return "\n".join([*lines, f"hex: {_spaced(example['encoded'])}"]) + "\n"


def _numbers(value: Sequence[float] | str) -> str:
    return value if isinstance(value, str) else " ".join(repr(number).removesuffix(".0") for number in value)


def _spaced(digits: str) -> str:
    rows = [digits[start : start + 32] for start in range(0, len(digits), 32)]
    return "\n     ".join(" ".join(re.findall("..", row)) for row in rows)


def with_examples(document: str, vectors: Json) -> str:
    """Return the document with the examples of `vectors`."""
    known = blocks(vectors)
    return _BLOCK.sub(lambda found: f"```example\n{found[1]}\n{known[found[1]]}```", document)


def main() -> None:
    """Write both files."""
    vectors = render()
    TARGET.write_text(dump(vectors) + "\n", encoding="utf-8")
    DOCUMENT.write_text(with_examples(DOCUMENT.read_text(encoding="utf-8"), vectors), encoding="utf-8")


if __name__ == "__main__":
    main()
