"""Model versions: how they are made, and how they are downloaded: in full, or as the deltas that lead to them."""

import hashlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.closed_rounds import next_model
from tests.unit import host as hosts

from fedring.codec import Encoding, Vectors, decode, encode
from fedring.codec.digest import name_of
from fedring.rpc.errors import BadRequest, UnknownModel
from fedring.server.aggregation.aggregate import store_model
from fedring.server.aggregation.modelfile import ModelReader
from fedring.server.aggregation.versions import ModelVersions
from fedring.server.config import ServerConfig
from fedring.server.model.downloads import MAX_DELTAS, MAX_RANGES
from fedring.server.model.models import Models
from fedring.server.recovery import reload
from fedring.server.state.blobs import FileBlobs
from fedring.server.state.facts import Facts
from fedring.server.state.failures import DamagedModel
from fedring.server.state.rows import ModelRow, UpdateRow, lay_out
from fedring.server.state.sql.store import Store
from fedring.train.errors import SeamError
from fedring.train.jobs.job import Job
from fedring.train.models import digits_mlp, vector
from fedring.train.tensors.files import load_model
from fedring.train.tensors.state import read_vectors, schema_of
from fedring.v1 import federation_pb2 as pb

SIZE = 5000


def spec(**keys: Any) -> Job:
    fixed = {"model": "fedring.train.models:vector", "model_args": {"size": SIZE}, "download_encoding": "uniform"}
    return Job.model_validate({**fixed, **keys})


class Line:
    """Models that follow each other, each from one update."""

    def __init__(self, root: Path, **settings: Any) -> None:
        self.root, self.blobs = root, FileBlobs(root)
        self.facts = Facts(Store("sqlite://"), self.blobs, threads=1)
        self.models = Models(
            self.blobs, self.facts.pool, ServerConfig.model_validate({"state_dir": root, **settings}), "run-1"
        )
        self.rows: list[ModelRow] = []
        self._random = np.random.default_rng(3)

    def first(self, job: Job) -> ModelRow:
        """Return the model that a job starts from."""
        row = self.models.maker.first(job, len(self.rows) + 1)
        self.models.versions.remember(row)
        self.rows.append(row)
        return row

    def next(self, job: Job) -> ModelRow:
        """Make one more version."""
        values = self._random.standard_normal(SIZE).astype(np.float32)
        partial = self.blobs.open_partial("update")
        partial.write(encode(values, Encoding("fp32")))
        packets = lay_out([("parameters", "delta", "fp32", partial.size)])
        name, size = name_of(b"an update"), partial.size
        update = UpdateRow(1, "a", partial.digest, name, packets, 1, size, 0.1, 1.0, 2.0, blob=partial.digest)
        self.blobs.seal_many([partial])[0]
        row = next_model(self.models.maker, self.rows[-1], [update], job, len(self.rows), len(self.rows) + 1)
        self.models.versions.remember(row)
        self.rows.append(row)
        return row

    def digest(self, version: int) -> str:
        """Return the digest of a version: none for 0, that of something else for a version that does not exist."""
        if not version:
            return ""
        return self.rows[version - 1].digest if version <= len(self.rows) else name_of(b"something else")

    def request(self, version: int = 0, held: int = 0) -> pb.FetchModelRequest:
        return pb.FetchModelRequest(digest=self.digest(version), held_digest=self.digest(held))

    def header(self, version: int = 0, held: int = 0) -> pb.ModelHeader:
        with self.models.downloads.open(self.request(version, held)) as download:
            assert download.header.version == version or not version
            assert download.header.total_bytes == sum(packet.bytes for packet in download.header.packets)
            return download.header

    def values(self, row: ModelRow) -> Vectors:
        with self.blobs.reader(row.blob) as blob:
            return ModelReader(blob).vectors()


@pytest.fixture
def line(tmp_path: Path) -> Iterator[Line]:
    line = Line(tmp_path)
    yield line
    line.facts.close()


@pytest.fixture
def chain(line: Line) -> Line:
    """Versions 1 to 10, each with the delta that leads to it."""
    line.first(spec())
    for _ in range(9):
        line.next(spec())
    return line


def test_a_client_with_an_older_version_gets_the_deltas_from_it(chain: Line) -> None:
    whole = chain.header(10).total_bytes
    for held in (9, 8, 10 - 5):
        header = chain.header(10, held)
        assert header.base_digest == chain.digest(held)
        assert len(header.packets) == 10 - held
        assert header.total_bytes < whole


