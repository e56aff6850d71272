"""torch's tests of a distributed backend, run in forks of one process that has imported torch already.

Only tests.torch_suite runs this module, with the variables SUITE_BACKEND, WORLD_SIZE and BACKEND set. When the suite is
imported, it decides by the backend's name which tests to skip, and it skips every feature of a name that it does not
know. So it is imported with BACKEND=gloo, and asks for the other backend by a name that compares equal to "gloo": no
test that Gloo passes is skipped.
"""

import logging
import os
from collections.abc import Callable
from typing import Any

import torch.multiprocessing
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed import distributed_test
from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

import fedring.ring  # noqa: F401  # registers the backend


class _LikeGloo(str):
    """The name of a backend, which compares equal to "gloo"."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return other == "gloo" or str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other


distributed_test.BACKEND = _LikeGloo(os.environ["SUITE_BACKEND"])  # each test makes its group with it
_torch: Any = distributed_c10d
_get_backend = _torch.get_backend
_torch.get_backend = lambda group=None: _LikeGloo(_get_backend(group))  # monitored_barrier compares it
logging.getLogger().setLevel(logging.ERROR)


class TorchSuite(TestDistBackend, DistributedTest._DistTestBase):
    """All of torch's tests that run with several ranks on one host."""

    def setUp(self) -> None:
        """Start the ranks of the next test."""
        super().setUp()  # type: ignore[no-untyped-call]  # torch's
        context: Any = torch.multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.torch_suite_cases"])

        def process(*, target: Callable[..., None], args: tuple[Any, ...], **options: Any) -> Any:
            return context.Process(target=_in_environment, args=(dict(os.environ), target, *args), **options)

        self._start_processes(process)


def _in_environment(variables: dict[str, str], target: Callable[..., None], *args: Any, **options: Any) -> None:
    """Call `target` with the variables of the process that starts the fork, which the fork server does not have."""
    os.environ.update(variables)
    target(*args, **options)
