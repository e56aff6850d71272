"""Decoders of bytes that come from a peer."""

import contextlib
import json
import socket
import struct
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import torch
from google.protobuf.message import DecodeError

from fedring.client.policy.ledger import Ledger
from fedring.client.policy.privacy import SitePolicy, refusal
from fedring.client.training.frames import BadPipeMessage, CodePipe, PipeClosed, StandIn, describe, pack, put
from fedring.client.training.personal import personal_of
from fedring.client.transforms.chosen import begin_transforms, unknown_in
from fedring.client.transforms.interface import RoundStart
from fedring.codec import NAMES, CodecError, Encoding, Schema, Vectors, decode, encode, encode_buffers
from fedring.codec.digest import name_of, update_name
from fedring.codec.gradient import Part, decode_gradient, encode_gradient
from fedring.codec.precision import to_words
from fedring.codec.schema import Entry, parse_schema
from fedring.pipeline.errors import PipelineError
from fedring.pipeline.messages import Key, StageMessage, header, parse
from fedring.remote.errors import BadMessage
from fedring.remote.messages import decode as decode_remote
from fedring.remote.messages import encode as encode_remote
from fedring.remote.messages import outgoing
from fedring.ring.errors import BadFrame
from fedring.ring.transport.frames import read as read_frame
from fedring.ring.transport.frames import write as write_frame
from fedring.rpc.errors import FedringError
from fedring.schedules.schedule import Kind
from fedring.secure import SecureError
from fedring.secure.levels import open_blocks
from fedring.secure.roster import check_roster
from fedring.server.update.admission import open_offer
from fedring.train.errors import SeamError, TrainError
from fedring.train.tensors.download import BadModel, Download, HeldModel, OtherSchema
from fedring.v1 import federation_pb2 as pb
from fedring.v1 import peer_pb2
from fedring.v1 import secure_pb2 as wire
from fedring.workers.replica import read_layout
from tests.fuzz.target import Target

DEEP = b"[" * 100_000
"""Lists in each other, as Python's parser of JSON cannot hold them."""

LENGTH = 60
FORMATS = (*NAMES, "fp64")
SIZES = [[60], [8, 1, 300], [], [1_000_000]]
SCHEMA = Schema((Entry("a.weight", (6, 8), "float32", "parameter"), Entry("a.mean", (3,), "float64", "buffer")))
MODEL = Vectors(np.linspace(-1, 1, 48, dtype=np.float32), np.array([1.0, 2.0, 3.0]))
COMMAND = pb.TrainCmd(run_id="run", epoch=1, round=2, deadline_seconds=30, model_digest=MODEL.digest())


def _payload(data: bytes) -> None:
    values = decode(data[1:], name=FORMATS[data[0] % len(FORMATS)], length=LENGTH)
    assert values.shape == (LENGTH,)
    assert np.isfinite(values).all()


def _payloads() -> list[bytes]:
    vector = (np.random.default_rng(0).standard_normal(LENGTH) ** 5).astype(np.float32)
    made = [encode(vector, Encoding(name, chunk=16, keep_ratio=0.4, step=0.1)) for name in NAMES]
    made.append(encode_buffers(vector.astype(np.float64)))
    return [bytes([number]) + payload for number, payload in enumerate(made)]


def _gradients() -> list[bytes]:
    words = to_words(np.arange(5, dtype=np.float32), "fp16")
    sparse = Part(np.array([0, 3, 7, 40, 59]), words)
    return [b"\0" + encode_gradient([sparse], sizes=[60]), b"\2" + encode_gradient([], sizes=[])]


def _frame(data: bytes) -> None:
    read_frame(data)


def _stage(data: bytes) -> None:
    message = parse(data[:128].ljust(128, b"\0"), max_bytes=1 << 20)
    assert message.nbytes <= 1 << 20


def _remote(data: bytes) -> None:
    message = decode_remote(data, max_bytes=1 << 16)
    assert sum(tensor.nbytes for tensor in message.tensors) <= 1 << 16