def test_the_deltas_lead_to_exactly_that_model(chain: Line) -> None:
    values = chain.values(chain.rows[6]).parameters
    with chain.models.downloads.open(chain.request(10, 7)) as download:
        at = 0
        for packet in download.header.packets:
            step = decode(download.read(at, packet.bytes), name=packet.encoding, length=SIZE)
            values = values + step.astype(np.float32)
            at += packet.bytes
        digest = Vectors(values, np.empty(0)).digest()
        assert digest == download.header.model_digest


def test_any_range_of_a_download_can_be_read(chain: Line) -> None:
    for held in (0, 6):
        with chain.models.downloads.open(chain.request(9, held)) as download:
            total = download.header.total_bytes
            payload = download.read(0, total)
            assert len(payload) == total
            pieces = [download.read(start, min(777, total - start)) for start in range(0, total, 777)]
            assert b"".join(pieces) == payload


@pytest.mark.parametrize("held", [0, 10, 11, 777])
def test_a_client_without_a_useful_version_gets_the_model_in_full(chain: Line, held: int) -> None:
    header = chain.header(10, held)
    assert header.base_digest == ""
    assert [packet.kind for packet in header.packets] == [pb.KIND_WEIGHTS]


def test_more_deltas_than_fit_into_one_download_are_not_sent(chain: Line) -> None:
    assert chain.header(MAX_DELTAS + 1, 1).base_digest == chain.digest(1)
    assert chain.header(MAX_DELTAS + 2, 1).base_digest == ""


def test_deltas_that_are_longer_than_the_model_are_not_sent(line: Line) -> None:
    dense = spec(download_encoding="fp16")
    line.first(dense)
    for _ in range(3):
        line.next(dense)
    assert line.header(4, 3).base_digest == line.digest(3)
    assert line.header(4, 1).base_digest == ""


def test_deltas_across_a_version_that_is_not_kept_are_not_sent(chain: Line) -> None:
    chain.models.versions.forget([7, 8, 10])
    assert chain.header(8, 7).base_digest == chain.digest(7)
    assert chain.header(10, 8).base_digest == ""
    with pytest.raises(UnknownModel, match=f"model {chain.digest(9)} is not kept: `flctl models list` shows"):
        chain.header(9)
    with pytest.raises(UnknownModel, match="model 9 is not kept: `flctl models list` shows"):
        chain.models.downloads.open(pb.FetchModelRequest(version=9))


def test_the_newest_version_is_sent_if_none_is_named(chain: Line) -> None:
    assert chain.header().version == 10


def test_a_version_is_found_by_its_number_and_a_digest_overrules_it(chain: Line) -> None:
    for request in (pb.FetchModelRequest(version=4), pb.FetchModelRequest(version=9, digest=chain.digest(4))):
        with chain.models.downloads.open(request) as download:
            assert (download.header.version, download.header.model_digest) == (4, chain.digest(4))
    with pytest.raises(UnknownModel):
        chain.models.downloads.open(pb.FetchModelRequest(version=9, digest=name_of(b"something else")))


def test_a_payload_is_named_by_the_model_and_by_its_base(chain: Line) -> None:
    names = [chain.header(10).payload_name, chain.header(10, 9).payload_name, chain.header(9, 8).payload_name]
    assert len(set(names)) == 3
    assert [chain.header(10).payload_name, chain.header(10, 9).payload_name] == names[:2]


def test_there_is_no_model_before_the_first_job(line: Line) -> None:
    with pytest.raises(UnknownModel, match="there is no model yet"):
        line.header()


def test_another_kind_of_model_begins_a_new_line_of_versions(chain: Line) -> None:
    other = chain.first(spec(model_args={"size": 7}))
    assert (other.version, other.base_version, other.base_digest, other.parameters) == (11, 0, "", 7)
    assert chain.header(11, 10).base_digest == ""
    assert chain.header(10, 9).base_digest == chain.digest(9)  # the old one is still available


