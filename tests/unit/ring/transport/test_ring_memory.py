"""Payloads in memory that two ranks of one host map."""

import gc
import os
import random
import tempfile

import numpy as np
import pytest
import torch

from fedring.ring.engine.collectives import allreduce
from fedring.ring.engine.endpoint import Endpoint
from fedring.ring.engine.reduction import Reduction
from fedring.ring.errors import BadFrame
from fedring.ring.options import RingOptions
from fedring.ring.transport.frames import MAX_PAYLOAD
from fedring.ring.transport.memory import Inbox, Outbox


def test_a_payload_that_is_put_is_what_the_receiver_gets() -> None:
    outbox = Outbox()
    inbox = Inbox(outbox.name)
    payloads = [random.randbytes(size) for size in (1, 40_000, MAX_PAYLOAD)]
    slots = [outbox.put(payload) for payload in payloads]
    assert slots == [0, 1, 2]
    for slot, payload in enumerate(payloads):
        assert bytes(inbox.get(slot, len(payload))) == payload


def test_a_slot_is_free_again_once_nothing_refers_to_its_payload() -> None:
    outbox = Outbox()
    inbox = Inbox(outbox.name)
    taken = []
    while (slot := outbox.put(b"x" * 100)) is not None:
        taken.append(inbox.get(slot, 100))
    assert len(taken) > 1
    part = np.frombuffer(taken[0], np.uint8)[10:20]
    taken[0] = memoryview(b"")
    gc.collect()
    assert outbox.put(b"y") is None, "an array still refers to the payload"
    assert bytes(part) == b"x" * 10
    del part
    gc.collect()
    assert outbox.put(b"y") == 0


def test_a_receiver_cannot_write() -> None:
    outbox = Outbox()
    inbox = Inbox(outbox.name)
    assert outbox.put(b"abc") == 0
    assert inbox.get(0, 3).readonly


@pytest.mark.parametrize(("slot", "length"), [(0, 0), (0, MAX_PAYLOAD + 1), (1000, 1)])
def test_a_slot_or_length_that_cannot_be_is_refused(slot: int, length: int) -> None:
    outbox = Outbox()
    with pytest.raises(BadFrame):
        Inbox(outbox.name).get(slot, length)


@pytest.mark.parametrize("name", ["", ":", "1", "a:b", "-1:2", "1:2:3", "../etc:1", "1:/etc/passwd"])
def test_what_is_no_name_of_shared_memory_is_refused(name: str) -> None:
    with pytest.raises(BadFrame):
        Inbox(name)


def test_a_file_that_is_no_outbox_is_never_opened() -> None:
    with tempfile.TemporaryFile() as file, pytest.raises(BadFrame):
        Inbox(f"{os.getpid()}:{file.fileno()}")


def test_memory_that_could_shrink_is_refused() -> None:
    file = os.memfd_create("fedring-ring", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, 4096 + 8 * MAX_PAYLOAD)
        with pytest.raises(BadFrame):
            Inbox(f"{os.getpid()}:{file}")
    finally:
        os.close(file)


@pytest.mark.parametrize("shared", [True, False])
def test_large_payloads_take_the_memory_if_the_option_allows(shared: bool) -> None:
    options = RingOptions(local_transport=shared)
    endpoints = [Endpoint(options) for _ in range(2)]
    try:
        members = [endpoint.address for endpoint in endpoints]
        groups = [endpoint.group("g", rank=rank, members=members) for rank, endpoint in enumerate(endpoints)]
        for endpoint, group in zip(endpoints, groups, strict=True):
            endpoint.wait_until_matched(group, timeout=60)
        tensors = [torch.full((1 << 20,), float(rank + 1)) for rank in range(2)]
        for _ in range(3):  # the first may begin before the peers have mapped the memory
            operations = [
                group.start(
                    "allreduce",
                    allreduce(rank, 2, tensors[rank].view(torch.uint8).numpy().data, Reduction("sum", torch.float32)),
                    timeout=60,
                )
                for rank, group in enumerate(groups)
            ]
            assert all(operation.wait(60) for operation in operations)
        assert torch.equal(tensors[0], torch.full((1 << 20,), 12.0))
        assert torch.equal(tensors[0], tensors[1])
        assert all((endpoint.traffic.shared_bytes > 0) == shared for endpoint in endpoints)
        if shared:
            assert all(endpoint.traffic.sent_bytes < 3 * tensors[0].nbytes for endpoint in endpoints)
    finally:
        for endpoint in endpoints:
            endpoint.close()