def _job_code(data: bytes) -> None:
    """Let the process of a job's code describe a model and send its tensors, and end."""
    ours, theirs = socket.socketpair()
    with theirs, ours:
        theirs.sendall(data[: 64 << 10])  # that much fits into the buffer of the pair
        theirs.shutdown(socket.SHUT_WR)
        told, values = CodePipe(ours).receive(1 << 16)
    assert len(values) <= 1 << 16
    put(values, {"a": torch.zeros(2, 3)})
    StandIn(told.get("tensors"), values)


def _job_codes() -> list[bytes]:
    model = torch.nn.ParameterDict({"a": torch.zeros(2, 3)})
    values = pack({"a": model["a"]})
    text = json.dumps({"tensors": describe(model), "train": 3, "test": None}).encode()
    return [struct.pack("<QQ", len(text), len(values)) + text + values]


def _download(data: bytes) -> None:
    """Offer a header, then the payload, in two pieces."""
    (length,) = struct.unpack("<H", data[:2].ljust(2, b"\0"))
    offered, payload = pb.ModelHeader.FromString(data[2 : 2 + length]), data[2 + length :]
    if offered.total_bytes > 1 << 20:  # the bound of a client is that of the model, which is smaller here
        return
    got = Download(MODEL.digest(), SCHEMA, HeldModel(MODEL.digest(), SCHEMA, MODEL))
    got.begin(offered)
    half = len(payload) // 2
    for at, part in ((0, payload[:half]), (half, payload[half:])):
        got.add(pb.Chunk(offset=at, data=part))
    if got.complete:
        assert got.finish().vectors.digest() == MODEL.digest()


def _downloads() -> list[bytes]:
    parts = [encode(MODEL.parameters, Encoding("fp32")), encode_buffers(MODEL.buffers)]
    offered = pb.ModelHeader(
        run_id="run",
        version=2,
        schema_hash=SCHEMA.hash,
        schema=SCHEMA.json,
        packets=[
            pb.Packet(vector=pb.VECTOR_PARAMETERS, kind=pb.KIND_WEIGHTS, encoding="fp32", bytes=len(parts[0])),
            pb.Packet(vector=pb.VECTOR_BUFFERS, kind=pb.KIND_WEIGHTS, encoding="fp64", bytes=len(parts[1])),
        ],
        total_bytes=sum(map(len, parts)),
        payload_name=name_of(*parts),
        model_digest=MODEL.digest(),
    ).SerializeToString()
    return [struct.pack("<H", len(offered)) + offered + b"".join(parts)]


def update_offers() -> list[bytes]:
    said = pb.UpdateHeader(run_id="run", epoch=1, round=2, client_id="c", base_digest=MODEL.digest(), total_bytes=9)
    digest = name_of(b"a payload")
    offer = pb.UpdateOffer(header=said.SerializeToString(), payload_digest=digest)
    offer.name = update_name(offer.header, digest)
    return [offer.SerializeToString()]


@cache
def _unspent() -> Ledger:
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        return Ledger(Path(folder))  # it is only read


def _start(command: pb.TrainCmd) -> RoundStart:
    return RoundStart(command, HeldModel(MODEL.digest(), SCHEMA, MODEL), lambda digest: MODEL.parameters)


def _command(data: bytes) -> None:
    """Read a command as a client does before it trains."""
    command = pb.TrainCmd.FromString(data)
    refusal(SitePolicy.model_validate({}), _unspent(), command)
    if not unknown_in(command.job):
        with contextlib.suppress(ValueError):  # of arguments: the client tells the server
            begin_transforms(_start(command), {})
    if command.job.personal:
        personal_of(command.job)
    if command.HasField("secure"):
        open_blocks(command.secure, LENGTH)