@pytest.mark.parametrize("kind", ["safetensors", "state dict"])
def test_given_weights_are_the_first_model_of_each_job_that_starts_fresh(tmp_path: Path, kind: str) -> None:
    given = digits_mlp(8)
    path = tmp_path / "init"
    save_file(given.state_dict(), path) if kind == "safetensors" else torch.save(given.state_dict(), path)
    line = Line(tmp_path, init_path=path)
    row = line.first(spec(model="fedring.train.models:digits_mlp", model_args={"hidden": 8}))
    np.testing.assert_array_equal(line.values(row).parameters, read_vectors(given).parameters)
    again = line.first(spec(model="fedring.train.models:digits_mlp", model_args={"hidden": 8}, seed=3))
    assert (again.version, again.digest) == (2, row.digest)  # whatever the seed, and in a store that is used, too
    line.facts.close()


def test_given_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    torch.save(vector(3).state_dict(), tmp_path / "init.pt")
    line = Line(tmp_path, init_path=tmp_path / "init.pt")
    with pytest.raises(SeamError, match=r"init\.pt does not fit the model: values is \[3\] in the file and \[5000\]"):
        line.first(spec())
    line.facts.close()


def as_protocol_1(line: Line, row: ModelRow) -> ModelRow:
    """Return the model as a server of protocol 1 kept it: named by SHA-256, as is its file."""
    folder = line.root / "blobs"
    values = line.values(row)
    blob = hashlib.sha256((folder / row.blob).read_bytes()).hexdigest()
    (folder / row.blob).rename(folder / blob)
    digest = hashlib.sha256(values.parameters.tobytes() + values.buffers.tobytes()).hexdigest()
    return replace(row, digest=digest, blob=blob)


def test_a_model_that_is_named_by_sha256_is_sent_and_continued(line: Line) -> None:
    old = as_protocol_1(line, line.first(spec()))
    line.models.versions.remember(old)
    line.rows[0] = old
    with line.models.downloads.open(line.request(1)) as download:
        assert download.header.model_digest == old.digest
        download.read(0, download.header.total_bytes)
        download.check()
    new = line.next(spec())
    assert new.digest == line.values(new).digest()  # by BLAKE3
    assert (new.base_version, new.base_digest) == (1, old.digest)
    assert line.header(2, 1).base_digest == old.digest
    path = line.root / "blobs" / old.blob
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with line.models.downloads.open(line.request(1)) as download:
        download.read(0, download.header.total_bytes)
        with pytest.raises(DamagedModel, match="model 1 is damaged"):
            download.check()
    assert line.models.versions.damaged([old, new]) == [old]


def test_a_version_in_a_file_that_is_named_by_sha256_is_loaded_and_checked(line: Line, tmp_path: Path) -> None:
    old = as_protocol_1(line, line.first(spec()))
    store = Store(f"sqlite:///{tmp_path / 'facts.sqlite'}")
    store.models.publish(old)
    loaded = load_model(1, vector(SIZE), state_dir=tmp_path)
    np.testing.assert_array_equal(read_vectors(loaded).parameters, line.values(old).parameters)
    path = tmp_path / "blobs" / old.blob
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(SeamError, match="is damaged"):
        load_model(1, vector(SIZE), state_dir=tmp_path)
    store.close()


def test_a_version_is_loaded_from_the_servers_state(tmp_path: Path) -> None:
    store, blobs = Store(f"sqlite:///{tmp_path / 'facts.sqlite'}"), FileBlobs(tmp_path)
    for version in (1, 2):
        given = vector(SIZE)
        with torch.no_grad():
            next(given.parameters()).fill_(version)
        new = store_model(schema_of(given), read_vectors(given), blobs, {})
        store.models.publish(
            ModelRow(version, 0, new.digest, new.blob, schema_of(given).hash.hex(), SIZE, new.bytes, 0.0)
        )
    for wanted, version in ((1, 1), (2, 2), (0, 2)):
        loaded = load_model(wanted, vector(SIZE), state_dir=tmp_path)  # the store is still open
        assert read_vectors(loaded).parameters.tolist() == [version] * SIZE
    with pytest.raises(SeamError, match="keeps no model 3"):
        load_model(3, vector(SIZE), state_dir=tmp_path)
    with pytest.raises(SeamError, match="is not the state folder"):
        load_model(1, vector(SIZE), state_dir=tmp_path / "blobs")
    store.close()
    blobs.close()


def test_the_blob_of_a_version_is_a_model_file_that_people_can_load(chain: Line, tmp_path: Path) -> None:
    with chain.blobs.reader(chain.rows[-1].blob) as blob:
        path = tmp_path / "model.safetensors"
        path.write_bytes(blob.read(0, blob.size))
    loaded = read_vectors(load_model(path, vector(SIZE)))
    np.testing.assert_array_equal(loaded.parameters, chain.values(chain.rows[-1]).parameters)


