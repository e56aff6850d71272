"""torch's tests of a distributed backend, run in forks of one process that has imported torch already.

Only tests.torch_suite runs this module, with the variables BACKEND and WORLD_SIZE set. A backend that
torch does not know declares to the suite what it has. The suite still skips some tests for every backend that it does
not name. SUITE_ANY_NAME lists such tests, with commas between them: they run although the suite would skip them.
"""

import functools
import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from typing import Any
from unittest import mock

import torch.distributed as dist
import torch.multiprocessing
from torch.testing._internal.common_distributed import DistTestCases

import fedring.ring  # noqa: F401  # registers the backend

for _feature in ("gpu", "cuda", "ddp", "subgroup", "plugin"):
    DistTestCases.backend_feature[_feature].add("fedring")

from torch.testing._internal.distributed import distributed_test  # noqa: E402  # asks for the features
from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend  # noqa: E402

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


def _for_any_name(test: Any) -> Callable[[Any], None]:
    """Return the test without the mark that skips it, and without two conditions on names in what it calls.

    torch.distributed.monitored_barrier refuses groups of all backends but Gloo; the test calls the group's method. The
    tests that accumulate gradients make a model only for names that they know; they make MPI's, which is on the CPU.
    """

    @functools.wraps(test)
    def body(self: Any) -> None:
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(dist, "monitored_barrier", _monitored_barrier))
            if test.__name__.startswith("test_accumulate_gradients"):
                stack.enter_context(mock.patch.object(distributed_test, "BACKEND", "mpi"))
            test(self)

    del body.__unittest_skip__, body.__unittest_skip_why__  # type: ignore[attr-defined]  # torch sets them
    return body


def _monitored_barrier(group: Any = None, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
    """Do what torch.distributed.monitored_barrier does with Gloo's groups."""
    chosen: Any = group or dist.group.WORLD
    if group is not dist.GroupMember.NON_GROUP_MEMBER:
        chosen.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)


for _name in filter(None, os.environ.get("SUITE_ANY_NAME", "").split(",")):
    setattr(TorchSuite, _name, _for_any_name(getattr(TorchSuite, _name)))
