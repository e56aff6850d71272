"""Runs a function as the ranks of a group, each in a process of its own."""

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

_SECONDS = 220  # for all of a run; then each process says where it hangs
_PATIENCE = 60.0  # for ranks that a busy machine keeps waiting

Body = Callable[[int, int], Any]  # of the rank and the number of ranks; what it returns must be JSON


class RankFailed(AssertionError):
    """A rank has raised, hung or died; the text says how each ended."""


def run(body: Body, size: int, folder: Path, *, backend: str = "fedring", timeout: float = _PATIENCE) -> list[Any]:
    """What `body` returned on each rank; RankFailed if one has raised or hung.

    `body` is a module's function, or a partial of one; it finds the default group ready, unless `backend` is empty.
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
    """The error that `body` raises, as JSON: its kind, its text, and the rank that it names."""
    try:
        body()
    except Exception as error:  # noqa: BLE001  # whatever it is, the test looks at it
        return {"kind": type(error).__name__, "text": str(error), "rank": getattr(error, "rank", None)}
    return {"kind": "", "text": "", "rank": None}


def _rank(body: Body, rank: int, size: int, folder: Path, *, backend: str, timeout: float) -> None:
    import torch

    import fedring.ring  # noqa: F401  # registers the backend

    with (folder / f"{rank}.err").open("w") as errors:
        faulthandler.dump_traceback_later(_SECONDS, exit=True, file=errors)
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".torch.distributed.* deprecated", FutureWarning)  # torch, of what we test
        torch.set_num_threads(1)
        try:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            os.environ.setdefault("FEDRING_RING_LOST_AFTER_SECONDS", str(_PATIENCE))
            failed = error_of(partial(_enter, backend, rank, size, folder, timeout)) if backend else {"kind": ""}
            # a rank that is still entering hears of the failure that a quicker one has caused by then
            result = failed if failed["kind"] else body(rank, size)
            _come_to_the_end(rank, size, folder)
            (folder / f"{rank}.json").write_text(json.dumps(result))
        except BaseException:  # noqa: BLE001  # the test shows it
            traceback.print_exc(file=errors)
            errors.flush()
            os._exit(1)  # at once: the others hear of it, and nothing waits for them
        finally:
            faulthandler.cancel_dump_traceback_later()


def _enter(backend: str, rank: int, size: int, folder: Path, timeout: float) -> None:
    import torch.distributed as dist

    store = f"file://{folder / 'store'}"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))


def _come_to_the_end(rank: int, size: int, folder: Path) -> None:
    """The group is left, by all who are still in it at once: nobody leaves faster than the news of a failure spread."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    ends = FileStore(str(folder / "ends"), size)
    ends.set(str(rank), "here")
    if dist.is_initialized():
        ends.wait([str(other) for other in range(size)], timedelta(seconds=_PATIENCE))
        dist.destroy_process_group()


def sum_of_ones(rank: int, size: int, *, init_method: str) -> float:
    """How many ranks meet there."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("fedring", init_method=init_method, rank=rank, world_size=size)
    one = torch.ones(())
    dist.all_reduce(one)
    return one.item()
