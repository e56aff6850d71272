"""Training with deep gradient compression, in a script with its own loop. With two workers on one machine:

    torchrun --nproc-per-node 2 dgc.py [EPOCHS]

On several machines, start one process on each, with MASTER_ADDR, MASTER_PORT, WORLD_SIZE and its own RANK.
"""

import logging
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import fedring.ring  # noqa: F401  # registers the backend "fedring"
from fedring.data import digits
from fedring.ddp import DGC, DGCSGD, DGCState, StepLog, dgc_hook, evaluate_together
from fedring.train.models import digits_mlp

EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 else 10

dist.init_process_group("fedring")
logging.basicConfig(level=logging.INFO if dist.get_rank() == 0 else logging.WARNING, format="%(message)s")
data = digits()
torch.manual_seed(0)
network = digits_mlp()
model = DistributedDataParallel(network)
optimizer = DGCSGD(
    network.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4
)  # its momentum acts on the decay only
state = DGCState(
    None,
    DGC(ratio=0.01, warmup_epochs=2, momentum=0.9),
    named_parameters=network.named_parameters(),
    optimizer=optimizer,  # refused if it would apply the gradients' momentum a second time
)
model.register_comm_hook(state, dgc_hook)
statistics = StepLog(state, every=20)
sampler = DistributedSampler(data.train, seed=0)  # type: ignore[var-annotated]  # torch leaves its samples open
criterion = nn.CrossEntropyLoss()

for epoch in range(EPOCHS):
    state.start_epoch(epoch)  # the share of entries that is sent falls during the warm-up
    sampler.set_epoch(epoch)
    for inputs, labels in DataLoader(data.train, batch_size=32, sampler=sampler):
        optimizer.zero_grad()
        criterion(model(inputs), labels).backward()
        optimizer.step()
        statistics.step()
    counts = evaluate_together(model, data.test)
    if dist.get_rank() == 0:
        print(f"epoch {epoch + 1}: accuracy {counts.accuracy:.4f} over {counts.total} samples, loss {counts.loss:.4f}")

if dist.get_rank() == 0:
    sent = state.profile.bytes_sent / (4 * sum(p.numel() for p in network.parameters()) * state.profile.steps)
    print(f"sent {100 * sent:.1f} % of the gradients' bytes")
dist.destroy_process_group()
