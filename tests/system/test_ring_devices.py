"""A module that spans two devices trains with DistributedDataParallel over the ring as it does on the host.

The devices are two of one invented type, which a C++ extension adds to torch. They have indices, allocators, and
dispatch of their own, as GPUs have; but they have no streams, and the CPU computes for them.
"""

import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.system.ring_scripts import ranks
from tests.system.ring_scripts.twin import build, compare

SAME = ["", "none", "fp16", "bf16", "int8", "topk", "dgc"]
OWN_BUCKETS = ["powersgd", "batched_powersgd"]  # a device has buckets of its own, and so other random matrices


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the device."""
    if not shutil.which("c++") or not shutil.which("ninja"):
        pytest.skip("there is no c++ or no ninja to compile a device with")
    return build(tmp_path_factory.mktemp("twin"))


@pytest.mark.soak
def test_a_module_on_two_devices_trains_as_on_the_host_with_every_hook(library: Path, tmp_path: Path) -> None:
    body = partial(compare, library=library, store=tmp_path / "meet", backend="fedring", hooks=SAME + OWN_BUCKETS)
    first, second = ranks.run(body, 2, tmp_path, backend="")
    assert first == second
    for hook in SAME:
        host, devices = first[hook]
        torch.testing.assert_close(devices, host, rtol=0, atol=0)
    for hook in OWN_BUCKETS:
        host, devices = first[hook]
        torch.testing.assert_close(devices, host, rtol=0, atol=0.2)
        assert devices != host
