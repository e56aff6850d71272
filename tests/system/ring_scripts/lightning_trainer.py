"""A usual script of Lightning's Trainer, but for the backend's name: `python lightning_trainer.py BACKEND FOLDER`.

It trains for two epochs, continues from the checkpoint until early stopping ends the training, and tests the model.
"""

# pyright: reportMissingImports=false

import json
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import fedring.ring  # noqa: F401  # registers the backend


class Classifier(lightning.LightningModule):
    """A small network."""

    def __init__(self) -> None:
        super().__init__()
        self.network = torch.nn.Sequential(
            torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 3)
        )

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the loss of a batch."""
        return torch.nn.functional.cross_entropy(self.network(batch[0]), batch[1])

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        """Return the loss of a batch, and log its mean over the ranks."""
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], number: int) -> None:
        """Log the mean loss over the ranks."""
        self.log("val_loss", self.loss(batch), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Record(Callback):
    """Keeps what was logged in each epoch."""

    def __init__(self) -> None:
        self.epochs: list[dict[str, float]] = []

    def on_train_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Keep the metrics of the epoch."""
        self.epochs.append({name: float(value) for name, value in trainer.callback_metrics.items()})


backend, folder = sys.argv[1:]
lightning.seed_everything(7)
inputs = torch.randn(96, 6)
data = TensorDataset(inputs, inputs.argmax(1) % 3)
training, validation = torch.utils.data.random_split(data, [64, 32])
record = Record()


def trainer(epochs: int, *callbacks: Callback) -> lightning.Trainer:
    """Return a trainer with two processes."""
    options: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1}
    return lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend=backend),
        max_epochs=epochs,
        default_root_dir=f"{folder}/{backend}",
        logger=False,
        callbacks=[record, *callbacks],
        **options,
    )


checkpoints = ModelCheckpoint(f"{folder}/{backend}", monitor="val_loss", save_last=True)
loaders = DataLoader(training, batch_size=8, shuffle=True), DataLoader(validation, batch_size=8)
first = trainer(2, checkpoints)
first.fit(Classifier(), *loaders)
last = first.strategy.broadcast(checkpoints.last_model_path)
stopping = EarlyStopping("val_loss", patience=1, min_delta=10.0)  # stops after two epochs
second = trainer(50, stopping)
model = Classifier()
second.fit(model, *loaders, ckpt_path=last)
(tested,) = second.test(model, loaders[1], verbose=False)
result = {
    "backend": torch.distributed.get_backend(),
    "epochs": record.epochs,
    "stopped": second.current_epoch,
    "tested": tested,
    "weight": float(next(model.parameters()).detach().double().sum()),
}
Path(folder, f"{backend}-{second.global_rank}.json").write_text(json.dumps(result))
