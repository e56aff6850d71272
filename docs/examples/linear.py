"""A linear classifier of scikit-learn in a federation. Usage: python linear.py HOST:PORT [CLIENT_ID]

The model is two numpy arrays, and no torch module: docs/examples/linear.toml is the job that names them.
"""

import sys

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import SGDClassifier
from sklearn.metrics import log_loss

from fedring.client import RoundOver, connect
from fedring.data import digits

Arrays = dict[str, NDArray[np.float64]]

data = digits()
train_images, train_labels = (np.stack([np.asarray(row[part]).ravel() for row in data.train]) for part in (0, 1))
test_images, test_labels = (np.stack([np.asarray(row[part]).ravel() for row in data.test]) for part in (0, 1))
train_labels, test_labels = train_labels.ravel(), test_labels.ravel()

classifier = SGDClassifier(loss="log_loss", learning_rate="constant", eta0=0.01)
classifier.partial_fit(train_images[:1], train_labels[:1], classes=np.arange(10))  # makes its arrays
arrays: Arrays = {"coef": classifier.coef_, "intercept": classifier.intercept_}


def evaluate(arrays: Arrays) -> dict[str, float]:
    """Return the figures of a published model, which the classifier holds now, on the test samples."""
    loss = log_loss(test_labels, classifier.predict_proba(test_images), labels=range(10))
    accuracy = float(classifier.score(test_images, test_labels))
    return {"num_samples": len(test_labels), "loss": loss, "accuracy": accuracy}


name = sys.argv[2] if len(sys.argv) > 2 else "linear"
settings = {"server": sys.argv[1], "client_id": name, "state_dir": f"{name}-state"}

with connect(**settings, model=arrays, evaluate=evaluate) as federation:
    for task in federation:  # waits for rounds; ends on SIGTERM or federation.close()
        try:
            task.load_into(arrays)  # fills the classifier's own arrays
            classifier.set_params(eta0=task.plan.lr)
            for _ in range(task.plan.epochs):
                classifier.partial_fit(train_images, train_labels)  # one epoch
            task.submit(arrays, samples=len(train_labels))
        except RoundOver as over:
            print(f"round {task.round} ended without this client: {over.reason}")
