"""On a GPU, rings, hooks and simulations compute as on the host. Without a GPU, these tests are skipped.

`make gpu-test` runs them with the system tests whose daemons train on a GPU where there is one.
"""

from functools import partial
from pathlib import Path

import pytest
import torch

from tests.system.ring_scripts import gpu, ranks
from tests.system.ring_scripts.exchanges import CHECKS
from tests.system.test_ring_devices import OWN_BUCKETS, SAME

# Asking torch for GPUs would start CUDA in this process, whose forks could not use it then.
pytestmark = pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="there is no GPU of NVIDIA")


@pytest.mark.parametrize("size", [2, 3])
def test_every_collective_takes_tensors_of_a_gpu(size: int, tmp_path: Path) -> None:
    assert ranks.run(gpu.all_checks, size, tmp_path) == [[check.__name__ for check in CHECKS]] * size


def test_a_module_on_a_gpu_trains_as_on_the_host_with_every_hook(tmp_path: Path) -> None:
    first, second = ranks.run(partial(gpu.trainings, hooks=SAME + OWN_BUCKETS), 2, tmp_path)
    assert first == second
    for hook, (host, device) in first.items():
        apart = 0.2 if hook in OWN_BUCKETS else 0.01 if hook in ("int8", "topk", "dgc", "bf16") else 1e-3
        torch.testing.assert_close(device, host, rtol=0, atol=apart)


def test_sync_batch_norm_sees_the_batches_of_all_ranks(tmp_path: Path) -> None:
    for found in ranks.run(gpu.norms, 2, tmp_path):
        torch.testing.assert_close(found["synced"], found["whole"], rtol=1e-4, atol=1e-5)