def test_some_values_of_a_model_can_be_fetched(tmp_path: Path) -> None:
    line = Line(tmp_path)
    row = line.first(spec(download_encoding="full"))
    values = ModelReader(line.blobs.reader(row.blob)).vectors().parameters
    wanted = [pb.ValueRange(vector=pb.VECTOR_PARAMETERS, start=start, count=7) for start in (3, SIZE - 7)]
    with line.models.downloads.open(pb.FetchModelRequest(digest=row.digest, ranges=wanted)) as download:
        header = download.header
        payload = download.read(0, header.total_bytes)
    expected = np.concatenate([values[3:10], values[-7:]]).astype("<f4").tobytes()
    assert (payload, header.payload_name, list(header.ranges)) == (expected, name_of(expected), wanted)
    assert (header.model_digest, len(header.packets), header.total_bytes) == (row.digest, 0, 56)


@pytest.mark.parametrize(
    "ranges",
    [
        [(pb.VECTOR_UNSPECIFIED, 0, 1)],
        [(pb.VECTOR_PARAMETERS, 0, 0)],
        [(pb.VECTOR_PARAMETERS, 0, SIZE + 1)],
        [(pb.VECTOR_PARAMETERS, 2**64 - 1, 2**64 - 1)],
        [(pb.VECTOR_BUFFERS, 0, 1)],
        [(pb.VECTOR_PARAMETERS, 5, 2), (pb.VECTOR_PARAMETERS, 6, 2)],
        [(pb.VECTOR_PARAMETERS, 5, 2), (pb.VECTOR_PARAMETERS, 0, 2)],
        [(pb.VECTOR_PARAMETERS, start, 1) for start in range(MAX_RANGES + 1)],
    ],
)
def test_ranges_that_a_model_does_not_have_are_refused(tmp_path: Path, ranges: list[tuple[Any, int, int]]) -> None:
    line = Line(tmp_path)
    row = line.first(spec(download_encoding="full"))
    wanted = [pb.ValueRange(vector=vector, start=start, count=count) for vector, start, count in ranges]
    with pytest.raises(BadRequest) as caught:
        line.models.downloads.open(pb.FetchModelRequest(digest=row.digest, ranges=wanted))
    assert caught.value.reason == "bad_ranges"


def test_no_values_of_a_damaged_model_are_sent(tmp_path: Path) -> None:
    line = Line(tmp_path)
    row = line.first(spec(download_encoding="full"))
    path = tmp_path / "blobs" / row.blob
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    wanted = [pb.ValueRange(vector=pb.VECTOR_PARAMETERS, count=1)]  # not the value that is damaged
    with pytest.raises(DamagedModel):
        line.models.downloads.open(pb.FetchModelRequest(digest=row.digest, ranges=wanted))


def test_a_first_model_can_be_made_one_module_after_the_other(tmp_path: Path) -> None:
    line = Line(tmp_path)
    keys = {"model": "fedring.train.models:digits_mlp", "model_args": {"hidden": 8}, "download_encoding": "full"}
    job = spec(mode="pipeline", pipeline={"first_model": "by_module"}, **keys)
    rows = [line.first(job) for _ in range(2)]
    assert rows[0].digest == rows[1].digest
    reader = ModelReader(line.blobs.reader(rows[0].blob))
    assert reader.schema == schema_of(digits_mlp(8)) == line.models.maker.job_models.schema_of(job)
    assert 0 < np.abs(reader.vectors().parameters).max() <= 1 / np.sqrt(8)
    other = spec(mode="pipeline", pipeline={"first_model": "by_module"}, download_encoding="full")
    with pytest.raises(SeamError, match="has no reset_parameters"):
        line.models.maker.job_models.schema_of(other)


async def test_a_start_opens_the_kept_models_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hosts.running(tmp_path) as host:
        session = host.join("a")
        await host.jobs.start(hosts.spec(), "")
        await host.command(session)
    opened_by, remember = list[int](), ModelVersions.remember

    def noted(versions: ModelVersions, row: ModelRow) -> None:
        opened_by.append(threading.get_ident())
        remember(versions, row)

    monkeypatch.setattr(ModelVersions, "remember", noted)
    host = hosts.Host(tmp_path)
    await reload(host.parts)
    host.facts.close()
    assert opened_by
    assert threading.get_ident() not in opened_by
