"""What a task makes of its command: its seed, and its update."""

from typing import Any

import numpy as np
import pytest
from torch import nn

from fedring.client.round_plan import own_seed
from fedring.client.transfer.update import TrainingReport, Update, make_update
from fedring.codec import Encoding, Vectors, decode, encode
from fedring.codec.digest import name_of, update_name
from fedring.train.tensors.download import HeldModel
from fedring.train.tensors.state import schema_of
from fedring.v1 import federation_pb2 as pb

SCHEMA = schema_of(nn.BatchNorm1d(4))
START = Vectors(np.arange(8, dtype=np.float32), np.arange(SCHEMA.num_buffers, dtype=np.float64))


def test_each_client_has_its_own_seed_which_is_always_the_same() -> None:
    assert own_seed(1, "a") == own_seed(1, "a")
    assert len({own_seed(seed, client) for seed in (1, 2) for client in ("a", "b")}) == 4
    assert 0 <= own_seed(2**63, "a") < 2**63


def update(encoding: str = "fp32", **work: Any) -> Update:
    """Return the update of a client whose training has added 0.5 to every parameter."""
    command = pb.TrainCmd(
        run_id="run",
        epoch=3,
        round=7,
        model_version=5,
        model_digest=START.digest(),
        schema_hash=SCHEMA.hash,
        encoding=pb.Encoding(name=encoding, keep_ratio=0.25),
    )
    base = HeldModel(START.digest(), SCHEMA, START)
    trained = Vectors(START.parameters + np.float32(0.5), START.buffers + 1)
    return make_update(command, "alice", base, trained, TrainingReport(samples=12, **work), None)


@pytest.mark.parametrize("encoding", ["fp32", "fp32_sparse", "int8"])
def test_an_offer_names_the_payload_and_the_update_by_their_digests(encoding: str) -> None:
    made = update(encoding)
    assert made.offer.payload_digest == name_of(b"".join(made.parts))
    assert made.offer.name == update_name(made.offer.header, made.offer.payload_digest)
    again, another = update(encoding), update(encoding, train_seconds=2.0)
    assert again.offer == made.offer
    assert another.offer.payload_digest == made.offer.payload_digest
    assert another.offer.name != made.offer.name


def test_a_header_repeats_the_command_and_names_the_model_that_was_trained() -> None:
    made = update(metrics={"loss": 0.5})
    header = pb.UpdateHeader.FromString(made.offer.header)
    assert (header.run_id, header.epoch, header.round, header.client_id) == ("run", 3, 7, "alice")
    assert (header.base_digest, header.schema_hash) == (START.digest(), SCHEMA.hash)
    assert (header.total_bytes, dict(header.metrics)) == (sum(map(len, made.parts)), {"loss": 0.5})
    payload = b"".join(made.parts)
    sent = decode(payload[: header.packets[0].bytes], name="fp32", length=8)
    np.testing.assert_array_equal(sent, np.full(8, 0.5, np.float32))
    assert payload[: header.packets[0].bytes] == encode(sent.astype(np.float32), Encoding("fp32"))
