"""Training that goes on when a worker is lost. Start a store, and three workers (RANK is 0, 1 and 2):

    flctl store
    MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 WORLD_SIZE=3 RANK=0 python rejoin.py STEPS [MIN_SIZE]

Kill a worker, and start another one with the same RANK: the training goes on from the last step. With MIN_SIZE, the
others go on without it after ten seconds, and take a new one in later.
"""

import hashlib
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fedring.ring

STEPS = int(sys.argv[1])
SIZE = int(os.environ["WORLD_SIZE"])
MIN_SIZE = int(sys.argv[2]) if len(sys.argv) > 2 else SIZE
LAST_CALL = timedelta(seconds=float(os.environ.get("LAST_CALL_SECONDS", "10")))
PAUSE = float(os.environ.get("PAUSE_SECONDS", "0"))  # makes the steps as long as those of a larger model


def share_state(network: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> int:
    """Give all ranks rank 0's state, all of it or nothing: a group may fail at any moment."""
    shared = [network.state_dict(), optimizer.state_dict(), step]
    dist.broadcast_object_list(shared)
    network.load_state_dict(shared[0])
    optimizer.load_state_dict(shared[1])
    return int(shared[2])


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Train on this rank's batch of this step, which does not depend on what happened before."""
    generator = torch.Generator().manual_seed(step * SIZE + dist.get_rank())
    inputs = torch.randn(16, 8, generator=generator)
    optimizer.zero_grad()
    (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()


def somebody_waits() -> bool:
    """Return, on all ranks the same, whether a worker waits for a slot that is empty."""
    waits = torch.tensor(fedring.ring.waiting() if dist.get_rank() == 0 else 0)
    dist.broadcast(waits, 0)
    return bool(waits)


def digest(model: nn.Module) -> str:
    """Return what is equal only for models that are equal bit for bit."""
    values = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16]


def main() -> None:
    """Train until all steps are done."""
    torch.manual_seed(int(os.environ["RANK"]))
    network = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    step, done = 0, False
    while not done:
        fedring.ring.rejoin(min_size=MIN_SIZE, step=step, last_call_timeout=LAST_CALL)
        try:
            step = share_state(network, optimizer, step)
            model = DistributedDataParallel(network)
            print(f"goes on at step {step} as rank {dist.get_rank()} of {dist.get_world_size()}", flush=True)
            while step < STEPS and not (dist.get_world_size() < SIZE and step % 10 == 0 and somebody_waits()):
                train_step(model, optimizer, step)
                step += 1
                print(f"step {step} {digest(network)} at {time.time():.3f}", flush=True)
                time.sleep(PAUSE)
            dist.barrier()  # nobody ends as long as another one may have to repeat the last step
            done = step == STEPS
        except RuntimeError:  # torch's C++ code turns RingErrors into this
            if fedring.ring.failure() is None:
                raise
            print(f"lost at step {step}: {fedring.ring.failure()}", flush=True)
    print(f"done {step} {digest(network)}", flush=True)
    dist.destroy_process_group()


main()
