"""The descriptors of a server: enough for files first, and a sentence where they do not suffice for all clients."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedring.daemon.checks import Level
from fedring.daemon.descriptors import raise_limit
from fedring.server.config import ServerConfig
from fedring.server.guard.descriptors import check_descriptors, shares, wanted
from fedring.server.state.blobs import FileBlobs
from fedring.server.state.failures import StorageFailed


@pytest.fixture
def _limit_restored() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("_limit_restored")
def test_the_soft_limit_is_raised_as_far_as_is_wanted_and_allowed_and_never_lowered() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 10, hard))
    assert raise_limit(soft - 5) == soft - 5 == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert raise_limit(soft - 8) == soft - 5
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 5, soft))
    assert raise_limit(soft + 5) == soft == resource.getrlimit(resource.RLIMIT_NOFILE)[0]


@pytest.mark.parametrize("limit", [64, 256, 1024, 4096, 1 << 20])
def test_files_have_at_least_half_of_a_small_limit_and_no_more_than_the_limit_is_given_away(limit: int) -> None:
    config = ServerConfig.model_validate({})
    parts = shares(config, limit)
    assert parts.total <= limit
    assert parts.files >= min(limit // 2, wanted(config).files)
    assert parts.public > parts.control > 0


def test_a_limit_that_cannot_hold_all_clients_is_told_with_the_numbers() -> None:
    (check,) = check_descriptors(ServerConfig.model_validate({}), 1024)
    assert check.level is Level.WARN
    assert "may open 1024" in check.found
    assert "max_clients = 1000" in check.found
    assert "LimitNOFILE" in check.advice
    assert not [*check_descriptors(ServerConfig.model_validate({}), 4096)]
    assert not [*check_descriptors(ServerConfig.model_validate({"max_clients": 100}), 1024)]


@pytest.mark.usefixtures("_limit_restored")
def test_no_descriptor_for_a_file_is_a_refusal_that_passes(tmp_path: Path) -> None:
    blobs = FileBlobs(tmp_path)
    lowest = os.dup(0)  # the first that is free
    os.close(lowest)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        with pytest.raises(StorageFailed) as failed:
            blobs.open_partial("a")
        with pytest.raises(StorageFailed):
            blobs.probe(1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert failed.value.reason == "too_many_files"
    blobs.open_partial("a").close()
    blobs.close()
