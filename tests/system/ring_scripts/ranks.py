"""Run a function as the ranks of a group, each in a process of its own."""

import faulthandler
import json
import os
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from tests import forks
from tests.conftest import ROOT

PROGRAM_ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("client", "common", "protos")),
    "GRPC_VERBOSITY": "ERROR",
    "OMP_NUM_THREADS": "1",
}
"""The variables of a script that is started as users start theirs."""

_SECONDS = 220  # for a whole run; after that each process prints where it hangs
_PATIENCE = 60.0  # seconds, enough for ranks on a busy machine

Body = Callable[[int, int], Any]  # takes the rank and the number of ranks; returns what JSON can hold


class RankFailed(AssertionError):
    """A rank has raised, hung or died. The text says how each rank ended."""


def run(body: Body, size: int, folder: Path, *, backend: str = "fedring", timeout: float = _PATIENCE) -> list[Any]:
    """Run `body` on each rank, and return what it returned there.

    Args:
        body: A module's function, or a partial of one. It finds the default group ready, unless `backend` is empty.
        size: The number of ranks.
        folder: Where the ranks meet, and write results and errors.
        backend: The backend of the default group; "" = there is no default group.
        timeout: The default group's timeout, in seconds.

    Raises:
        RankFailed: A rank has raised, hung or died.
    """
    folder.mkdir(parents=True, exist_ok=True)
    codes = forks.call_all(
        [partial(_rank, body, rank, size, folder, backend=backend, timeout=timeout) for rank in range(size)],
        seconds=_SECONDS + 10,
    )
    if any(codes):
        ends = [f"rank {rank} ended with {code}" for rank, code in enumerate(codes)]
        raise RankFailed("\n".join([*ends, *(path.read_text() for path in sorted(folder.glob("*.err")))]))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


def error_of(body: Callable[[], Any]) -> dict[str, Any]:
    """Run `body`, and return the error that it raises as JSON: its kind, its text, and the rank that it names."""
    try:
        body()
    except Exception as error:  # noqa: BLE001  # the test checks whatever it is
        return {"kind": type(error).__name__, "text": str(error), "rank": getattr(error, "rank", None)}
    return {"kind": "", "text": "", "rank": None}


def _rank(body: Body, rank: int, size: int, folder: Path, *, backend: str, timeout: float) -> None:
    import torch

    import fedring.ring  # noqa: F401  # registers the backend

    with (folder / f"{rank}.err").open("w") as errors:
        faulthandler.dump_traceback_later(_SECONDS, exit=True, file=errors)
        warnings.simplefilter("error")
        warnings.filterwarnings(
            "ignore", ".torch.distributed.* deprecated", FutureWarning
        )  # torch's, of what is tested
        torch.set_num_threads(1)
        try:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            os.environ.setdefault("FEDRING_RING_LOST_AFTER_SECONDS", str(_PATIENCE))
            failed = error_of(partial(_enter, backend, rank, size, folder, timeout)) if backend else {"kind": ""}
            # A rank that is still entering notices a failure that a faster one has caused by then.
            result = failed if failed["kind"] else body(rank, size)
            _leave_together(rank, size, folder)
            (folder / f"{rank}.json").write_text(json.dumps(result))
        except BaseException:  # noqa: BLE001  # the test prints it
            traceback.print_exc(file=errors)
            errors.flush()
            os._exit(1)  # at once: the other ranks notice it, and nothing here waits for them
        finally:
            faulthandler.cancel_dump_traceback_later()


def _enter(backend: str, rank: int, size: int, folder: Path, timeout: float) -> None:
    import torch.distributed as dist

    store = f"file://{folder / 'store'}"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))


def _leave_together(rank: int, size: int, folder: Path) -> None:
    """Leave the group when all ranks do, so that no rank leaves before a failure has reached it."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    ends = FileStore(str(folder / "ends"), size)
    ends.set(str(rank), "arrived")
    if dist.is_initialized():
        ends.wait([str(other) for other in range(size)], timedelta(seconds=_PATIENCE))
        dist.destroy_process_group()


def sum_of_ones(rank: int, size: int, *, init_method: str) -> float:
    """Add ones over the ranks that meet at `init_method`, and return the sum."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("fedring", init_method=init_method, rank=rank, world_size=size)
    one = torch.ones(())
    dist.all_reduce(one)
    return one.item()
