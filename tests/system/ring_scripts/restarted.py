"""A script for torchrun that saves a checkpoint after each step, and goes on from it when it is restarted.

    torchrun ... restarted.py BACKEND FOLDER STEPS [KILLED_RANK]

In the first run, the rank KILLED_RANK kills itself in the middle. Each rank prints a line of JSON when it has met the
others, and when it is done.
"""

import json
import os
import signal
import sys
import time
from datetime import timedelta
from hashlib import sha256
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import fedring.ring  # noqa: F401  # registers the backend

BACKEND, FOLDER, STEPS = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
KILLED = int(sys.argv[4]) if len(sys.argv) > 4 else -1


def report(**what: object) -> None:
    """Print a line of JSON in one piece, since all ranks share the output."""
    os.write(1, f"{json.dumps(what)}\n".encode())


def main() -> None:
    begin = time.time()
    dist.init_process_group(BACKEND, timeout=timedelta(seconds=float(os.environ.get("TIMEOUT_SECONDS", "120"))))
    rank, size = dist.get_rank(), dist.get_world_size()
    report(met=rank, size=size, restart=int(os.environ["TORCHELASTIC_RESTART_COUNT"]), seconds=time.time() - begin)
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step, checkpoint, started = 0, FOLDER / "checkpoint", FOLDER / "started"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    parallel = DistributedDataParallel(model)
    dist.barrier()  # all have read the checkpoint
    while step < STEPS:
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(step * size + rank))
        optimizer.zero_grad()
        parallel(inputs).square().mean().backward()
        optimizer.step()
        step += 1
        if rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").replace(checkpoint)
        dist.barrier()
        if step == STEPS // 2 and rank == KILLED and not started.exists():
            started.touch()
            report(killed=time.time())
            os.kill(os.getpid(), signal.SIGKILL)
        if step == STEPS // 2 + 1 and rank == 0:
            report(on=time.time())
    values = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    report(done=rank, step=step, digest=sha256(values.numpy().tobytes()).hexdigest())
    dist.destroy_process_group()


main()
