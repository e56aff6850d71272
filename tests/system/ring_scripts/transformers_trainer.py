"""A usual script of the Trainer of transformers, which forms the group first: `torchrun FILE BACKEND FOLDER`."""

# pyright: reportMissingImports=false

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import fedring.ring  # noqa: F401  # registers the backend


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Sequences of numbers that rise by one."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        numbers = (torch.arange(8) + index) % 16
        return {"input_ids": numbers, "labels": numbers}


backend, folder = sys.argv[1:]
dist.init_process_group(backend)  # the Trainer uses the group that is there
arguments = TrainingArguments(
    output_dir=f"{folder}/{backend}",
    use_cpu=True,
    per_device_train_batch_size=4,
    num_train_epochs=2,
    learning_rate=1e-2,
    logging_steps=1,
    eval_strategy="epoch",
    save_strategy="epoch",
    seed=7,
    report_to=[],
    disable_tqdm=True,
)
torch.manual_seed(7)
config = GPT2Config(vocab_size=16, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=Counting(), eval_dataset=Counting())
trainer.train()
trainer.train(resume_from_checkpoint=str(sorted(Path(folder, backend).glob("checkpoint-*"))[0]))
result = {
    "backend": dist.get_backend(),
    "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
    "evaluation": trainer.evaluate()["eval_loss"],
}
Path(folder, f"{backend}-{dist.get_rank()}.json").write_text(json.dumps(result))
dist.destroy_process_group()
