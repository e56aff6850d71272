"""Downloads that arrive in any pieces, break at any byte, or are wrong in any byte."""

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedring.codec import Encoding, Schema, Vectors, encode, encode_buffers
from fedring.codec.digest import name_of
from fedring.train.tensors.download import BadModel, Download, HeldModel
from fedring.train.tensors.state import read_vectors, schema_of
from fedring.v1 import federation_pb2 as pb


@cache
def model() -> tuple[Schema, Vectors]:
    """Return a small model with an odd number of parameters, so that its buffers are not aligned in the payload."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4))
    return schema_of(module), read_vectors(module)


def offer(vectors: Vectors, result: Vectors, kind: "pb.Kind.ValueType", encoding: str) -> tuple[pb.ModelHeader, bytes]:
    """Return a header and a payload with `vectors`; a client that decodes them must get `result`."""
    schema, _ = model()
    parts = [encode(vectors.parameters, Encoding(encoding, chunk=8, keep_ratio=1.0)), encode_buffers(vectors.buffers)]
    header = pb.ModelHeader(
        run_id="run",
        version=2,
        schema_hash=schema.hash,
        schema=schema.json,
        packets=[
            pb.Packet(vector=pb.VECTOR_PARAMETERS, kind=kind, encoding=encoding, bytes=len(parts[0])),
            pb.Packet(vector=pb.VECTOR_BUFFERS, kind=kind, encoding="fp64", bytes=len(parts[1])),
        ],
        base_digest=model()[1].digest() if kind == pb.KIND_DELTA else "",
        total_bytes=sum(map(len, parts)),
        payload_name=name_of(*parts),
        model_digest=result.digest(),
    )
    return header, b"".join(parts)


def whole() -> tuple[pb.ModelHeader, bytes]:
    _, vectors = model()
    return offer(vectors, vectors, pb.KIND_WEIGHTS, "fp32")


def step() -> tuple[pb.ModelHeader, bytes]:
    _, base = model()
    change = Vectors(base.parameters * np.float32(0.25), base.buffers * 0.5)
    result = Vectors(base.parameters + change.parameters, base.buffers + change.buffers)
    return offer(change, result, pb.KIND_DELTA, "fp32_sparse")


def download(header: pb.ModelHeader) -> Download:
    schema, base = model()
    return Download(header.model_digest, schema, HeldModel(base.digest(), schema, base))


@pytest.mark.parametrize("make", [whole, step])
@given(cuts=st.lists(st.tuples(st.integers(1, 200), st.booleans())))
def test_the_model_is_the_same_in_whatever_pieces_it_arrives(make, cuts: list[tuple[int, bool]]) -> None:  # type: ignore[no-untyped-def]  # one of two functions
    header, payload = make()
    got = download(header)
    got.begin(header)
    for size, breaks in [*cuts, (len(payload), False)]:
        if breaks:
            assert got.request.offset == got.received
            got.begin(header)  # the stream has broken, and another one resumes
        data = payload[got.received : got.received + size]
        if data:
            got.add(pb.Chunk(offset=got.received, data=data))
    assert got.complete
    assert got.finish().vectors.digest() == header.model_digest


@pytest.mark.parametrize("make", [whole, step])
@given(data=st.data())
def test_a_wrong_byte_is_noticed_or_changes_no_value(make, data: st.DataObject) -> None:  # type: ignore[no-untyped-def]  # one of two functions
    header, payload = make()
    place = data.draw(st.integers(0, len(payload) - 1))
    wrong = bytearray(payload)
    wrong[place] ^= 1 << data.draw(st.integers(0, 7))
    got = download(header)
    got.begin(header)
    got.add(pb.Chunk(offset=0, data=bytes(wrong)))
    try:
        vectors = got.finish().vectors
    except BadModel:
        return
    assert vectors.digest() == header.model_digest  # the byte does not matter, such as the sign of an index of zero


@given(noise=st.binary(max_size=400))
def test_noise_is_never_a_model(noise: bytes) -> None:
    header, payload = whole()
    got = download(header)
    got.begin(header)
    got.add(pb.Chunk(offset=0, data=(noise + bytes(len(payload)))[: len(payload)]))
    with pytest.raises(BadModel):
        got.finish()


@given(st.binary(max_size=300).map(lambda data: _parsed(data)))
def test_any_header_is_either_valid_or_refused(header: pb.ModelHeader) -> None:
    with pytest.raises((BadModel, ValueError)):
        download(whole()[0]).begin(header)


def _parsed(data: bytes) -> pb.ModelHeader:
    """Return `data` as a header if it is one, and otherwise a header with impossible claims."""
    try:
        return pb.ModelHeader.FromString(data)
    except Exception:  # noqa: BLE001  # protobuf's DecodeError, which has no public base
        return pb.ModelHeader(model_digest=whole()[0].model_digest, total_bytes=1 << 60)
