"""A usual DistributedDataParallel script, but for the backend's name. It prints one line of JSON."""

import hashlib
import json
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import fedring.ring  # noqa: F401  # registers the backend

dist.init_process_group("fedring")
torch.set_num_threads(1)
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(rank)
for _ in range(5):
    optimizer.zero_grad()
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
parameters = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
total = torch.tensor(float(rank))
dist.all_reduce(total)
result = {
    "rank": rank,
    "size": dist.get_world_size(),
    "backend": dist.get_backend(),
    "digest": hashlib.sha256(parameters.numpy().tobytes()).hexdigest(),
    "total": total.item(),
}
sys.stdout.write(json.dumps(result) + "\n")
sys.stdout.flush()
if "--forget" not in sys.argv:
    dist.destroy_process_group()
