"""A model of scikit-learn in a federation. Usage: python scikit.py HOST:PORT [CLIENT_ID]

The server's model is a torch module, here `fedring.train.models:digits_mlp`. The same layers exist in scikit-learn's
MLPClassifier, so this client copies the weights in before each round, and out afterwards. The other clients may train
with torch.
"""

import sys

import torch
from sklearn.neural_network import MLPClassifier
from torch import nn

from fedring.client import RoundOver, connect
from fedring.data import digits
from fedring.train.models import digits_mlp
from fedring.train.plan import Plan

train = digits().train
images = torch.stack([image.flatten() for image, _ in train]).numpy()
labels = [int(label) for _, label in train]

model = digits_mlp()
layers = [layer for layer in model if isinstance(layer, nn.Linear)]


def make_classifier(plan: Plan) -> MLPClassifier:
    """Return a classifier with the weights of the torch module."""
    hidden = [layer.out_features for layer in layers[:-1]]
    rates = {"learning_rate_init": plan.lr, "momentum": plan.momentum, "nesterovs_momentum": False}
    made = MLPClassifier(hidden, solver="sgd", alpha=0, batch_size=plan.batch_size, **rates)
    made.partial_fit(images[: plan.batch_size], labels[: plan.batch_size], classes=range(10))  # makes its arrays
    for layer, weight, bias in zip(layers, made.coefs_, made.intercepts_, strict=True):
        weight[...] = layer.weight.detach().numpy().T  # scikit-learn has one row for each input
        bias[...] = layer.bias.detach().numpy()
    return made


@torch.no_grad()
def store(classifier: MLPClassifier) -> None:
    """Copy the weights of the classifier into the torch module."""
    for layer, weight, bias in zip(layers, classifier.coefs_, classifier.intercepts_, strict=True):
        layer.weight.copy_(torch.from_numpy(weight.T))
        layer.bias.copy_(torch.from_numpy(bias))


name = sys.argv[2] if len(sys.argv) > 2 else "scikit"
settings = {"server": sys.argv[1], "client_id": name, "state_dir": f"{name}-state"}

with connect(**settings) as federation:
    for task in federation:  # waits for rounds; ends on SIGTERM or federation.close()
        try:
            task.load_into(model)
            classifier = make_classifier(task.plan)
            for _ in range(task.plan.epochs):
                classifier.partial_fit(images, labels)  # one epoch
            store(classifier)
            task.submit(model, samples=len(labels), metrics={"loss": float(classifier.loss_)})
        except RoundOver as over:
            print(f"round {task.round} ended without this client: {over.reason}")
