"""A usual script of Lightning Fabric, but for the backend's name: `python lightning_fabric.py BACKEND FOLDER`."""

# pyright: reportMissingImports=false

import json
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies.ddp import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset

import fedring.ring  # noqa: F401  # registers the backend

backend, folder = sys.argv[1:]
fabric = Fabric(accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend=backend))
fabric.launch()
fabric.seed_everything(7)
inputs = torch.randn(64, 6)
network = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
model, optimizer = fabric.setup(network, torch.optim.Adam(network.parameters(), lr=0.01))
loader = fabric.setup_dataloaders(DataLoader(TensorDataset(inputs, inputs.argmax(1) % 3), batch_size=8, shuffle=True))
losses: list[float] = []
for _ in range(3):
    for samples, classes in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(samples), classes)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        mean: Any = fabric.all_reduce(loss.detach(), reduce_op="mean")
        losses.append(mean.item())
path = f"{folder}/{backend}.ckpt"
fabric.save(path, {"model": model, "optimizer": optimizer, "step": len(losses)})
state = {"model": model, "optimizer": optimizer}
rest = fabric.load(path, state)
ranks: Any = fabric.all_gather(torch.tensor(fabric.global_rank))
message = fabric.broadcast({"from": fabric.global_rank}, src=0)
fabric.barrier()
result = {"losses": losses, "ranks": ranks.tolist(), "message": message, "step": rest["step"]}
result["backend"] = torch.distributed.get_backend()
Path(folder, f"{backend}-{fabric.global_rank}.json").write_text(json.dumps(result))