def _commands() -> list[bytes]:
    full = pb.TrainCmd()
    full.CopyFrom(COMMAND)
    full.job.mode = "federated"
    full.job.transforms = '[{"name": "feddyn", "args": {"alpha": 0.1}}]'
    full.job.dp = '{"noise_multiplier": 1.0, "clip": 0.5, "adaptive": false}'
    full.job.sample_dp = '{"noise_multiplier": 1.0, "clip": 1.0}'
    full.job.personal = "{}"
    full.secure.max_weight = 20
    full.secure.scales = struct.pack("<f", 0.5)
    found = [COMMAND.SerializeToString(), full.SerializeToString()]
    nameless = pb.TrainCmd()
    nameless.CopyFrom(full)
    nameless.job.transforms = '[{"name":"", "args":{"":1}}]'
    found.append(nameless.SerializeToString())
    for key in ("transforms", "dp", "sample_dp", "personal"):
        deep = pb.TrainCmd()
        deep.CopyFrom(full)
        setattr(deep.job, key, DEEP.decode())
        found.append(deep.SerializeToString())
    return found


def _layout(data: bytes) -> None:
    parameters = [torch.zeros(2, 3), torch.zeros(())]
    _, states, _ = read_layout(data.decode("utf-8", "replace"), parameters)
    assert sum(value.numel() for state in states for value in state.values() if isinstance(value, torch.Tensor)) <= 208


def _roster(data: bytes) -> None:
    check_roster(wire.SecureRoster.FromString(data), COMMAND, lambda name, proof: None)


def _rosters() -> list[bytes]:
    statement = wire.KeyStatement(
        context="c", run_id="run", epoch=1, round=2, client_id="a", task=bytes(32), sealing_key=bytes(32),
        masking_key=bytes(31) + b"x", own_mask=bytes(32),
    )  # fmt: skip
    signed = wire.SignedKeys(statement=statement.SerializeToString(), signature=bytes(64), public_key=bytes(44))
    return [wire.SecureRoster(members=[signed] * 3).SerializeToString()]


@cache
def wire_targets() -> dict[str, Target]:
    """Return the targets by name."""
    head = peer_pb2.Head(kind=peer_pb2.FRAME_KIND_DATA, sequence=7, group=9, generation=3, key="17/0.1", part=1)
    stage = header(StageMessage(Key(1, Kind.FORWARD, 0, 2), 3, torch.zeros(2, 3)))
    remote = outgoing({"f": [1, "x"]}, [torch.ones(3), torch.zeros(2, dtype=torch.int64)])
    refused = (FedringError, DecodeError)
    return {
        "payload": Target(_payload, _payloads(), (CodecError, IndexError)),
        "schema": Target(parse_schema, [SCHEMA.json, DEEP], (CodecError,)),
        "gradient": Target(
            lambda data: decode_gradient(data[1:], sizes=SIZES[data[0] % len(SIZES)]),
            _gradients(),
            (CodecError, IndexError),
        ),
        "frame": Target(_frame, [write_frame(head, b"sixteen bytes...", checksum=True)], (BadFrame,)),
        "stage message": Target(_stage, [stage], (PipelineError,)),
        "remote message": Target(_remote, [encode_remote(remote)], (BadMessage,)),
        "job code": Target(_job_code, _job_codes(), (BadPipeMessage, PipeClosed, TrainError)),
        "download": Target(_download, _downloads(), (BadModel, OtherSchema, DecodeError)),
        "update offer": Target(
            lambda data: open_offer(pb.UpdateOffer.FromString(data)), update_offers(), refused, pb.UpdateOffer
        ),
        "command": Target(_command, _commands(), (SeamError, SecureError, DecodeError), pb.TrainCmd),
        "optimizer layout": Target(
            _layout,
            [
                b'[{"step": {"shape": [], "dtype": "float32", "cpu": true}, "a": {"value": 1}}, {}]',
                b'[{}, {}, {"tensors": [{"seen": {"shape": [2], "dtype": "float32", "cpu": true}}]}]',
                DEEP,
            ],
            (TrainError,),
        ),
        "roster": Target(_roster, _rosters(), (SecureError, DecodeError), wire.SecureRoster),
    }
