"""Ranks in processes of their own, which a test can kill or freeze."""

import json
import os
import queue
import subprocess
import threading
from contextlib import ExitStack
from typing import Any

from tests.forks import Fork

PATIENCE = 100.0
SMALL = 1000  # values
OVER_TCP = {"local_transport": False, "lost_after_seconds": 60}


class Rank:
    """A `ring_worker` process, and the lines that it prints."""

    def __init__(self, rank: int, options: dict[str, Any], count: int) -> None:
        self.process = Fork(
            "tests.fault.ring_worker",
            [str(rank), json.dumps(options), str(count)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._lines: queue.Queue[dict[str, Any]] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def tell(self, line: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(f"{line}\n".encode())

    def hear(self, key: str) -> dict[str, Any]:
        """Wait for the next line with this key, and return it."""
        while key not in (line := self._lines.get(timeout=PATIENCE)):
            assert "error" not in line, line
        return line

    def end(self) -> None:
        self.process.kill()  # works on a stopped process, too
        self.process.wait()
        self._reader.join()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream
            stream.close()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self._lines.put(json.loads(line))


def ring(ended: ExitStack, size: int, count: int = SMALL, **options: Any) -> list[Rank]:
    """Start ranks, and return them when they have finished one allreduce."""
    ranks = [Rank(rank, {**OVER_TCP, **options}, count) for rank in range(size)]
    for rank in ranks:
        ended.callback(rank.end)
    members = json.dumps([rank.hear("address")["address"] for rank in ranks])
    for rank in ranks:
        rank.tell(members)
    assert [rank.hear("sum")["sum"] for rank in ranks] == [size] * size
    return ranks
