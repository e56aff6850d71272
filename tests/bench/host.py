"""Many clients in one process, each on the public `connect`: python -m tests.bench.host SERVER FOLDER FIRST COUNT SIZE.

Their threads take turns: fifty that all compute spend a third of the processor's time on passing the interpreter's lock
around, which a client in a process of its own does not.
"""

import os
import sys
import threading
from pathlib import Path
from typing import Any

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

import torch

from fedring.client import Refused, RoundOver, connect
from fedring.client.link import Link
from fedring.train.models import vector

_turn = threading.Lock()
_wait_for = Link.call


def _let_others(link: Link, work: Any) -> Any:
    """As `Link.call`, where a client waits for the server: meanwhile it is another's turn."""
    _turn.release()
    try:
        return _wait_for(link, work)
    finally:
        _turn.acquire()


def take_part(server: str, folder: Path, name: str, size: int) -> None:
    """Return every model unchanged, until the server is gone for good."""
    model = vector(size)
    with _turn, connect(server=server, client_id=name, state_dir=folder / name) as federation:
        try:
            for task in federation:
                try:
                    task.load_into(model)
                    task.submit(model, samples=1, train_seconds=0.0)
                except RoundOver:
                    continue
        except Refused as refused:
            print(f"{name}: {refused}", file=sys.stderr)


def main() -> None:
    """Host the clients; ended by SIGTERM."""
    server, folder, first, count, size = sys.argv[1:]
    torch.set_num_threads(1)
    Link.call = _let_others  # type: ignore[method-assign, assignment]
    for index in range(int(first), int(first) + int(count)):
        args = (server, Path(folder), f"client-{index:03}", int(size))
        threading.Thread(target=take_part, args=args, daemon=True).start()
    threading.Event().wait()


if __name__ == "__main__":
    main()
