"""Ten clients train with Flower, whose strategy halves the learning rate after each round that made things worse."""

from collections.abc import Iterable

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

CLIENTS, ROUNDS = 10, 5


def net() -> nn.Module:
    """Return the model."""
    return nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 3))


def samples() -> tuple[Tensor, Tensor]:
    """Return 2,400 inputs [2400, 20] and their classes [2400]; the last 400 are for evaluation."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(2400, 20, generator=generator)
    return inputs, (inputs @ torch.randn(20, 3, generator=generator)).argmax(1)


def received(message: Message) -> nn.Module:
    """Return the model that a message carries."""
    model = net()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    return model


client = ClientApp()


@client.train()
def train(message: Message, context: Context) -> Message:
    """Train on this client's part of the samples."""
    model, part = received(message), int(context.node_config["partition-id"])
    inputs, labels = samples()
    mine = TensorDataset(inputs[:2000][part::CLIENTS], labels[:2000][part::CLIENTS])
    optimizer = torch.optim.SGD(model.parameters(), lr=message.content["config"]["lr"], momentum=0.9)
    total = 0.0
    for batch, answers in DataLoader(mine, batch_size=16, shuffle=True):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch), answers)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(batch)
    metrics = MetricRecord({"loss": total / len(mine), "num-examples": len(mine)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)


@client.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate on this client's part of the held-out samples."""
    model, part = received(message), int(context.node_config["partition-id"])
    inputs, labels = samples()
    inputs, labels = inputs[2000:][part::CLIENTS], labels[2000:][part::CLIENTS]
    with torch.no_grad():
        outputs = model(inputs)
    loss = nn.functional.cross_entropy(outputs, labels).item()
    accuracy = (outputs.argmax(1) == labels).float().mean().item()
    metrics = MetricRecord({"loss": loss, "accuracy": accuracy, "num-examples": len(labels)})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=message)


class Careful(FedAvg):
    """Halves the learning rate after each round that made the model worse."""

    def __init__(self, lr: float) -> None:
        super().__init__(min_available_nodes=CLIENTS)
        self.lr, self.losses = lr, [float("inf")]

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send the learning rate with the model."""
        if len(self.losses) > 1 and self.losses[-1] > self.losses[-2]:
            self.lr /= 2
        config["lr"] = self.lr
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Remember the loss."""
        metrics = super().aggregate_evaluate(server_round, replies)
        if metrics is not None:
            self.losses.append(metrics["loss"])
        return metrics


def norm(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Evaluate the model on the server."""
    values = torch.cat([value.flatten() for value in arrays.to_torch_state_dict().values()])
    return MetricRecord({"norm": values.norm().item()})


server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Run all rounds."""
    strategy, first = Careful(lr=0.2), ArrayRecord(net().state_dict())
    result = strategy.start(grid=grid, initial_arrays=first, num_rounds=ROUNDS, evaluate_fn=norm)
    for number, metrics in result.evaluate_metrics_clientapp.items():
        print(number, metrics["accuracy"], result.evaluate_metrics_serverapp[number]["norm"])


if __name__ == "__main__":
    run_simulation(server_app=server, client_app=client, num_supernodes=CLIENTS)
