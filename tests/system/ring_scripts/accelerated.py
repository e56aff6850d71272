"""A usual script of accelerate, which forms the group first: `torchrun accelerated.py BACKEND FOLDER`."""

# pyright: reportMissingImports=false

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

import fedring.ring  # noqa: F401  # registers the backend

backend, folder = sys.argv[1:]
dist.init_process_group(backend)  # accelerate uses the group that is there
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
set_seed(7)
inputs = torch.randn(60, 6)
network = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
loader = DataLoader(TensorDataset(inputs, inputs.argmax(1) % 3), batch_size=8, shuffle=True)
model, optimizer, loader = accelerator.prepare(network, torch.optim.Adam(network.parameters(), lr=0.01), loader)
losses: list[float] = []
for _ in range(3):
    for samples, classes in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.cross_entropy(model(samples), classes)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        mean: Any = accelerator.reduce(loss.detach(), reduction="mean")
        losses.append(mean.item())
predictions = [accelerator.gather_for_metrics(model(samples).argmax(1)) for samples, _ in loader]
accelerator.save_state(f"{folder}/{backend}")
accelerator.wait_for_everyone()
accelerator.load_state(f"{folder}/{backend}")
result = {
    "backend": dist.get_backend(),
    "processes": accelerator.num_processes,
    "losses": losses,
    "predictions": sum(map(len, predictions)),
}
Path(folder, f"{backend}-{accelerator.process_index}.json").write_text(json.dumps(result))
accelerator.end_training()
